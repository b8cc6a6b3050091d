"""--resume of calibrate and learn: a process killed inside a write, Ctrl-C, and a full disk."""

from __future__ import annotations

import dataclasses
import itertools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT_FOLDER
from looped import looped
from owners import owner
from program import error_number, error_of, treeopt
from torn import TORN

from treeopt.calibrate import pipeline as pipeline_module
from treeopt.calibrate import pipeline as stages_module
from treeopt.calibration import Calibration
from treeopt.files.calibrations import save_calibration
from treeopt.files.drafters import load_drafter, save_drafter
from treeopt.runs.work import Work
from treeopt.texts.encode import Text

COMMON = ["calibrate", "--limit", "6", "--max-new-tokens", "10", "--batch-size", "2", "--temperature", "0.9"]
FOLDER = Path("calibration.safetensors.partial")

# The program, whose process is killed when so many bytes of temporary files were written.
KILLED = f"""{TORN}
from treeopt.cli import main
main()
"""


@pytest.mark.slow
def test_killed_inside_a_write_and_resumed() -> None:
    """SIGKILL in the middle of what a run writes: --resume ends with the bytes of an unbroken run."""
    treeopt(*COMMON, "-o", "unbroken.safetensors")
    after = Path("unbroken.safetensors").stat().st_size // 2  # the chunks have more bytes in all
    command = [sys.executable, "-c", KILLED, str(after), *COMMON]
    environment = {**os.environ, "PYTHONPATH": str(ROOT_FOLDER)}
    done = subprocess.run(command, env=environment, capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not Path("calibration.safetensors").exists()
    treeopt(*COMMON, "--resume")
    assert Path("calibration.safetensors").read_bytes() == Path("unbroken.safetensors").read_bytes()
    assert not FOLDER.exists()


def test_first_interrupt_finishes_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first Ctrl-C in a batch lets it be stored, the next command says so; the second ends at once."""
    whole = stages_module.answer_batch
    before = signal.getsignal(signal.SIGINT)

    def interrupted(times: int) -> Any:
        def answer(*arguments: Any, **options: Any) -> Any:
            found = whole(*arguments, **options)
            if options.get("known") is None:
                for _ in range(times):
                    signal.raise_signal(signal.SIGINT)
            return found

        return answer

    with monkeypatch.context() as patch:
        patch.setattr(stages_module, "answer_batch", interrupted(2))
        result = treeopt(*COMMON, status=1)
    assert "nothing is written" in result.stderr
    assert list(Path().iterdir()) == []
    with monkeypatch.context() as patch:
        patch.setattr(stages_module, "answer_batch", interrupted(1))
        result = treeopt(*COMMON, status=1)
    assert "--resume continues" in result.stderr
    assert len(list(FOLDER.glob("answers-*"))) == 1
    assert signal.getsignal(signal.SIGINT) is before
    assert error_number(treeopt(*COMMON, status=3)) == "E202"
    treeopt(*COMMON, "--resume", "--force", status=2)
    treeopt(*COMMON, "--resume")
    treeopt(*COMMON, "-o", "unbroken.safetensors")
    assert Path("calibration.safetensors").read_bytes() == Path("unbroken.safetensors").read_bytes()


LEARNED = [*COMMON, "--drafter", "heads+ngram", "--learn-tokens", "60"]
DRAFTER = Path("calibration.drafter.safetensors")


@pytest.mark.slow
def test_stopped_between_the_drafter_and_the_calibration(monkeypatch: pytest.MonkeyPatch) -> None:
    """--resume replaces the drafter of this run, and no other, and ends with the bytes of an unbroken run."""
    expected = Path("unbroken.safetensors")

    def stopped(calibration: Calibration, *_arguments: Any, **_options: Any) -> None:
        save_calibration(calibration, expected)
        signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr("treeopt.save_calibration", stopped)
        result = treeopt(*LEARNED, status=1)
    assert "the same command with --resume continues" in result.stderr
    own = DRAFTER.read_bytes()
    assert error_number(treeopt(*LEARNED, status=3)) == "E202"
    other = dataclasses.replace(load_drafter(DRAFTER), window=7)
    save_drafter(other, DRAFTER, overwrite=True)
    assert "drafter of another run" in error_of("E202", *LEARNED, "--resume")
    assert load_drafter(DRAFTER).id == other.id
    DRAFTER.write_bytes(own)
    treeopt(*LEARNED, "--resume")
    assert DRAFTER.read_bytes() == own
    assert Path("calibration.safetensors").read_bytes() == expected.read_bytes()
    assert not FOLDER.exists()


@pytest.mark.usefixtures("unloaded")
def test_other_files_in_place_of_the_drafter() -> None:
    """With --resume too, a file of the drafter's name that is no drafter of treeopt is E202 before any work."""
    Work(Path("calibration.safetensors")).begin({})
    DRAFTER.write_text("mine")
    assert error_number(treeopt(*LEARNED, "--resume", status=3)) == "E202"
    assert DRAFTER.read_text() == "mine"


def test_interrupt_in_the_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no batch is in flight, as in the fit of a drafter, the first Ctrl-C ends the command."""
    reached = []

    def fit(*_arguments: Any, **_options: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        reached.append("after the signal")

    monkeypatch.setattr(pipeline_module, "learn", fit)
    result = treeopt(*LEARNED, status=1)
    assert reached == []
    assert "the same command with --resume continues" in result.stderr
    assert "in flight" not in result.stderr
    assert len(list(FOLDER.glob("answers-*"))) == 3


@pytest.mark.usefixtures("unloaded")
@looped("name", ["calibrate", "learn"])
def test_unfinished_runs_are_known_before_a_model_is_loaded(name: str) -> None:
    """An unfinished run, and none to resume, are errors before any model is loaded."""
    assert error_number(treeopt(name, "--resume", "-o", "out.safetensors", status=3)) == "E205"
    Work(Path("out.safetensors")).begin({})
    assert error_number(treeopt(name, "-o", "out.safetensors", status=3)) == "E202"


@pytest.mark.usefixtures("unloaded")
def test_outputs_in_use_are_known_before_a_model_is_loaded() -> None:
    """While another process writes an output, every long command is E204, with --resume and --force too."""
    texts = Path("data.jsonl")
    texts.write_text('{"text": "a", "output": "b"}\n')
    self_talk, data = ("--model", "pocket", "--self-talk", "4"), ("--model", "pocket", "--data", texts)
    runs = {
        "out.safetensors.partial": [("calibrate", "-o", "out.safetensors"), ("learn", "-o", "out.safetensors")],
        "out.jsonl.partial": [("distill", *self_talk, "-o", "out.jsonl")],
        "heads/checkpoints": [("train", *data, "-o", "heads"), ("train", *data, "--stage", "2", "-o", "heads")],
    }
    with owner(*map(Path, runs)) as process:
        before = sorted(Path().rglob("*"))
        for command in itertools.chain(*runs.values()):
            for options in ((), ("--resume",), ("--force",)):
                assert f"is in use: process {process.pid} on " in error_of("E204", *command, *options)
        assert sorted(Path().rglob("*")) == before


def test_other_texts_than_given_are_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    """A calibration that has other texts than those of its prompts, or longer ones, is not written."""
    whole = pipeline_module._answered

    def changed(change: Callable[[list[Text]], list[Text]]) -> Callable[..., Any]:
        def answer(*arguments: Any) -> Any:
            texts, skipped = whole(*arguments)
            return change(texts), skipped

        return answer

    changes: list[Callable[[list[Text]], list[Text]]] = [
        lambda texts: texts[:-1],
        lambda texts: [*texts, texts[-1]],
        lambda texts: [*texts[:-1], dataclasses.replace(texts[-1], prompt_id="other:00000000", source=None)],
        lambda texts: [*texts[:-1], dataclasses.replace(texts[-1], answer=[*texts[-1].answer, *range(10)])],
    ]
    monkeypatch.setattr(pipeline_module, "_traced", lambda *_arguments: [])
    for change in changes:
        monkeypatch.setattr(pipeline_module, "_answered", changed(change))
        stated = treeopt(*COMMON, status=1).stderr
        assert "are not those of 6 prompts with up to 10 new tokens" in stated
        assert "this is a bug in treeopt" in stated
        assert not Path("calibration.safetensors").exists()
        shutil.rmtree(FOLDER)


# The program, which suspends itself when it is to make its second batch.
SUSPENDED = """
import os, signal
from treeopt.calibrate import pipeline as stages
from treeopt.train.distill import Writer

def suspending(whole):
    calls = []
    def answer(*arguments, **options):
        if options.get("known") is None:
            calls.append(whole)
        if len(calls) == 2 and options.get("known") is None:
            os.kill(os.getpid(), signal.SIGSTOP)
        return whole(*arguments, **options)
    return answer

stages.answer_batch = suspending(stages.answer_batch)
Writer.answer_all = suspending(Writer.answer_all)
from treeopt.cli import main
main()
"""
DISTILL = ["distill", "--prompts", "prompts.txt", "--limit", "6", "--max-new-tokens", "6", "--batch-size", "2"]


@looped("name", ["calibrate", "distill"])
@pytest.mark.slow
def test_a_run_that_lives_is_not_replaced(name: str) -> None:
    """While a suspended run lives, others with its output are refused and name it; it ends with its bytes."""
    Path("prompts.txt").write_text("".join(f"def f{i}():\n" for i in range(6)))
    command, suffix = (COMMON, ".safetensors") if name == "calibrate" else (DISTILL, ".jsonl")
    output, unbroken = f"out{suffix}", Path(f"unbroken{suffix}")
    treeopt(*command, "-o", unbroken)
    run = subprocess.Popen(
        [sys.executable, "-c", SUSPENDED, *command, "-o", output, "-q"],
        env={**os.environ, "PYTHONPATH": str(ROOT_FOLDER)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    _, status = os.waitpid(run.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    try:
        for options in ((), ("--resume",), ("--force",), ("--force", "--limit", "4")):
            assert f"is in use: process {run.pid} on " in error_of("E204", *command, "-o", output, *options)
    finally:
        run.send_signal(signal.SIGCONT)
    _, errors = run.communicate()
    assert run.returncode == 0, errors
    assert Path(output).read_bytes() == unbroken.read_bytes()
    assert not [file.name for file in Path().iterdir() if "partial" in file.name]
