"""What calibrate, learn, distill and train refuse before they load a model, say beforehand, and say on Ctrl-C."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest
from looped import looped
from program import error_number, treeopt, treeopt_json
from tiny import chat_base, random_heads, tiny_base

from treeopt.calibrate import pipeline
from treeopt.cli import checks
from treeopt.files.calibrations import load_calibration
from treeopt.files.drafters import load_drafter
from treeopt.models.head_files import save_heads

FEW = ("--prompts", "p.jsonl", "--max-new-tokens", "6", "--device", "cpu")


@pytest.fixture(autouse=True)
def _files() -> None:
    """Prompts and training texts."""
    Path("p.jsonl").write_text("".join(json.dumps({"instruction": f"w{i}"}) + "\n" for i in range(1, 7)))
    Path("data.jsonl").write_text('{"text": "w1", "output": "w2 w3 w4"}\n' * 8)


@pytest.fixture
def models() -> None:
    """A chat model in `base` with heads in `heads`, and a recurrent one with the same tokenizer in `mamba`."""
    chat = chat_base()
    assert chat.tokenizer is not None
    for name, base in (("base", chat), ("mamba", tiny_base("mamba"))):
        base.model.save_pretrained(name)
        chat.tokenizer.save_pretrained(name)
        save_heads(random_heads(base, 2), f"{name}-heads", base=name)


def contents() -> dict[str, bytes]:
    """Every file by its path."""
    return {str(path): path.read_bytes() for path in sorted(Path().rglob("*")) if path.is_file()}


WRONG: dict[str, tuple[tuple[str, ...], str]] = {
    "distill to another form": (("distill", "--prompts", "p.jsonl", "-o", "x.txt"), "E204"),
    "distill to no form": (("distill", "--self-talk", "2", "-o", "x"), "E204"),
    "calibrate to another form": (("calibrate", "-o", "x.yaml"), "E204"),
    "learn to another form": (("learn", "-o", "x.json"), "E204"),
    "distill nothing": (("distill", "--prompts", "empty.jsonl", "-o", "x.jsonl"), "E303"),
    "distill beyond the end": (("distill", "--prompts", "p.jsonl", "--skip", "6", "-o", "x.jsonl"), "E303"),
    "calibrate beyond the end": (("calibrate", "--prompts", "p.jsonl", "--skip", "9"), "E303"),
    "learn from nothing": (("learn", "--prompts", "empty.jsonl"), "E303"),
    "exclude what is not there": (("distill", "--self-talk", "2", "--exclude", "no.jsonl", "-o", "x.jsonl"), "E201"),
    "distill over an unfinished run": (("distill", "--self-talk", "2", "-o", "begun.jsonl"), "E202"),
    "distill over a file": (("distill", "--self-talk", "2", "-o", "file.jsonl", "--force"), "E204"),
    "distill onwards from nothing": (("distill", "--self-talk", "2", "--resume", "-o", "x.jsonl"), "E205"),
    "train on nothing": (("train", "--data", "empty.jsonl", "-o", "h"), "E303"),
    "distill with an adapter that is not there": (
        ("distill", "--self-talk", "2", "--adapter", "no/adapter", "-o", "x.jsonl"),
        "E201",
    ),
    "train on what is not there": (("train", "--data", "data.jsonl", "--data", "no.jsonl", "-o", "h"), "E201"),
    "train over an unfinished run": (("train", "--data", "data.jsonl", "-o", "run"), "E202"),
    "train onwards from nothing": (("train", "--data", "data.jsonl", "--resume", "-o", "h"), "E205"),
    "train over the metrics it learns from": (("train", "--data", "run/metrics.jsonl", "--force", "-o", "run"), "E204"),
    "train into a base": (("train", "--data", "data.jsonl", "--force", "-o", "model"), "E204"),
}


@pytest.mark.usefixtures("unloaded")
@looped("name", WRONG)
def test_wrong_input_is_refused_before_a_model_is_loaded(name: str) -> None:
    """Wrong names of outputs, missing and empty files, and folders in use are one error at once; all stays."""
    Path("empty.jsonl").write_text("\n")
    Path("begun.jsonl.partial").mkdir()
    Path("begun.jsonl.partial/begun.json").write_text("{}")
    Path("file.jsonl.partial").write_text("")
    Path("run/checkpoints").mkdir(parents=True)
    Path("run/checkpoints/begun.json").write_text("{}")
    Path("run/metrics.jsonl").write_text('{"text": "w1 w2 w3"}\n')
    Path("model").mkdir()
    Path("model/config.json").write_text('{"model_type": "llama"}')
    before = contents()
    line, number = WRONG[name]
    assert error_number(treeopt(*line, status=3)) == number
    assert contents() == before


@pytest.mark.usefixtures("unloaded")
@looped(
    "line",
    [
        "distill --self-talk 2 --resume --force -o x.jsonl",
        "distill --self-talk 2 --limit 3 -o x.jsonl",
        "distill --self-talk 2 --skip 3 -o x.jsonl",
        "distill --prompts p.jsonl --turns 2 -o x.jsonl",
        "distill --prompts p.jsonl --opening-tokens 2 -o x.jsonl",
        "train --data data.jsonl --resume --force -o h",
        "train --data data.jsonl --steps 2 --epochs 2 -o h",
        "calibrate --learn-tokens 5",
        "calibrate --drafter d.safetensors --learn-tokens 5",
        "calibrate --responses p.jsonl --temperature 1",
    ],
)
def test_options_that_exclude_each_other(line: str) -> None:
    """Options of which one has no meaning beside the other are a wrong command line."""
    before = contents()
    result = treeopt(*line.split(), status=2)
    assert "give either" in result.stderr or "belongs to" in result.stderr
    assert contents() == before


@pytest.mark.usefixtures("models")
@looped(
    "line",
    [
        ("train", "--model", "mamba", "--data", "data.jsonl", "-o", "h"),
        ("learn", "--heads", "mamba-heads", *FEW),
        ("calibrate", "--heads", "mamba-heads", *FEW, "--drafter", "heads+ngram"),
    ],
)
def test_models_that_cannot_verify_trees_are_refused(line: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads and drafters for a model that cannot verify trees are of no use: E502 before any work."""

    def work(*_given: Any, **_options: Any) -> NoReturn:
        raise AssertionError("work was begun")

    monkeypatch.setattr(pipeline, "run_calibration", work)
    monkeypatch.setattr("treeopt.train_heads", work)
    before = contents()
    assert error_number(treeopt(*line, "-q", status=3)) == "E502"
    assert contents() == before


