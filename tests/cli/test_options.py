"""Options that every command treats alike: names, numbers, messages, progress, colors, and one meaning for each."""

from __future__ import annotations

import ast
import importlib
import json
import logging
import os
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from looped import looped
from program import all_commands, treeopt

import treeopt as treeopt_package
from treeopt.cli.app import COMMANDS
from treeopt.cli.configuration import COMMON
from treeopt.cli.console import Console
from treeopt.cli.generate_command import _streamed
from treeopt.cli.numbers import SEED, FiniteRange, Temperature
from treeopt.cli.terminal import QUIET_LIBRARIES
from treeopt.decode.stream import Piece
from treeopt.errors import Code, TreeoptError

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
        command: click.Command = importlib.import_module(f"treeopt.cli.{name}_command").run
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


def options() -> Iterator[tuple[str, click.Option]]:
    """Every option of every command."""
    for name in COMMANDS:
        command: click.Command = importlib.import_module(f"treeopt.cli.{name}_command").run
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                yield name, parameter


FLOATS = [(name, option) for name, option in options() if isinstance(option.type, click.types.FloatParamType)]


def test_every_float_option_is_finite() -> None:
    """No command takes a float by a type that lets NaN pass."""
    assert len(FLOATS) > 10
    assert {name for name, option in FLOATS if not isinstance(option.type, FiniteRange)} == set()


@looped("value", ["nan", "inf", "-inf", "1e999", "NaN"])
def test_not_finite_is_a_usage_error(value: str) -> None:
    """Every float option refuses it, by name, before anything is loaded."""
    for name, option in FLOATS:
        result = treeopt(name, f"{option.opts[0]}={value}", status=2)
        assert option.opts[0] in result.stderr, result.stderr


def test_every_seed_fits_every_generator() -> None:
    """A seed beyond 63 bits, or a negative one, is a usage error in every command that has one."""
    seeds = [(name, option) for name, option in options() if "--seed" in option.opts]
    assert len(seeds) >= 5
    for name, option in seeds:
        assert option.type is SEED
        for value in ("-1", str(2**63), "9" * 400):
            assert "--seed" in treeopt(name, f"--seed={value}", status=2).stderr


@looped(("text", "number"), [("0.5", 0.5), ("1e-300", 1e-300), ("1", 1.0)])
def test_finite_numbers_pass(text: str, number: float) -> None:
    """What is finite and in the range is taken as it is."""
    assert FiniteRange(min=0).convert(text, None, None) == number


def test_every_temperature_is_one_that_logits_can_be_divided_by() -> None:
    """Below 1e-6 logits would overflow: a usage error in every command that samples, but for 0."""
    temperatures = [(name, option) for name, option in options() if "--temperature" in option.opts]
    assert len(temperatures) >= 4
    for name, option in temperatures:
        assert isinstance(option.type, Temperature)
        assert "1e-06" in treeopt(name, "--temperature=1e-300", status=2).stderr
    assert Temperature().convert("0", None, None) == 0.0
    assert Temperature().convert("1e-6", None, None) == 1e-6


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[logging.Logger]:
    """The logger of the library, and the environment, as they were before."""
    found = logging.getLogger("treeopt")
    handlers, level = list(found.handlers), found.level
    found.handlers.clear()
    for name in QUIET_LIBRARIES:
        monkeypatch.setenv(name, os.environ.get(name, "1"))
    yield found
    found.handlers[:] = handlers
    found.setLevel(level)


def test_every_command_has_the_common_options() -> None:
    """Each of them, by name."""
    for name, one in all_commands():
        if not isinstance(one, click.Group):
            assert {parameter.name for parameter in one.params} >= set(COMMON), name


_CLAUSES = re.compile(r"[,;:]|\\bor\\b|\\band\\b")


