"""Valid files of every format that treeopt reads, small, as bytes; the readers' fuzzers and tests damage them."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import io
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from block_checkpoints import random_state as random_block
from helpers import make_calibration
from naive_modules import random_state
from report_pages import COMPARISON, DECODING, VALIDATION

from treeopt.calibrate.results import CalibrationShard, Shard, save_shard
from treeopt.defaults import STEP_SIZES
from treeopt.drafter import MAX_MATCH, Drafter, Level
from treeopt.drafting.count import NgramCounts
from treeopt.drafting.memory import Memory
from treeopt.export.trees import growmap, growmap_pt
from treeopt.files.calibrations import save_calibration
from treeopt.files.drafters import save_drafter
from treeopt.files.profiles import profile_yaml
from treeopt.files.schedules import schedule_yaml
from treeopt.files.tensors import write_arrays
from treeopt.files.trees import policy_yaml, tree_yaml
from treeopt.latency import LatencyPoint, LatencyProfile
from treeopt.policy import PolicyExpected, TreePolicy
from treeopt.runs.work import pack_rows
from treeopt.schedule import Schedule, ScheduledPlan
from treeopt.texts.prompts import Skipped
from treeopt.traces import StepTraces, TargetTraces
from treeopt.tree import Expected, Tree
from treeopt.verify.buffers import compile_ranks, save_buffers

HIDDEN, VOCAB = 4, 7
SOURCE: dict[str, Any] = {
    "made_by": "treeopt 1",
    "method": {"name": "joint", "nodes": 5},
    "calibration": {"model": "base", "model_id": "b1"},
    "configuration": {"build": {"nodes": 5}, "defaults": {"kind": "static"}},
}
PATHS = ((0,), (1,), (0, 0), (0, 2), (0, 0, 0))
TREE = Tree(PATHS, (0.5, 0.2, 0.25, 0.1, 0.125), Expected(1.75, 1.5, 16, 1.25, None, 2.0), SOURCE)
METRICS = """# HELP vllm:spec_decode_num_drafts_total Number of drafts.
vllm:spec_decode_num_drafts_total{engine="0"} 43.0
vllm:spec_decode_num_accepted_tokens_total{engine="0"} 10.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 6.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 4.0
"""


def _saved(write: Callable[[Path], object]) -> bytes:
    """The bytes that a function writes to a file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        write(path)
        return path.read_bytes()


def _json(data: Any) -> bytes:
    return json.dumps(data).encode()


def trees() -> list[bytes]:
    """Trees as YAML, with everything they may have, and as lists of paths."""
    whole = Tree(PATHS, TREE.values, TREE.expected, {**SOURCE, "drafter": "d.safetensors"}, "d1")
    lists = [b"[[0], [1], [0, 0]]", b"mc = [(0,), (1,), (0, 0),]  # why\n"]
    return [tree_yaml(TREE).encode(), tree_yaml(whole).encode(), tree_yaml(Tree(())).encode(), *lists]


def policies() -> list[bytes]:
    """Policies, with and without costs."""
    expected = PolicyExpected(2.5, 2.25, 7.5, 2.0, None)
    whole = TreePolicy(8, 3, "d1", ((1, 0.0), (4, 1 / 3), (8, 1.0)), expected, {**SOURCE, "drafter": "d.safetensors"})
    return [policy_yaml(one).encode() for one in (whole, TreePolicy(4, 2, "d1"))]


def schedules() -> list[bytes]:
    """Schedules of the heads, and of a drafter."""
    policy, source = TreePolicy(8, 3, "d1", ((1, 0.0), (8, 1.0))), {**SOURCE, "drafter": "d.safetensors"}
    chain = Tree(Tree.chain(2).paths, drafter="d1")
    whole = (
        ScheduledPlan(1, 64, policy, 2.5, 1.5, 1.25, 1.75),
        ScheduledPlan(4, 64, chain),
        ScheduledPlan(16, 64, Tree(())),
    )
    heads = Schedule((ScheduledPlan(1, 64, dataclasses.replace(TREE, source={})),))
    return [schedule_yaml(one).encode() for one in (Schedule(whole, source), heads)]


def profiles() -> list[bytes]:
    """A latency profile."""
    points = (
        LatencyPoint(1, 1, 64, 0.01, 0.0099, 0.0101),
        LatencyPoint(6, 1, 64, 0.0125, 0.012, 0.013, drafting=0.001),
    )
    provenance = {"model": "m", "model_id": "b1", "kind": "dynamic", "threads": 2, "versions": {"torch": "2"}}
    return [profile_yaml(LatencyProfile(points, provenance)).encode()]


