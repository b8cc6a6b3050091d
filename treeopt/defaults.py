"""Names, defaults and limits that the command line prints in its help, in a module that loads no numpy.

Library modules import them from here.
"""

# Drafters by name: heads, alone or with an n-gram table; a table alone; a draft model, EAGLE head or MTP layer, alone
# or with a table.
HEADS, HEADS_NGRAM, NGRAM = "heads", "heads+ngram", "ngram"
MODEL, MODEL_NGRAM = "model", "model+ngram"
EAGLE, EAGLE_NGRAM = "eagle", "eagle+ngram"
MTP, MTP_NGRAM = "mtp", "mtp+ngram"
BLOCK, BLOCK_NGRAM = "block", "block+ngram"
# Of `--draft`, without and with the table.
DRAFT_KINDS = {MODEL: MODEL_NGRAM, EAGLE: EAGLE_NGRAM, MTP: MTP_NGRAM, BLOCK: BLOCK_NGRAM}
WITH_DRAFT = (*DRAFT_KINDS, *DRAFT_KINDS.values())
KINDS = ("static", "dynamic")  # of trees: one for all steps, or one chosen per step
NONE, CHAIN = "none", "chain"  # of plans, beside `KINDS`
NODES, PATH_TOKENS = "nodes", "path tokens"  # units of the sizes of trees: these are leaves * (depth + 1)
PROFILE_KINDS = (*KINDS, CHAIN)  # of steps that are timed
AUTO = "auto"  # a batch size
AUTO_BATCH = 64  # prompts in a forward that `--batch-size auto` begins with
LEARN_TOKENS = 400_000  # sampled tokens to learn a drafter from
LEARN_SIZES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # nodes of the trees that `learn` and `compare` time
LEVELS = 8  # of a drafter with an n-gram table, those of the heads included

MAX_DEPTH = 127  # of a tree: replay counts accepted drafts in int8
STEP_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 254)  # nodes that a step may have, with the root
VALUES, WEIGHTS = ("independent", "joint"), ("uniform", "visits")
DEFAULT_VALUES, DEFAULT_WEIGHTS = "joint", "visits"  # of nodes and of texts, where no method is chosen
CURVE_LARGEST = 256  # nodes of the largest tree of a curve without a profile
DEFAULT_TOP_K = 32  # ranks of a level that a tree is built from
TOO_LARGE = 1 << 31  # for a batch, a context or the size of a step
MAX_NODES = 1 << 17  # of a tree; a file of 8 MiB holds fewer where paths are long

CALIBRATION_FILE = "calibration.safetensors"
DRAFTER_FILE = "drafter.safetensors"
PROFILE_FILE = "profile.yaml"

ONE_NODE = 1  # the tree of the root alone: autoregressive decoding without heads, to which overheads refer
PROFILE_NODES = (ONE_NODE, 2, 4, 8, 16, 32, 64, 128, 256)  # the sizes that are measured by default
PROFILE_CONTEXT = 512  # tokens in the cache: a prompt and a part of its answer
PROFILE_REPEATS = 20  # rounds over all sizes, of which ten count

LABELS, THEMES = ("rank", "probability", "token", "none"), ("auto", "light", "dark")  # of nodes, of pictures

ATTENTIONS = ("eager", "flash")  # of the hardware model