def remedies() -> Iterator[tuple[str, str]]:
    """Every remedy in the source and the defaults, with its place; its values are in braces."""
    yield from ((code.value[0], TreeoptError(code, "").fix) for code in Code)
    for path in sorted(Path(treeopt_package.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.keyword) and node.arg == "fix":
                yield f"{path.name}:{node.value.lineno}", ast.unparse(node.value)


def test_remedies_name_options_that_exist() -> None:
    """An option is one of a command, and of the command that is named before it in the same clause."""
    options_common_options = {
        name: {word for one in command.params for word in one.opts} for name, command in all_commands()
    }
    every = set().union(*options_common_options.values())
    found = 0
    for place, text in remedies():
        for clause in _CLAUSES.split(text):
            words = re.findall(r"(?<![\w-])(?:--[a-z][a-z-]*[a-z](?![\w-]|\d)|[a-z]+)", clause)
            before = ["treeopt", *words]  # a command stands first, or after the program's name
            commands = [
                word
                for last, word in zip(before, words, strict=False)
                if last == "treeopt" and word in options_common_options
            ]
            for option in filter(re.compile("--").match, words):
                found += 1
                assert option in (options_common_options[commands[-1]] if commands else every), f"{place}: {text}"
    assert found > 60


def test_verbose_prints_messages_of_libraries(log: logging.Logger) -> None:
    """Our library's messages of every level go to standard error, and transformers prints its own."""
    with CliRunner().isolation() as (_, err, _):
        Console(False, verbose=True)
        logging.getLogger("treeopt.decode").debug("a detail")
    assert b"a detail" in err.getvalue()
    assert os.environ["TRANSFORMERS_VERBOSITY"] == "info"
    assert "TQDM_DISABLE" not in os.environ
    assert log.level == logging.DEBUG


def test_messages_are_not_printed_without_verbose(log: logging.Logger) -> None:
    """In a pipe nothing is printed but notes of the command."""
    Console(False)
    assert log.handlers == []
    assert "TQDM_DISABLE" in os.environ


def test_quiet_and_verbose_exclude_each_other() -> None:
    """Neither is chosen for the user."""
    assert "give either --quiet or --verbose" in treeopt("list", "-q", "-v", status=2).stderr


def test_no_progress_leaves_notes(capsys: pytest.CaptureFixture[str]) -> None:
    """The lines of progress are left out, other notes are not."""
    for no_progress, expected in ((False, "build 1/1 100% 0 s left  \nnote\n"), (True, "note\n")):
        console = Console(False, no_progress=no_progress)
        with console.progress("build") as progress:
            progress(1, 1, "")
        console.note("note")
        assert capsys.readouterr().err == expected


@looped(
    ("variables", "colored"),
    [({}, False), ({"FORCE_COLOR": "1"}, True), ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False)],
)
def test_colors_in_a_pipe(
    variables: dict[str, str], colored: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """NO_COLOR is before FORCE_COLOR; the text is the same."""
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {**variables, "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)
    console = Console(False)
    nothing: Any = None
    pieces = [Piece(nothing, "Once"), Piece(nothing, " upon")]
    assert list(_streamed(iter(pieces), console)) == pieces
    printed = capsys.readouterr().out
    assert ("\x1b[" in printed) == colored
    assert click.unstyle(printed) == "Once upon" + "\n" * colored  # in a pipe without colors byte for byte


# Options whose values differ in kind between commands, with the reason.
SEVERAL_KINDS = {
    "--nodes": "build takes auto; plan takes a list",
    "--context": "profile and plan take lists",
    "--drafter": "build takes auto alone",
    "--dtype": "learn and compare take several",
    "--batch-size": "profile and plan take lists; commands that store their batches take auto",
}
# Options that name the same kind of thing with another use in some commands, which their help describes.
SEVERAL_TEXTS = {
    *SEVERAL_KINDS,
    *("--calibration", "--profile", "--output", "--kind", "--temperature", "--draft", "--heads", "--model"),
    *("--acceptance", "--for", "--force", "--resume", "--largest", "--num-heads", "--repeats"),
    *("--seed", "--levels", "--learn-tokens", "--shared-lm-head", "--memory"),
    *("--tree", "--title", "--limit"),
}


def options_common_options() -> Iterator[tuple[str, str, click.Option]]:
    """Name, command and record of each option that is not common."""
    for command, one in all_commands():
        for option in one.params:
            if isinstance(option, click.Option) and option.name not in COMMON:
                yield max(option.opts, key=len), command, option


def kind(option: click.Option) -> str:
    """What an option takes: a flag, a choice, a number or a text."""
    if option.is_flag:
        return "flag"
    if isinstance(option.type, click.Choice):
        return "choice"
    return {click.IntRange: "integer", click.FloatRange: "number"}.get(
        next((base for base in type(option.type).__mro__ if base in (click.IntRange, click.FloatRange)), object), "text"
    )


def differing(seen: dict[str, dict[str, list[str]]], allowed: Any) -> dict[str, dict[str, list[str]]]:
    """The options_common_options with several values over commands, beyond those allowed."""
    return {name: dict(values) for name, values in seen.items() if len(values) > 1 and name not in allowed}


def test_an_option_takes_one_kind_of_value() -> None:
    """The same name means the same over all commands; the exceptions are listed, and are exceptions."""
    seen: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name, command, option in options_common_options():
        seen[name][kind(option)].append(command)
    assert differing(seen, SEVERAL_KINDS) == {}
    several = differing(seen, ())
    lists = {"--context", "--nodes", "--drafter"}  # texts here, since each is read from a list or a word
    assert set(several) | lists == set(SEVERAL_KINDS)


def test_an_option_has_one_help() -> None:
    """Options with one use have one text, and each has a text."""
    seen: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name, command, option in options_common_options():
        assert option.help, (name, command)
        seen[name][option.help].append(command)
    assert differing(seen, SEVERAL_TEXTS) == {}
    assert [name for name in SEVERAL_TEXTS if len(seen[name]) < 2] == []


def test_short_options_are_those_of_all_commands() -> None:
    """-o is the output, -q, -v and -h are common; there is no other short option."""
    shorts = {(short, name) for name, _, option in options_common_options() for short in option.opts if len(short) == 2}
    assert shorts == {("-o", "--output")}