def _calibrations() -> list[Any]:
    """Calibrations: heads alone; with per-step trees; with the target's probabilities."""
    rng = np.random.default_rng(0)
    plain = make_calibration([rng.geometric(0.45, (n, 3)) - 1 for n in (5, 3)], top_k=8)
    rows = len(plain.ranks)
    places = np.maximum.accumulate(np.where(plain.ranks == 255, 0, plain.ranks % 5), axis=1).astype(np.uint8)
    places[plain.ranks == 255] = 255
    steps = StepTraces(places, np.ones((rows, len(STEP_SIZES)), np.float32), np.zeros((rows, 3), np.float16))
    chances = np.where(plain.ranks[..., None] == 255, 0, 0.125).astype(np.float16) * np.ones(2, np.float16)
    return [plain, dataclasses.replace(plain, steps=steps), dataclasses.replace(plain, target=TargetTraces(chances))]


def calibrations() -> list[bytes]:
    """Calibration files."""
    return [_saved(lambda path, one=one: save_calibration(one, path)) for one in _calibrations()]


def shards() -> list[bytes]:
    """A shard of a calibration."""
    skipped = (Skipped("set:1", 9, "long"),)
    made = []
    for count in (1, 2):
        part = CalibrationShard(_calibrations()[0], Shard(0, count), 3, {"batch_size": 2}, 3, 1, skipped, skipped)
        made.append(_saved(functools.partial(save_shard, part)))
    return made


def whole_parts() -> list[bytes]:
    """Files that are merged alone: a calibration, and the one shard of a run."""
    return [calibrations()[0], shards()[0]]


def chunks() -> list[bytes]:
    """A chunk of a work folder."""
    arrays, data = pack_rows([[1, 2], [3]], names=["a"])
    return [
        _saved(lambda path: write_arrays(path, arrays, {"schema": "treeopt.chunk/1", "data": data}, overwrite=True))
    ]


def memories() -> list[bytes]:
    """Memories of the vocabulary of a model, one of them empty."""
    empty, full = Memory(1 << 12), Memory(1 << 12)
    full.fit(8, "the model")
    full.add([1, 2, 3, 4, 5], [7], [])
    return [_saved(one.save) for one in (empty, full)]


def drafters() -> list[bytes]:
    """Drafters with a table, without heads, and with a plan of each kind."""
    counts = NgramCounts(5)
    counts.add([1, 2, 3, 1, 2], [2, 3, 1, 2, 4])
    level = Level(0.5, 0.25, 1 / 3, tuple(0.1 * n for n in range(MAX_MATCH)), -3.0, ((-1.0, -2.0), (0.5, 0.25)))
    table = Drafter((level, Level(), level), 2, 3, 16, counts.table(), {"prompts": {"sha": "p.json"}, "n": 1})
    cached = dataclasses.replace(Level(), cache=(0.5, 1 / 3, 0.1, -0.25, 2.0, 1e-9))
    bare = Drafter(
        (cached, Level()), 0, 3, 16, NgramCounts(5).table(), {}, cache_prior=1 / 7, voted=4, lm_head_levels=2
    )
    tree = Tree.from_paths([(0,), (1,), (0, 0)], drafter=bare.id, expected=TREE.expected)
    policy = TreePolicy(8, 2, bare.id, ((1, 0.0), (8, 1.0)), PolicyExpected(2.5, 2.25, 7.5, 2.0, None))
    made = [table, dataclasses.replace(bare, plan=tree), dataclasses.replace(bare, plan=policy)]
    made.append(Drafter.model_only(2, 4, "draft1"))
    return [_saved(lambda path, one=one: save_drafter(one, path)) for one in made]


def buffers() -> list[bytes]:
    """A compiled tree."""
    return [_saved(lambda path: save_buffers(compile_ranks(TREE), TREE, path, {"compile": {"tree": "t"}}))]


def validations() -> list[bytes]:
    """A result of validate."""
    made = {"model": "m", "model_id": "b1", "dtype": "float32", "heads_id": "h", "drafter_id": "", "tree_id": "t"}
    return [_json({**VALIDATION, "made_with": made})]


def comparisons() -> list[bytes]:
    """A result of compare."""
    return [_json(COMPARISON)]


def decodings() -> list[bytes]:
    """A result of generate."""
    return [_json(DECODING)]


