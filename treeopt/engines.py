"""The engines that take a fixed tree: what each reads, and the limits beyond which it fails or misreads the tree.

The names are those of `--for` of `treeopt export`, `build` and `show`. Sources are in docs/develop/formats.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

ALL_LEVELS = 127  # of `contiguous`: every level of a tree
HEADS_DRAFT, MODEL_DRAFT, EAGLE_DRAFT, HYDRA_DRAFT, ANY_DRAFT = "heads", "model", "eagle", "hydra", "any"
MTP_DRAFT, BLOCK_DRAFT, LOOKUP_DRAFT = "mtp", "block", "lookup"  # of engines without trees; lookup: their own n-grams


@dataclass(frozen=True)
class Engine:
    """One engine, or one of its formats for trees.

    `drafts` is what the ranks refer to in it: `heads` (rank r of head d), `model` (the r-th likeliest token of a draft
    model after the node above), `eagle` and `hydra` (the same of an EAGLE head and of grounded Hydra heads), or `any`.
    `setting` is an option, an argument or a file of the engine; `{drafts}` and `{nodes}` are the numbers without and
    with the root, `{depth}` the depth.
    """

    name: str  # of `--for`
    reader: str  # the programs that read the format
    versions: str  # of these programs
    drafts: str
    setting: str  # where the content goes
    contiguous: int = 0  # levels, from the first, whose siblings must have the ranks 0, 1, .. without a gap
    max_rank: int | None = None  # the largest rank that the engine reads rightly
    max_depth: int | None = None  # the largest depth that it reads rightly; None for no limit but that of its drafter
    max_nodes: int | None = None  # root counted, up to which files are written
    default_drafts: int | None = None  # of an engine that was built with default options
    reason: str = ""  # why ranks, depth or gaps are limited

    @property
    def lost(self) -> str:
        """The parts of a treeopt file that the format does not hold."""
        drafter = "" if self.drafts in (HEADS_DRAFT, ANY_DRAFT) else ", which drafter the ranks are of"
        return f"values, expected tokens per step, source{drafter}"


_TOPK = "its buffers hold ten drafts a head: rank 10 is read as the best draft of the next head"
_PACKED = "a prefix is packed into 4 bits a rank and 32 bits in all"

ENGINES = {
    engine.name: engine
    for engine in (
        Engine(
            "medusa",
            "FasterDecoding/Medusa, Spec-Bench",
            "Medusa to e2a5d20 (2024-04), Spec-Bench fd2c1cd",
            HEADS_DRAFT,
            "medusa_generate(..., medusa_choices=CONTENT), or --medusa-choices 'CONTENT'",
            max_rank=9,
            max_depth=5,
            reason=f"{_TOPK}; its loader makes five heads, whatever the config says",
        ),
        Engine(
            "nxdi",
            "AWS NxD Inference, Medusa",
            "to 4bcdc54 (2026-07)",
            HEADS_DRAFT,
            "--is-medusa --num-medusa-heads H --medusa-speculation-length {nodes} --medusa-tree-json FILE, with "
            "H >= {depth}",
            max_rank=9,
            reason=_TOPK,
        ),
        Engine(
            "nxdi-eagle",
            "AWS NxD Inference, EAGLE-1 and EAGLE-2",
            "to 4bcdc54 (2026-07); not EAGLE-3",
            EAGLE_DRAFT,
            "--token-tree-json FILE, or token_tree_config in the NeuronConfig",
            contiguous=ALL_LEVELS,
            reason="children are listed in the order of their ranks, so a rank cannot be left out",
        ),
        Engine(
            "trtllm",
            "TensorRT-LLM, TensorRT backend, Medusa and EAGLE",
            "to 1.2.x",
            HEADS_DRAFT,
            "MedusaDecodingConfig(medusa_choices=CONTENT, max_draft_len={drafts} or more, num_medusa_heads=H), H >= "
            "{depth}; run.py --medusa_choices='CONTENT'; EAGLE: eagle_choices=CONTENT",
            contiguous=1,
            max_rank=15,
            max_depth=8,
            default_drafts=63,
            reason=f"the Python runtime reads the ranks of level 1 as 0, 1, ..; in the C++ runtime {_PACKED}",
        ),
        Engine(
            "triton",
            "Triton, tensorrtllm_backend",
            "with TensorRT-LLM to 1.2.x",
            HEADS_DRAFT,
            'config.pbtxt: decoding_mode: medusa, medusa_choices: "CONTENT" (EAGLE: eagle_choices)',
            max_rank=15,
            max_depth=8,
            default_drafts=63,
            reason=_PACKED,
        ),
        Engine(
            "sequoia",
            "Infini-AI-Lab/Sequoia",
            "to 0ff3ff7",
            MODEL_DRAFT,
            "--growmap FILE (the .pt file; .json has the same content for other programs)",
            contiguous=ALL_LEVELS,
            max_nodes=2048,
            reason="a growmap holds the number of children of each node, so a rank cannot be left out",
        ),
        Engine(
            "eagle",
            "SafeAILab/EAGLE, EAGLE-1",
            "branch v1",
            EAGLE_DRAFT,
            "in place of mc_sim_7b_63 in eagle/model/choices.py, and eagenerate(tree_choices=mc_sim_7b_63): both",
            max_rank=9,
            reason="its drafter takes the ten most likely tokens after each node",
        ),
        Engine(
            "hydra",
            "zankner/Hydra, grounded heads",
            "to 7f39cbd",
            HYDRA_DRAFT,
            "hydra_generate(..., hydra_choices=CONTENT); hydra_num_heads {depth} or more and grounded_heads true in "
            "the heads' config: heads that are not grounded misread it",
            contiguous=ALL_LEVELS,
            reason="the children of a node are its k likeliest tokens, so a rank cannot be left out",
        ),
        Engine(
            "json",
            "programs that read paths of ranks",
            "any",
            ANY_DRAFT,
            "paths sorted by (length, path); node 0 is the root, node i the i-th path",
        ),
    )
}


@dataclass(frozen=True)
class EngineMethod:
    """One way in which an engine drafts chains."""

    drafts: str  # as in `Engine.drafts`, or `MTP_DRAFT`, `BLOCK_DRAFT`, `LOOKUP_DRAFT`
    by_batch: bool = False  # whether it takes a length for each batch
    model: bool = True  # whether the path of a drafter must be given


@dataclass(frozen=True)
class SettingsEngine:
    """An engine that takes no fixed tree, for `treeopt export --calibration` and `--measured`."""

    versions: str  # whose settings are written
    methods: Mapping[str, EngineMethod] = field(default_factory=dict)  # by its names; empty where any drafter does
    trees: tuple[str, ...] = ()  # the drafters of its dynamic trees


# Read in vLLM 0.33.0 (vllm/config/speculative.py, vllm/v1/spec_decode), SGLang 0.5.23 (sglang/srt/arg_groups),
# TensorRT-LLM (tensorrt_llm/llmapi/llm_args.py, tensorrt_llm/_torch/speculative/interface.py), llama.cpp in
# llama-cpp-python 0.3.36 (common/arg.cpp, common/speculative.cpp) and transformers 5.24 (generation).
SETTINGS = {
    "vllm": SettingsEngine(
        "vLLM 0.24 to 0.33; medusa to 0.32, draft_model by batch from 0.25",
        {
            "medusa": EngineMethod(HEADS_DRAFT),
            "draft_model": EngineMethod(MODEL_DRAFT, by_batch=True),
            "eagle": EngineMethod(EAGLE_DRAFT, by_batch=True),
            "eagle3": EngineMethod(EAGLE_DRAFT, by_batch=True),
            "mtp": EngineMethod(MTP_DRAFT, by_batch=True, model=False),
            "dflash": EngineMethod(BLOCK_DRAFT, by_batch=True),
            "dspark": EngineMethod(BLOCK_DRAFT, model=False),
            "ngram": EngineMethod(LOOKUP_DRAFT, by_batch=True, model=False),
            "ngram_gpu": EngineMethod(LOOKUP_DRAFT, model=False),
            "suffix": EngineMethod(LOOKUP_DRAFT, model=False),
        },
    ),
    "sglang": SettingsEngine(
        "SGLang 0.5; DFLASH and DSPARK 0.5.23",
        {
            "STANDALONE": EngineMethod(MODEL_DRAFT),
            "EAGLE": EngineMethod(EAGLE_DRAFT, by_batch=True),
            "EAGLE3": EngineMethod(EAGLE_DRAFT, by_batch=True),
            "NEXTN": EngineMethod(MTP_DRAFT, by_batch=True, model=False),
            "DFLASH": EngineMethod(BLOCK_DRAFT),
            "DSPARK": EngineMethod(BLOCK_DRAFT),
            "NGRAM": EngineMethod(LOOKUP_DRAFT, model=False),
        },
        (MODEL_DRAFT, EAGLE_DRAFT),
    ),
    "trtllm": SettingsEngine(
        "TensorRT-LLM 1.3, PyTorch backend",
        {
            "Draft_Target": EngineMethod(MODEL_DRAFT, by_batch=True),
            "Eagle3": EngineMethod(EAGLE_DRAFT, by_batch=True),
            "MTP": EngineMethod(MTP_DRAFT, by_batch=True, model=False),
            "PARD": EngineMethod(BLOCK_DRAFT, by_batch=True),
            "DFlash": EngineMethod(BLOCK_DRAFT, by_batch=True),
            "SA": EngineMethod(LOOKUP_DRAFT, by_batch=True, model=False),
            "NGram": EngineMethod(LOOKUP_DRAFT, model=False),
        },
    ),
    "llamacpp": SettingsEngine(
        "llama.cpp from 2026-06 (--spec-draft-*); before: --draft-max, --draft-min, --draft-p-min",
        {
            "draft-simple": EngineMethod(MODEL_DRAFT),
            "draft-eagle3": EngineMethod(EAGLE_DRAFT),
            "draft-mtp": EngineMethod(MTP_DRAFT, model=False),
            "draft-dflash": EngineMethod(BLOCK_DRAFT),
            "draft-dspark": EngineMethod(BLOCK_DRAFT),
            "ngram-simple": EngineMethod(LOOKUP_DRAFT, model=False),
            "ngram-map-k": EngineMethod(LOOKUP_DRAFT, model=False),
            "ngram-map-k4v": EngineMethod(LOOKUP_DRAFT, model=False),
            "ngram-mod": EngineMethod(LOOKUP_DRAFT, model=False),
        },
    ),
    "transformers": SettingsEngine(
        "transformers 5.24",
        {"assistant_model": EngineMethod(MODEL_DRAFT), "prompt_lookup": EngineMethod(LOOKUP_DRAFT, model=False)},
    ),
    "chain": SettingsEngine("any engine with chains"),
}

# Layout of Medusa heads, of `treeopt heads convert --for` -> the programs and versions that read it.
HEAD_READERS = {
    "medusa": "FasterDecoding/Medusa to e2a5d20, Spec-Bench, TensorRT-LLM to 1.2 (its TensorRT backend)",
    "tgi": "text-generation-inference to db931fc, LoRAX to a7394ba",
    "vllm": "vLLM 0.6 to 0.32; 0.33 has no Medusa",
    "nxdi": "AWS NxD Inference to 4bcdc54, Llama models",
}
