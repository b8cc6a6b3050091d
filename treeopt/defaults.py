"""Names, defaults and limits that the command line prints in its help, in a module that loads no numpy.

Library modules import them from here.
"""

from __future__ import annotations

# Drafters by name: heads, heads with an n-gram table, an n-gram table alone, a draft model alone or with a table.
HEADS, HEADS_NGRAM, NGRAM = "heads", "heads+ngram", "ngram"
MODEL, MODEL_NGRAM = "model", "model+ngram"
KINDS = ("static", "dynamic")  # of trees: one for all steps, or one chosen per step
AUTO = "auto"  # a batch size
AUTO_BATCH = 64  # prompts in a forward that `--batch-size auto` begins with
LEARN_TOKENS = 400_000  # sampled tokens to learn a drafter from
LEARN_SIZES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # nodes of the trees that `learn` and `compare` time
LEVELS = 8  # of a drafter with an n-gram table, those of the heads included

MAX_DEPTH = 127  # of a tree: replay counts accepted drafts in int8
STEP_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 254)  # nodes that a step may have, with the root
DEFAULT_VALUES, DEFAULT_WEIGHTS = "joint", "visits"  # of nodes and of texts, where no method is chosen
CURVE_LARGEST = 256  # nodes of the largest tree of a curve without a profile
DEFAULT_TOP_K = 32  # ranks of a level that a tree is built from
MAX_NODES = 1 << 17  # of a tree; a file of 8 MiB holds fewer where paths are long

CALIBRATION_FILE = "calibration.safetensors"
DRAFTER_FILE = "drafter.safetensors"
PROFILE_FILE = "profile.yaml"
REPORT_INPUTS_FILE = "report-inputs.json"  # in a run folder: the inputs of its report

ONE_NODE = 1  # the tree of the root alone: autoregressive decoding without heads, to which overheads refer
PROFILE_NODES = (ONE_NODE, 2, 4, 8, 16, 32, 64, 128, 256)  # the sizes that are measured by default
PROFILE_CONTEXT = 512  # tokens in the cache: a prompt and a part of its answer
PROFILE_REPEATS = 20  # rounds over all sizes, of which ten count

SWEEP_NODES = 64  # of the sparse tree that the paper compares with dense ones, root counted
EPSILONS = (0.01, 0.02, 0.03, 0.05, 0.07, 0.09, 0.12, 0.16, 0.2, 0.25)  # over the range of the paper's figure 5
EPSILON_TEMPERATURE = 0.7  # of the paper's figure 5
TOLERATED_LOSS = 0.01  # of tokens per step: less is called enough
DENSE_TREES = 500  # random dense trees
LARGEST_DENSE = 256  # nodes of the largest ones in the paper
FEWEST_DENSE = 2  # of a dense tree: the root and a draft
SWEEP_DRAWS = 5
LEVELS_SIZES = (16, 64, 256)
SIZES_SIZES = (2, 4, 8, 16, 32, 64, 128)

ATTENTIONS = ("eager", "flash")  # of the hardware model