def option_files() -> list[bytes]:
    """Files for --config: options alone, by command, and those stored in files of treeopt."""
    plain = b"nodes: 8\nbuild:\n  values: joint\n  max-depth: 3\ndefaults: {kind: static}\n"
    picture = b'<svg xmlns=""></svg>\n<!-- treeopt configuration: {"build": {"nodes": 8}} -->\n'
    return [plain, b"nodes: 8\n", tree_yaml(TREE).encode(), picture]


def acceptances() -> list[bytes]:
    """What engines measured."""
    one = {"acceptance_histogram": [39, 1, 0, 3], "acceptance_histogram_by_draft_length": {"3": [1]}}
    sglang = {"meta_info": {"spec_accept_length": 2.46, "spec_verify_ct": 43, "spec_correct_drafts_histogram": [40, 3]}}
    lines = _json({**one, "num_spec_steps": 43}) + b"\n" + _json({"avg_spec_accept_length": 2.5})
    return [
        _json({"choices": [], "metrics": one}),
        _json(sglang),
        lines,
        METRICS.encode(),
        b"sglang:spec_accept_length 2.5\n",
    ]


def engine_trees() -> list[bytes]:
    """Trees of engines, as text."""
    closed = Tree(((0,), (1,), (0, 0)))
    named = [b'{"0": ["1", "2"], "1": ["3"]}', b"mc = [[0], [1], [0, 0]]"]
    return [*named, json.dumps(growmap(closed)).encode()]


def growmaps() -> list[bytes]:
    """Growmaps as .pt."""
    return [growmap_pt(Tree(((0,), (1,), (0, 0))))]


def draft_configs() -> list[bytes]:
    """Configs of models with MTP modules, and of Hydra heads."""
    return [
        _json({"num_nextn_predict_layers": 1, "text_config": {"mtp_num_hidden_layers": 2}}),
        _json({"hydra_num_heads": 4, "grounded_heads": True}),
    ]


def prompts_json() -> list[bytes]:
    """Prompts as one list."""
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]
    rows = [
        {"instruction": "Name a bird.", "input": "x", "output": "wren", "category": "c"},
        {"messages": chat},
        "text",
    ]
    return [
        _json(rows),
        b"\xef\xbb\xbf" + _json([{"text": "def f", "ids": [1, 2], "answers": [[0, 2]], "model_id": "b"}]),
    ]


def prompts_jsonl() -> list[bytes]:
    """Prompts by line."""
    return [b'{"question_id": 81, "category": "c", "turns": ["a", "b"]}\n\n{"prompt": "p", "answer": "a"}\r\n"text"\n']


def prompts_parquet() -> list[bytes]:
    """Prompts as parquet."""
    import pyarrow
    from pyarrow import parquet

    columns = {"instruction": ["a", None], "n": [1, 2], "turns": [["a"], ["b", "c"]], "when": [1.5, 2.5]}
    made = []
    for compression in ("none", "snappy"):
        stream = io.BytesIO()
        parquet.write_table(pyarrow.table(columns), stream, compression=compression)
        made.append(stream.getvalue())
    return made


def prompt_sets() -> list[bytes]:
    """The description of a prompt set."""
    return [b"schema: treeopt.prompts/1\nrepository: a/b\nfile: c.json\nreference: d\nlicense: e\n"]


EAGLE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "vocab_size": 24,
    "draft_vocab_size": 10,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 0, 1]},
}


def eagle_heads() -> list[bytes]:
    """An EAGLE-3 head in the layout of SpecForge, with a part of the vocabulary."""
    return [safetensors.torch.save(random_state("eagle3", EAGLE, 2, seed=1))]


def eagle_configs() -> list[bytes]:
    """Configs of it: of SGLang, and with ids of vLLM and settings of speculators."""
    kept = {key: value for key, value in EAGLE.items() if key != "eagle_config"}
    ids = {"eagle_aux_hidden_state_layer_ids": [1, 1, 2], "norm_before_residual": True, "target_hidden_size": 16}
    verifier = {"verifier": {"name_or_path": "tiny-llama"}}
    return [_json(EAGLE), _json({**kept, **ids, "speculators_config": verifier, "norm_output": True})]


_OF_LAYERS = {name: value for name, value in EAGLE.items() if name not in ("draft_vocab_size", "eagle_config")}
DFLASH: dict[str, Any] = {
    **_OF_LAYERS,
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "block_size": 4,
    "dflash_config": {"mask_token_id": 23, "target_layer_ids": [0, 1]},
}


def block_drafters() -> list[bytes]:
    """A DFlash drafter in the layout of z-lab."""
    return [safetensors.torch.save(random_block("dflash", DFLASH, 1))]