@pytest.mark.usefixtures("models")
def test_models_that_cannot_verify_trees_are_warned_of() -> None:
    """Texts, and traces of the heads' own guesses, are worth something elsewhere: a warning, and the work is done."""
    said = treeopt("distill", "--model", "mamba", *FEW, "-o", "t.jsonl").stderr
    assert "warning: mamba (mamba) cannot verify trees" in said
    said = treeopt("calibrate", "--heads", "mamba-heads", *FEW, "-o", "c.safetensors").stderr
    assert "warning: mamba (mamba) cannot verify trees" in said
    assert "warning" not in treeopt("distill", "--model", "base", *FEW, "-o", "u.jsonl").stderr


@pytest.mark.usefixtures("models")
def test_distill_leaves_out_skipped_rows() -> None:
    """--skip and --limit are rows of the prompts' file."""
    treeopt("distill", "--model", "base", *FEW, "--skip", "2", "--limit", "3", "-o", "t.jsonl")
    rows = [json.loads(line) for line in Path("t.jsonl").read_text().splitlines()]
    assert [row["messages"][0]["content"] for row in rows] == ["w3", "w4", "w5"]


@pytest.mark.slow
@pytest.mark.usefixtures("models")
def test_learning_is_announced_and_both_files_are_named() -> None:
    """Before learning: how many answers to how many prompts, and the passes; after it: both files."""
    line = ("calibrate", "--heads", "base-heads", *FEW, "--drafter", "heads+ngram", "--learn-tokens", "1234")
    said = treeopt(*line, "-o", "c.safetensors").stderr
    assert (
        "learning generates 6 answers of up to 6 tokens to 6 prompts, samples 1,234 more tokens at temperature 0.7 "
        "(fewer if all answers repeat), counts all tokens, fits the drafter, traces the answers\n"
    ) in said
    assert said.index("learning ") < said.index("calibrate 6/6")
    assert "wrote c.safetensors and c.drafter.safetensors " in said
    drafter = load_drafter("c.drafter.safetensors")
    assert load_calibration("c.safetensors").provenance.drafter_id == drafter.id
    made = treeopt_json(*line, "-o", "d.safetensors")
    assert (made["output"], made["drafter_output"]) == ("d.safetensors", "d.drafter.safetensors")
    assert treeopt_json("calibrate", "--heads", "base-heads", *FEW, "-o", "e.safetensors")["drafter_output"] is None
    said = treeopt("learn", "--heads", "base-heads", *FEW, "--learn-tokens", "0", "-o", "l.safetensors").stderr
    assert "learning generates 6 answers of up to 6 tokens to 6 prompts, fits the drafter, traces" in said


