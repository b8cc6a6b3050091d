"""The runs of `hostile.py`."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from hostile_damage import (
    CALIBRATE,
    GENERATE,
    MODEL,
    VALIDATE,
    Run,
    edit,
    flip,
    header,
    index,
    paths,
    remove,
    tree,
    write,
)

HUGE = "9" * 40
TREES: dict[str, str | bytes] = {
    "a tree of YAML tags": tree("nodes: !!python/object/apply:os.system [ls]", "paths: []"),
    "a tree with an anchor": tree("nodes: &a 1", "paths: []", "reference: *a"),
    "nodes as text": tree("nodes: one", "paths: []"),
    "nodes of 10^30": tree("nodes: 1000000000000000000000000000000", "paths: []"),
    "a rank of 10^12": paths("1000000000000"),
    "a rank that is a float": paths("0.0"),
    "a rank that is a truth": paths("true"),
    "a value that is NaN": tree("nodes: 2", "paths:", "- {path: [0], value: .nan}"),
    "a value above one": tree("nodes: 2", "paths:", "- {path: [0], value: 1.5}"),
    "an orphan": paths("0", "1, 0"),
    "a path given twice": paths("0", "0"),
    "a path of 4,000 ranks": paths(", ".join(["0"] * 4000)),
    "a drafter file outside": tree("nodes: 1", "drafter: {id: x, file: ../../../../etc/passwd}", "paths: []"),
    "expected figures of another tree": tree(
        "nodes: 1",
        "expected_tokens_per_step: {independent: 9.0, replay: 9.0, top_k: 1, paths_sha256: x}",
        "paths: []",
    ),
    "a choices list of code": "__import__('os').system('ls')\n",
    "a choices list of truths": "[[True], [False]]\n",
    "a choices list of text": "[['0'], ['1']]\n",
    "a choices list nested 10,000 deep": "[" * 10000 + "]" * 10000,
    "a choices list cut off": "mc = [[0], [0, 0], [1",
    "a choices list of negatives": "[[-1]]",
    "a JSON object": '{"paths": [[0]]}',
    "a byte order mark in UTF-16": "\ufeffschema: treeopt.tree/1".encode("utf-16"),
    "NUL bytes": b"schema: treeopt.tree/1\0\0\n",
}
NUMBERS = (
    ["build", "--nodes", HUGE],
    ["build", "--nodes", "-1"],
    ["build", "--nodes", "1e3"],
    ["build", "--nodes", "1000000000"],
    ["build", "--max-rank", HUGE],
    ["build", "--max-depth", HUGE],
    ["build", "--max-depth", "0"],
    ["build", "--calibration", "calibration.safetensors", "--calibration", "calibration.safetensors"],
    ["build", *["--calibration", "calibration.safetensors"] * 2],
    ["build", "--kind", "dynamic", "--nodes", "255"],
    ["build", "--nodes", "auto"],
    ["build", "--values", "joint", "--weights", "uniform", "--nodes", "3"],
    ["curve", "--largest", HUGE],
    ["curve", "--largest", "1"],
    ["curve", "-o", "curve.png"],
    [*CALIBRATE, "--temperature", "inf"],
    [*CALIBRATE, "--temperature", "1e-300"],
    [*CALIBRATE, "--seed", HUGE],
    [*CALIBRATE, "--limit", "0"],
    [*CALIBRATE, "--skip", HUGE],
    [*CALIBRATE, "--batch-size", HUGE],
    [*CALIBRATE, "--max-new-tokens", HUGE],
    [*CALIBRATE, "--device", "meta"],
    [*CALIBRATE, "--device", "cuda:77"],
    [*CALIBRATE, "--device", "nonsense"],
    [*CALIBRATE, "--drafter", "heads+ngram", "--learn-tokens", "1"],
    [*CALIBRATE, "--drafter", "no-such-file"],
    [*VALIDATE, "--repeats", "0"],
    [*VALIDATE, "--batch-size", HUGE],
    [*VALIDATE, "--min-speedup", "nan"],
    [*VALIDATE, "--min-tokens-per-step", "1e300"],
    [*VALIDATE, "--judge", "-1"],
    [*VALIDATE, "--dtype", "float16"],
    [*GENERATE, "--acceptance", "typical", "--delta", "nan"],
    [*GENERATE, "--acceptance", "sample", "--top-p", "0"],
    [*GENERATE, "--acceptance", "sample", "--seed", "-1"],
    [*GENERATE, "--acceptance", "sample", "--temperature", "1e300"],
    [*GENERATE, "--max-new-tokens", "100000"],
    ["profile", *MODEL, "--sizes", "0"],
    ["profile", *MODEL, "--sizes", HUGE],
    ["profile", *MODEL, "--sizes", "1,2", "--context", HUGE],
    ["profile", *MODEL, "--sizes", "1,,2"],
    ["profile", *MODEL, "--sizes", "9" * 5000],
    ["profile", *MODEL, "--sizes", "1,2", "--batch-size", "0"],
    ["train", "--model", "model", "--data", "prompts.jsonl", "--learning-rate", "inf", "-o", "new"],
    ["train", "--model", "model", "--data", "prompts.jsonl", "--num-heads", HUGE, "-o", "new"],
    ["train", "--model", "model", "--data", "prompts.jsonl", "-o", "model"],
    ["train", "--model", "model", "--data", "prompts.jsonl", "--force", "-o", "model"],
    ["distill", "--model", "model", "--prompts", "prompts.jsonl", "-o", "new.txt"],
    [
        "distill",
        "--model",
        "model",
        "--self-talk",
        HUGE,
        "--turns",
        HUGE,
        "-o",
        "new.jsonl",
        "--max-new-tokens",
        "-1",
    ],
)


def wrong_trees() -> Iterator[Run]:
    """Damaged tree files and choices lists, in every command that reads one."""
    commands = (["show"], ["compile", "-o", "new.safetensors"], ["render", "-o", "new.svg"])
    for i, (what, content) in enumerate(TREES.items()):
        name, *more = commands[i % len(commands)]
        yield Run(f"{name}: {what}", [name, "odd.yaml", *more], write("odd.yaml", content))
    yield Run(
        "validate: a tree deeper than the heads",
        VALIDATE,
        write("mine.yaml", paths(*(", ".join("0" * depth) for depth in range(1, 7)))),
    )
    yield Run("validate: a rank beyond the vocabulary", VALIDATE, write("mine.yaml", paths("5000")))
    yield Run("generate: a tree of one node", GENERATE, write("mine.yaml", paths()))
    yield Run("show: a folder", ["show", "model"])
    yield Run("show: a calibration", ["show", "calibration.safetensors"])
    yield Run("show: a name in the zoo, misspelt", ["show", "mc_sim_7b_36"])
    yield Run("show: a calibration of other heads", ["show", "mine.yaml", "--calibration", "mine.yaml"])


def wrong_numbers() -> Iterator[Run]:
    """Options at and outside their limits."""
    for arguments in NUMBERS:
        yield Run(" ".join(arguments[:1] + arguments[-2:])[:60], list(arguments))


def wrong_prompts() -> Iterator[Run]:
    """Damaged prompt files, in calibrate, validate and distill."""
    files: dict[str, str | bytes] = {
        "empty": "",
        "blank lines": "\n\n\n",
        "a number": "5\n",
        "null rows": "null\nnull\n",
        "text that is a number": '{"text": 5}\n',
        "text that is empty": '{"text": ""}\n',
        "a lone surrogate": '{"text": "\\ud800"}\n',
        "control characters": '{"text": "\\u0000\\u001b[31m", "category": "\\u001b]0;x\\u0007"}\n',
        "messages without roles": '{"messages": [{"content": "x"}]}\n',
        "messages of an assistant alone": '{"messages": [{"role": "assistant", "content": "x"}]}\n',
        "turns that are empty": '{"turns": []}\n',
        "deep nesting": '{"text": ' + "[" * 5000 + "]" * 5000 + "}\n",
        "a row cut off": '{"text": "a"}\n{"text": "b\n',
        "Latin-1": '{"text": "é"}\n'.encode("latin-1"),
        "UTF-16": '{"text": "a"}\n'.encode("utf-16"),
        "keys given twice": '{"text": "a", "text": "b"}\n',
        "a prompt of 200,000 words": json.dumps({"text": "word " * 200_000}) + "\n",
        "one token": '{"text": "a"}\n',
        "equal prompts": '{"text": "def f(x):"}\n' * 4,
        "emoji and marks of direction": '{"text": "\U0001f469\u200d\U0001f4bb \u202e abc", "category": "\u202ex"}\n',
    }
    commands = (CALIBRATE, VALIDATE, ["distill", "--model", "model", "--prompts", "prompts.jsonl", "-o", "new.jsonl"])
    for i, (what, content) in enumerate(files.items()):
        command = [*commands[i % len(commands)], "--max-new-tokens", "4"]
        yield Run(f"{command[0]}: prompts: {what}", command, write("prompts.jsonl", content))
    for suffix in (".csv", ".parquet", ".json", ".txt"):
        name = f"odd{suffix}"
        line = ["calibrate", *MODEL, "--prompts", name, "-o", "new.safetensors"]
        yield Run(f"calibrate: NUL bytes as {suffix}", line, write(name, b"\0\0PAR1\0"))
    responses = ["calibrate", *MODEL, "--responses", "r.jsonl", "-o", "new.safetensors"]
    for what, row in {
        "answers that are empty": '{"instruction": "a", "output": ""}\n',
        "answers that are numbers": '{"instruction": "a", "output": 5}\n',
        "answers of 100,000 words": json.dumps({"instruction": "a", "output": "x " * 100_000}) + "\n",
    }.items():
        yield Run(f"calibrate: {what}", responses, write("r.jsonl", row))
    yield Run("generate: an empty prompt", ["generate", "", *GENERATE[2:]])
    yield Run("generate: bytes that are no text", ["generate", "-", *GENERATE[2:]], stdin=b"\xff\xfe\x00")


def wrong_models() -> Iterator[Run]:
    """Damaged folders of models and heads."""
    weights, heads = "model/model.safetensors", "model/heads/medusa_lm_head.safetensors"
    for what, prepare in {
        "weights cut off": lambda: os.truncate(weights, 1000),
        "weights empty": lambda: os.truncate(weights, 0),
        "weights with a huge header": write(weights, header(b"{}", 1 << 60)),
        "weights without tensors": write(weights, header(b"{}")),
        "weights missing": remove(weights),
        "config missing": remove("model/config.json"),
        "config empty": write("model/config.json", ""),
        "config a list": write("model/config.json", "[]"),
        "config of another family": edit("model/config.json", model_type="mamba"),
        "config of no family": edit("model/config.json", model_type="nonsense"),
        "config with a larger vocabulary": edit("model/config.json", vocab_size=10**6),
        "config with no layers": edit("model/config.json", num_hidden_layers=0),
        "config with more layers": edit("model/config.json", num_hidden_layers=99),
        "config with text for a number": edit("model/config.json", hidden_size="large"),
        "config with a negative context": edit("model/config.json", max_position_embeddings=-5),
        "tokenizer empty": write("model/tokenizer.json", "{}"),
        "tokenizer garbage": write("model/tokenizer.json", b"\xff" * 100),
        "generation config a list": write("model/generation_config.json", "[]"),
        "end of text as a word": edit("model/generation_config.json", eos_token_id="end"),
        "heads cut off": lambda: os.truncate(heads, 1000),
        "heads with a byte changed": flip(heads, 20),
        "heads' config with a number as base": edit("model/heads/config.json", base_model_name_or_path=5),
        "heads' config with too many heads": edit("model/heads/config.json", medusa_num_heads=10**9),
        "heads' config as a list": write("model/heads/config.json", "[1]"),
        "an index that points outside": index('{"metadata": {}, "weight_map": {"a": "../elsewhere.safetensors"}}'),
        "an index that names an absolute path": index('{"metadata": {}, "weight_map": {"a": "/etc/passwd"}}'),
        "an index that is a list": index("[]"),
    }.items():
        for command in (GENERATE, CALIBRATE)[: 2 if "heads" in what else 1]:
            yield Run(f"{command[0]}: {what}", command, prepare)


def wrong_files() -> Iterator[Run]:
    """Damaged calibrations and profiles, and impossible outputs."""
    calibration = Path("calibration.safetensors")
    for what, prepare in {
        "calibration cut off": lambda: os.truncate(calibration, 100),
        "calibration with a byte changed": flip(str(calibration), -3),
        "calibration of another schema": write(str(calibration), header(b'{"__metadata__":{"treeopt":"{}"}}')),
        "calibration with a deep header": write(str(calibration), header(b"[" * 100_000)),
        "a folder in its place": remove(str(calibration), folder=True),
    }.items():
        yield Run(f"build: {what}", ["build", "-o", "new.yaml"], prepare)
    build = ["build", "--nodes", "auto", "--profile", "profile.yaml", "-o", "new.yaml"]
    yield Run("build: a profile of no points", build, write("profile.yaml", "schema: treeopt.latency/1\npoints: []\n"))
    yield Run("build: a profile that is a tree", build, lambda: shutil.copy("mine.yaml", "profile.yaml"))
    for output in (
        "-",
        "",
        "x" * 300,
        "no/such/folder/t.yaml",
        "model",
        "/dev/null",
        "/dev/full",
        "prompts.jsonl",
        ".",
    ):
        yield Run(f"build: -o {output[:12]!r}", ["build", "-o", output])
    yield Run("render: -o of no known kind", ["render", "mine.yaml", "-o", "t.xyzzy"])
    yield Run("build: its input as output", ["build", "--force", "-o", "calibration.safetensors"])
    yield Run("calibrate: its weights as output", [*CALIBRATE[:-1], "model/model.safetensors", "--force"])
    yield Run("build: a link to nowhere", ["build", "-o", "link"], lambda: Path("link").symlink_to("nowhere/x"))
    partial = ["distill", "--model", "model", "--prompts", "prompts.jsonl", "--resume", "-o", "new.jsonl"]
    for what, content in {
        "garbage": b"\xff\xfe\0",
        "a list": b"[]\n",
        "a foreign header": b'{"schema": "x"}\n',
    }.items():
        yield Run(f"distill: --resume with {what}", partial, write("new.jsonl.partial", content))
    yield Run("demo: into a folder that is a file", ["demo", "-o", "prompts.jsonl"])
    yield Run("an option that is none", ["build", "--nodse", "4"])
    yield Run("a command that is none", ["\x1b[31mbild"])


def all_runs() -> list[Run]:
    """Every run."""
    parts = (wrong_trees, wrong_numbers, wrong_prompts, wrong_models, wrong_files)
    return [run for part in parts for run in part()]
