"""Options that every command treats alike: names that are empty, and the lines of long work."""

from __future__ import annotations

import importlib
import json

import click
import pytest
from looped import looped
from program import treeopt

from treeopt.cli.app import COMMANDS
from treeopt.cli.console import Console

NAMES = {
    "heads",
    "model",
    "draft",
    "prompts",
    "responses",
    "exclude",
    "data",
    "tree",
    "calibration",
    "drafter",
    "profile",
}


def test_empty_names_are_usage_errors() -> None:
    """A script's unset variable does not mean the default model, prompts or output, in any command."""
    tried = 0
    for name in COMMANDS:
        command: click.Command = importlib.import_module(f"treeopt.cli.{name}_command").command
        needed = {"train": ["--data", "d", "-o", "o"], "distill": ["-o", "o"], "export": ["--for", "vllm"]}
        given = needed.get(name, [])
        for parameter in command.params:
            option = parameter.opts[-1]
            if isinstance(parameter.type, click.Choice):
                continue  # an empty word is none of them
            if isinstance(parameter, click.Option) and option.removeprefix("--") in {*NAMES, "output"}:
                others = ["--tree=t"] if "--tree" in {o for p in command.params for o in p.opts} else []
                line = [name, *given, *others, f"{option}="]
                line += ["t"] if isinstance(command.params[-1], click.Argument) else []
                result = treeopt(*line, status=2)
                assert "it is empty" in result.stderr or "Missing argument" in result.stderr, line
                tried += "it is empty" in result.stderr
    assert tried > 30


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that stands at its one entry."""
    at = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: at[0])
    return at


def test_heartbeat_says_what_is_left(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    """Every part of the work is timed from where the one before ended, so no first line promises 0 seconds."""
    with Console(False, False).progress("build") as progress:
        for seconds, done in ((1, 1), (4, 4), (10, 10), (13, 1), (40, 10)):
            clock[0] = seconds
            progress(done, 10, "part")
    lines = [line.split("  ")[0] for line in capsys.readouterr().err.splitlines()]
    assert lines == [
        "build 1/10 10% 9 s left",
        "build 4/10 40% 6 s left",
        "build 10/10 100% 0 s left",
        "build 1/10 10% 27 s left",
        "build 10/10 100% 0 s left",
    ]


def test_heartbeat_of_work_without_progress(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing done after a while is no division by zero."""
    with Console(False, False).progress("build") as progress:
        clock[0] = 5
        progress(0, 10, "")
        progress(0, 0, "")
    assert "build 0/10 0% just begun" in capsys.readouterr().err


def test_heartbeat_of_a_total_that_grows(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    """A share that falls because there is more to do is no new part of the work."""
    with Console(False, False).progress("learn") as progress:
        for seconds, done, total in ((20, 20, 100), (60, 22, 120)):
            clock[0] = seconds
            progress(done, total, "")
    assert "learn 22/120 18% 267 s left" in capsys.readouterr().err


@looped("option", ["--sizes", "--context", "--batch-size"])
def test_numbers_of_thousands_of_digits_are_usage_errors(option: str) -> None:
    """Python refuses to read so many digits; it is the user's number, not our bug."""
    result = treeopt("profile", f"{option}={'9' * 5000}", status=2)
    assert "whole numbers from 1" in result.stderr
    assert len(result.stderr) < 500


def test_warnings_reach_programs(capsys: pytest.CaptureFixture[str]) -> None:
    """With --json a warning is part of the result; without any there is no such key."""
    console = Console(True, False)
    console.result({"a": 1})
    console.warn("warning: something")
    console.result({"a": 1})
    shown = capsys.readouterr()
    assert [json.loads(line) for line in shown.out.splitlines()] == [{"a": 1}, {"a": 1, "warnings": ["something"]}]
    assert shown.err == ""


def test_debug_escapes_control_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    """The traceback of an error holds text from files, too."""

    def fail() -> None:
        raise ValueError("\x1b[31mred")

    monkeypatch.setattr("treeopt.cli.list_command.zoo", fail)
    result = treeopt("list", "--debug", status=1)
    assert "Traceback" in result.stderr
    assert "\x1b" not in result.stderr
