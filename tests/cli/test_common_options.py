"""The options of all commands: messages, progress and colors; and one meaning for each option over all commands."""

from __future__ import annotations

import ast
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
from treeopt.cli.configuration import COMMON
from treeopt.cli.console import Console
from treeopt.cli.generate_command import _streamed
from treeopt.cli.help_text import QUIET_LIBRARIES, Shown
from treeopt.decode.stream import Piece
from treeopt.errors import Code, TreeoptError


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
    options = {name: {word for one in command.params for word in one.opts} for name, command in all_commands()}
    every = set().union(*options.values())
    found = 0
    for place, text in remedies():
        for clause in _CLAUSES.split(text):
            words = re.findall(r"(?<![\w-])(?:--[a-z][a-z-]*[a-z](?![\w-]|\d)|[a-z]+)", clause)
            before = ["treeopt", *words]  # a command stands first, or after the program's name
            commands = [
                word for last, word in zip(before, words, strict=False) if last == "treeopt" and word in options
            ]
            for option in filter(re.compile("--").match, words):
                found += 1
                assert option in (options[commands[-1]] if commands else every), f"{place}: {text}"
    assert found > 60


def test_verbose_prints_messages_of_libraries(log: logging.Logger) -> None:
    """Our library's messages of every level go to standard error, and transformers prints its own."""
    with CliRunner().isolation() as (_, err, _):
        Console(False, shown=Shown(verbose=True))
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
    for shown, expected in ((Shown(), "build 1/1 100% 0 s left  \nnote\n"), (Shown(no_progress=True), "note\n")):
        console = Console(False, shown=shown)
        with console.progress("build") as progress:
            progress(1, 1, "")
        console.note("note")
        assert capsys.readouterr().err == expected


@looped(
    ("variables", "colored"),
    [({}, False), ({"FORCE_COLOR": "1"}, True), ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False)],
)
def test_colors_in_a_pipe(
    variables: dict[str, str],
    colored: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
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
    *("--seed", "--levels", "--learn-tokens", "--shared-lm-head"),
    *("--values", "--weights", "--tree", "--title"),
}


def options() -> Iterator[tuple[str, str, click.Option]]:
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
    """The options with several values over commands, beyond those allowed."""
    return {name: dict(values) for name, values in seen.items() if len(values) > 1 and name not in allowed}


def test_an_option_takes_one_kind_of_value() -> None:
    """The same name means the same over all commands; the exceptions are listed, and are exceptions."""
    seen: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name, command, option in options():
        seen[name][kind(option)].append(command)
    assert differing(seen, SEVERAL_KINDS) == {}
    several = differing(seen, ())
    lists = {"--context", "--nodes", "--drafter"}  # texts here, since each is read from a list or a word
    assert set(several) | lists == set(SEVERAL_KINDS)


def test_an_option_has_one_help() -> None:
    """Options with one use have one text, and each has a text."""
    seen: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name, command, option in options():
        assert option.help, (name, command)
        seen[name][option.help].append(command)
    assert differing(seen, SEVERAL_TEXTS) == {}
    assert [name for name in SEVERAL_TEXTS if len(seen[name]) < 2] == []


def test_short_options_are_those_of_all_commands() -> None:
    """-o is the output, -q, -v and -h are common; there is no other short option."""
    shorts = {(short, name) for name, _, option in options() for short in option.opts if len(short) == 2}
    assert shorts == {("-o", "--output")}