@pytest.mark.usefixtures("models")
@looped("command", ["calibrate", "learn"])
def test_interrupted_work_says_how_to_continue(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while tokens are drawn leaves the work folder alone, and says so."""

    def interrupted(*_given: Any, **_options: Any) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(pipeline, "learn", interrupted)
    drafter = ("--drafter", "heads+ngram") if command == "calibrate" else ()
    before = contents()
    result = treeopt(command, "--heads", "base-heads", *FEW, *drafter, "-o", "x.safetensors", status=1)
    assert "interrupted; the same command with --resume continues with" in result.stderr
    shutil.rmtree("x.safetensors.partial")
    assert contents() == before


LIGHT = """
import json, sys
from click.testing import CliRunner
from treeopt.cli.app import program
for line in json.load(sys.stdin):
    result = CliRunner().invoke(program, [*line, "--json"])
    error = json.loads(result.stderr)["error"] if result.exit_code == 3 else result.exit_code
    print(error, {"torch", "transformers"} & set(sys.modules) or "")
"""


def test_missing_files_and_usage_are_refused_before_libraries_load() -> None:
    """Missing prompts, models, trees and drafters, and contradicting options load neither library."""
    lines = [
        [*command, *option]
        for command in (["calibrate"], ["validate"], ["compare"], ["learn"], ["distill", "-o", "d.jsonl"])
        for option in (["--prompts", "./none.jsonl"], ["--prompts", "p.jsonl", "--model", "./none"])
    ]
    lines += [
        ["generate", "x", "--tree", "none.yaml"],
        ["generate", "x", "--tree", "none"],
        ["generate", "x", "--drafter", "none.safetensors"],
        ["generate", "x", "--heads", "none.pt"],
        ["generate", "x", "--heads", "p.jsonl"],
        ["generate", "x", "--model", "pocket", "--draft", "./none"],
        ["generate", "x", "--acceptance", "rejection"],
        ["validate", "--tree", "none.yaml"],
        ["profile", "--model", "./none"],
        ["train", "--data", "none.jsonl", "-o", "h"],
    ]
    done = subprocess.run([sys.executable, "-c", LIGHT], input=json.dumps(lines), capture_output=True, text=True)
    assert done.stdout.split() == [
        *("E201", "E201") * 5,
        *("E201", "E104", "E201", "E201", "2", "E201", "2", "E201", "E201", "E201"),
    ], done.stderr


def test_files_are_hashed_once_they_were_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is too large is refused unread; commands that write nothing hash nothing; others their inputs."""
    hashed: list[str] = []
    monkeypatch.setattr(checks, "sha256_of", lambda path: hashed.append(str(path)) or "0" * 64)
    for name in ("large.yaml", "large.safetensors", "large.jsonl"):
        with open(name, "wb") as stream:
            stream.truncate(20 << 30)
    for line in (
        ("show", "large.yaml"),
        ("build", "--calibration", "large.safetensors"),
        ("compile", "large.yaml", "-o", "b.safetensors"),
        ("distill", "--prompts", "large.jsonl", "-o", "d.jsonl"),
        ("calibrate", "--responses", "large.jsonl"),
    ):
        assert error_number(treeopt(*line, status=3)) == "E203"
    Path("t.txt").write_text("[[0], [1]]")
    treeopt("show", "t.txt")
    assert hashed == []
    treeopt("compile", "t.txt", "-o", "b.safetensors")
    assert hashed == ["t.txt"]
