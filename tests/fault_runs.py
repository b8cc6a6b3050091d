"""Every command that writes a file, at a tiny size, in a folder of small inputs; and what a failed run may leave."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

from broken_disk import BrokenDisk
from click.testing import CliRunner, Result
from helpers import stretches
from report_pages import COMPARISON, PROFILE, TREE, VALIDATION
from tiny import chat_base, random_heads

from treeopt.cli.app import program
from treeopt.files.calibrations import save_calibration
from treeopt.files.profiles import save_profile
from treeopt.files.trees import save_tree
from treeopt.models.head_files import save_heads
from treeopt.tree import Tree

Files = dict[str, bytes]  # contents by name
_BASE = ("--model", "base", "--device", "cpu")
_TEXTS = (*_BASE, "--prompts", "prompts.jsonl", "--max-new-tokens", "6", "--batch-size", "2")
_LEARN = ("--learn-tokens", "60")
_PLAN = ("--model", "vicuna-7b", "--device-preset", "a100-80gb-pcie")
_TRACES = ("--calibration", "calibration.safetensors")
_HEADS = ("--num-heads", "2", "--batch-size", "4", "--length", "64", "--shared-lm-head", "--steps", "2")
_PROFILE = (*_BASE, "--heads", "heads", "--sizes", "1,2", "--context", "8")
_STAGE_2 = ("--stage", "2", "--heads", "heads", "--batch-size", "4", "--steps", "2")
_TRAIN = ("train", *_BASE, "--data", "data.jsonl", "--log-every", "1", "-q")


@dataclass(frozen=True)
class Run:
    """One command line, and the files and folders that it writes, by their beginning."""

    name: str
    arguments: tuple[str, ...]
    outputs: tuple[str, ...]
    resumes: bool = False
    repeats: bool = True  # whether two runs write the same bytes: `learn` stores times


CHEAP = (
    Run("build", ("build", "--nodes", "6", "-o", "o.yaml"), ("o.yaml",)),
    Run("compile", ("compile", "tree.yaml", "-o", "o.safetensors"), ("o.safetensors",)),
    Run("curve", ("curve", "--largest", "6", "-o", "o.svg"), ("o.svg",)),
    Run("plan", ("plan", *_PLAN, "--chart", "o.svg", "-o", "o.yaml"), ("o.svg", "o.yaml")),
    Run("render svg", ("render", "tree.yaml", "-o", "o.svg"), ("o.svg",)),
    Run("render dot", ("render", "tree.yaml", "-o", "o.dot"), ("o.dot",)),
    Run("export tree", ("export", "tree.yaml", "--for", "medusa", "-o", "o.py"), ("o.py",)),
    Run("export growmap", ("export", "tree.yaml", "--for", "sequoia", "-o", "o.pt"), ("o.pt",)),
    Run("export settings", ("export", "--for", "vllm", *_TRACES, "--chain-length", "2", "-o", "o"), ("o",)),
    Run("import", ("import", "choices.txt", "-o", "o.yaml"), ("o.yaml",)),
    Run("merge", ("merge", "calibration.safetensors", "other.safetensors", "-o", "o.safetensors"), ("o.safetensors",)),
    Run("report", ("report", "--tree", "tree.yaml", "--validation", "validate.json", "-o", "o.html"), ("o.html",)),
    Run("heads convert", ("heads", "convert", "heads", "--for", "vllm", "-o", "out"), ("out",)),
)
DEAR = (
    Run("calibrate", ("calibrate", *_TEXTS, "--heads", "heads", "-o", "o.safetensors"), ("o.safetensors",), True),
    Run(
        "calibrate ngram",
        ("calibrate", *_TEXTS, *_LEARN, "--drafter", "ngram", "-o", "o.safetensors"),
        ("o.safetensors", "o.drafter.safetensors"),
        True,
    ),
    Run(
        "calibrate shard",
        ("calibrate", *_TEXTS, "--heads", "heads", "--shard", "0/2", "-o", "o.safetensors"),
        ("o.safetensors",),
        True,
    ),
    Run("learn", ("learn", *_TEXTS, *_LEARN, "-o", "o.safetensors"), ("o.safetensors",), True, False),
    Run("profile", ("profile", *_PROFILE, "-o", "o.yaml"), ("o.yaml",)),
    Run("compare", ("compare", *_TEXTS, "--methods", "lookup", "--svg", "o.svg"), ("o.svg",)),
    Run("distill", ("distill", *_TEXTS, "-o", "o.jsonl"), ("o.jsonl",), True),
    Run("train", (*_TRAIN, *_HEADS, "-o", "out"), ("out",), True),
    Run("train stage 2", (*_TRAIN, *_STAGE_2, "-o", "out"), ("out",), True),
)
DEMO = Run("demo", ("demo", "-o", "out"), ("out",))  # minutes: all steps with the built-in model


def make_inputs(folder: Path) -> None:
    """Write the inputs of all runs: a tiny model with heads, prompts, calibrations, a tree and results."""
    base = chat_base()
    base.model.save_pretrained(folder / "base")
    assert base.tokenizer is not None
    base.tokenizer.save_pretrained(folder / "base")
    save_heads(random_heads(base, 2, shared=True), folder / "heads", base=str(folder / "base"))
    said = [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2 w3 w4 w5"}]
    (folder / "data.jsonl").write_text("".join(json.dumps({"messages": said}) + "\n" for _ in range(8)))
    prompts = [{"text": f"w{i} w{i + 1} w{i + 2}"} for i in (1, 9, 17, 24)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    save_calibration(stretches(1, 24), folder / "calibration.safetensors")
    other = dataclasses.replace(stretches(2, 12), prompt_ids=tuple(f"other:{text:08}" for text in range(12)))
    save_calibration(other, folder / "other.safetensors")
    save_tree(TREE, folder / "tree.yaml")
    save_tree(Tree(((0,), (1,))), folder / "two.yaml")
    save_profile(PROFILE, folder / "profile.yaml")
    (folder / "choices.txt").write_text("[[0], [1], [0, 0]]\n")
    (folder / "validate.json").write_text(json.dumps(VALIDATION))
    (folder / "compare.json").write_text(json.dumps(COMPARISON))


def make_older(run: Run) -> None:
    """Write older outputs in the current folder, which the command may replace with --force."""
    for name in run.outputs:
        if Path(name).suffix:
            Path(name).write_text("older")
    if "out" in run.outputs:
        older = random_heads(chat_base(), 3, seed=1, shared=True)
        if run.name == "heads convert":
            save_heads(older, "older", base="base")
            assert (
                CliRunner().invoke(program, ["heads", "convert", "older", "--for", "vllm", "-o", "out"]).exit_code == 0
            )
        else:
            save_heads(older, "out", base="base")


def contents() -> Files:
    """Every file of the current folder."""
    return {str(path): path.read_bytes() for path in sorted(Path().rglob("*")) if path.is_file()}


def invoke(run: Run, *more: str) -> Result:
    """Run a command in this process."""
    return CliRunner().invoke(program, [*run.arguments, *more])


def faults_of(
    run: Run, result: Result, disk: BrokenDisk, before: dict[str, bytes], whole: dict[str, bytes]
) -> list[str]:
    """What is wrong after a run on a broken disk; empty where all is right.

    Args:
        run: the command.
        result: of it.
        disk: that it wrote to.
        before: the files before the run.
        whole: the files after a run on a sound disk.
    """
    return [*_said(result, disk), *_left(run, result, disk, before, whole)]


def _said(result: Result, disk: BrokenDisk) -> list[str]:
    """What is wrong with the exit status and the messages."""
    if result.exit_code == 0 and (disk.removing or disk.failed.split(" ")[0] in ("mkdir", "link")):
        return []  # what is removed is no result, a folder may be there already, and links are a precaution
    numbers = re.findall(r"^error\[(E\d+)\]", result.stderr, flags=re.MULTILINE)
    full = disk.number == errno.ENOSPC and not disk.removing
    expected = ({"E403"}, {4}) if full else ({"E204", "E404"}, {3, 4})
    found = [] if len(numbers) == 1 else [f"{len(numbers)} errors"]
    found += [] if {*numbers} <= expected[0] else [f"says {numbers}, expected {sorted(expected[0])}"]
    found += [] if result.exit_code in expected[1] else [f"exit {result.exit_code}: {result.stderr.strip()[-300:]}"]
    found += ["a traceback"] * ("Traceback" in result.stderr)
    return found


def _left(run: Run, result: Result, disk: BrokenDisk, before: dict[str, bytes], whole: dict[str, bytes]) -> list[str]:
    """What is wrong with the files."""
    after, found = contents(), []
    known = {name: [files.get(name) for files in (before, whole)] for name in after}
    for name, raw in after.items():
        partial = ".partial" in name or "checkpoints" in name
        hidden = os.path.basename(name).startswith(".")
        if result.exit_code == 0 and run.repeats and not hidden and whole.get(name) != raw:
            found.append(f"{name} is not whole, with exit status 0")
        if hidden or "/." in name:
            found += [] if disk.removing else [f"{name} left"]
        elif raw not in known[name] and not (partial and run.resumes):
            found.append(f"{name} is neither the old file nor the whole new one")
    for folder in (name for name in run.outputs if not Path(name).suffix):
        replaced = [name for name in after if name in before and name.startswith(f"{folder}/")]
        states = {after[name] == known[name][0] for name in replaced}
        found += [f"{folder} holds older and newer files"] * (len(states) == 2)
    found += [f"{name} is missing" for name in before if name not in after and ".partial" not in name]
    return found