def block_configs() -> list[bytes]:
    """Configs of it: of z-lab, and of speculators."""
    ids = {"aux_hidden_state_layer_ids": [1, 2], "mask_token_id": 23, "block_size": 4}
    inner = {"transformer_layer_config": {**_OF_LAYERS, "model_type": "qwen3", "num_hidden_layers": 2}}
    return [_json(DFLASH), _json({"speculators_model_type": "dflash", **ids, **inner})]


@functools.cache
def heads_state() -> dict[str, torch.Tensor]:
    """The tensors of two heads in the original layout."""
    rng = torch.Generator().manual_seed(5)
    state = {}
    for h in range(2):
        state[f"{h}.0.linear.weight"] = torch.randn(HIDDEN, HIDDEN, generator=rng)
        state[f"{h}.0.linear.bias"] = torch.randn(HIDDEN, generator=rng)
        state[f"{h}.1.weight"] = torch.randn(VOCAB, HIDDEN, generator=rng)
    return state


def heads() -> list[bytes]:
    """Heads as safetensors: the original layout, and vLLM's with a token map and 8-bit weights."""
    vllm = {
        "blocks.0.layers.0.weight": torch.ones(HIDDEN, HIDDEN).to(torch.float8_e4m3fn),
        "blocks.0.layers.0.weight_scale": torch.ones(1),
        "lm_head.weight": torch.ones(3, HIDDEN),
        "token_map": torch.tensor([0, 2, 5]),
    }
    return [safetensors.torch.save(one, metadata={"format": "pt"}) for one in (heads_state(), vllm)]


def heads_pt() -> list[bytes]:
    """Heads as .pt, in both of PyTorch's formats."""
    made = []
    for new in (True, False):
        stream = io.BytesIO()
        torch.save(heads_state(), stream, _use_new_zipfile_serialization=new)
        made.append(stream.getvalue())
    return made


def heads_configs() -> list[bytes]:
    """Configs of heads."""
    vllm = {"vocab_size": 7, "truncated_vocab_size": 3, "original_lm_head": True, "dtype": "float16"}
    own = {"medusa_num_heads": 2, "base_model_name_or_path": "b", "treeopt": {"method": "Medusa-2", "base": "b1"}}
    return [_json(own), _json(vllm), _json({"medusa": {"num_medusa_heads": 3}, "medusa_fc_bias": True})]


def indexes() -> list[bytes]:
    """An index of shards of weights."""
    return [_json({"metadata": {"total_size": 9}, "weight_map": dict.fromkeys(heads_state(), "part.safetensors")})]


def model_configs() -> list[bytes]:
    """Configs of models."""
    llama = {"model_type": "llama", "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1}
    llama |= {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 11, "max_position_embeddings": 32}
    gpt2 = {"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 11, "n_positions": 32}
    return [_json({**llama, "architectures": ["LlamaForCausalLM"], "rope_theta": 1e4}), _json(gpt2)]


def generation_configs() -> list[bytes]:
    """Settings of generation."""
    return [_json({"eos_token_id": [1, 2], "pad_token_id": 0, "do_sample": False, "temperature": 1.0})]


def adapter_notes() -> list[bytes]:
    """The note of an adapter."""
    digest = hashlib.sha256(adapter_weights()[0] + adapter_configs()[0]).hexdigest()
    return [_json({"base": {"float32": "b1"}, "heads": "h1", "model": "LlamaForCausalLM", "sha256": digest})]


def adapter_configs() -> list[bytes]:
    """The config of an adapter."""
    return [_json({"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "lora_dropout": 0.0})]


def begun() -> list[bytes]:
    """The note of a run that began."""
    return [_json({"batch_size": 2, "learning": {"seed": 0}, "rows": [0, 7]})]


def marks() -> list[bytes]:
    """The mark of a checkpoint."""
    return [_json({"run": hashlib.sha256(begun()[0]).hexdigest(), "files": {"a.bin": hashlib.sha256().hexdigest()}})]


def outputs() -> list[bytes]:
    """Existing files at the place of an output."""
    return [*trees()[:1], *buffers(), *heads()[:1]]


def adapter_weights() -> list[bytes]:
    """The weights of an adapter."""
    names = ("base_model.model.q_proj.lora_A.weight", "base_model.model.q_proj.lora_B.weight")
    return [safetensors.torch.save({names[0]: torch.ones(2, HIDDEN), names[1]: torch.ones(HIDDEN, 2)})]


def tokenizers() -> list[bytes]:
    """A tokenizer of words, as tokenizer.json."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "b": 2}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return [made.to_str().encode()]
