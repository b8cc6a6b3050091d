"""Help and completion of every command: what they import, sections, and examples that its own parser accepts."""

from __future__ import annotations

import shlex
import subprocess
import sys
from typing import Any, NoReturn

import click
import pytest
from click.shell_completion import BashComplete, CompletionItem
from click.testing import CliRunner
from looped import looped
from program import all_commands

from treeopt.cli.app import COMMANDS, program
from treeopt.cli.examples import EXAMPLES
from treeopt.models import head_files, shapes
from treeopt.texts import prompts

HEAVY = ("numpy", "pydantic", "rich", "torch", "transformers", "numba", "scipy", "networkx", "matplotlib", "jinja2")
_PRINT_HELP = """
import sys
from click.testing import CliRunner
from treeopt.cli.app import COMMANDS, program
for name in ("", *COMMANDS):
    line = [*name.split(), "--help"]
    assert CliRunner().invoke(program, line).exit_code == 0, line
    loaded = [one for one in {heavy} if one in sys.modules]
    if loaded:
        raise SystemExit(f"{{name or 'treeopt'}} --help imports {{loaded}}")
"""


def test_help_imports_nothing_heavy() -> None:
    """The help of all commands is printed without numpy, pydantic, rich, torch and the others, so that it is fast."""
    code = _PRINT_HELP.format(heavy=HEAVY)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_heavy_import_is_noticed() -> None:
    """The check above fails where a command imports such a module."""
    code = _PRINT_HELP.format(heavy=("click",))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "treeopt --help imports ['click']" in done.stderr


def test_every_command_has_two_examples() -> None:
    """There are examples for each command, and for no other; `heads` is a group of two commands."""
    names = {name for name, _ in all_commands()} - {"heads"}
    assert set(EXAMPLES) == names
    assert [name for name, examples in EXAMPLES.items() if len(examples) < 2] == []
    assert [line for name, examples in EXAMPLES.items() for _, line in examples if f"treeopt {name}" not in line] == []


@looped("name", EXAMPLES)
def test_examples_parse(name: str) -> None:
    """The options of each example exist, and their values are valid."""
    for _, line in EXAMPLES[name]:
        parse(line)


def parse(line: str) -> None:
    """Parse a command line as the program does, without running the command.

    Raises:
        click.UsageError: as the program would print it.
    """
    first, *arguments = shlex.split(line)
    assert first == "treeopt"
    context, name = click.Context(program, info_name="treeopt"), None
    command: click.Command | None = program
    while isinstance(command, click.Group):
        name, command, arguments = command.resolve_command(context, arguments)
    assert command is not None
    command.make_context(name, list(arguments), parent=context)


@looped(
    "line",
    ["treeopt build --nods 3", "treeopt build --nodes many", "treeopt heads show", "treeopt heads convert h --for it"],
)
def test_wrong_examples_are_noticed(line: str) -> None:
    """The check above refuses unknown options, invalid values and missing arguments."""
    with pytest.raises(click.UsageError):
        parse(line)


@pytest.mark.usefixtures("unloaded")
@looped("name", [name for name in EXAMPLES if name not in ("demo", "doctor")])
def test_examples_are_no_usage_errors(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No command refuses the options of its examples together, in a folder without the files that they name."""

    def fail(*_given: Any, **_options: Any) -> NoReturn:
        raise AssertionError("it was loaded")

    for module, function in ((head_files, "load_heads"), (prompts, "load_prompts"), (shapes, "model_shape")):
        monkeypatch.setattr(f"treeopt.{function}", fail)
        monkeypatch.setattr(module, function, fail)
    for _, line in EXAMPLES[name]:
        result = CliRunner().invoke(program, shlex.split(line)[1:])
        assert result.exit_code != 2, result.output


def test_help_has_its_sections() -> None:
    """The options of all commands are apart from those of the command, and examples are last and unbroken."""
    for name, command in all_commands():
        shown = CliRunner().invoke(program, [*name.split(), "--help"]).output
        assert name not in EXAMPLES or shown.rstrip().endswith(EXAMPLES[name][-1][1]), name
        if not isinstance(command, click.Group):
            _, common = shown.split("\nCommon options:\n")
            assert "--json" in common
            assert "--help" in common
            assert common.index("--debug") < common.index("\nExamples:\n")


_COMPLETE = """
import sys
from click.shell_completion import BashComplete
from treeopt.cli.app import program
found = BashComplete(program, {}, "treeopt", "_TREEOPT_COMPLETE").get_completions(["show"], "mc_")
assert [one.type for one in found] == ["file"], found
loaded = [name for name in ("torch", "transformers", "numpy", "pydantic", "rich") if name in sys.modules]
raise SystemExit(f"imports {loaded}" if loaded else 0)
"""


def offered(*line: str) -> list[CompletionItem]:
    """What a shell offers for the last of these words."""
    *before, incomplete = line
    return BashComplete(program, {}, "treeopt", "_TREEOPT_COMPLETE").get_completions(list(before), incomplete)


def values(*line: str) -> list[str]:
    """The texts that a shell offers."""
    return [one.value for one in offered(*line)]


def test_commands_and_options() -> None:
    """Names of commands, subcommands and options."""
    assert set(values("")) == set(COMMANDS)
    assert values("cal") == ["calibrate"]
    assert values("heads", "c") == ["convert"]
    assert values("build", "--nod") == ["--nodes"]
    assert values("build", "--kind", "d") == ["dynamic"]


@looped(
    "line",
    [
        ("build", "--calibration", "cal"),
        ("build", "--config", "run"),
        ("generate", "x", "--tree", "./my"),
        ("render", "tree.yaml", "-o", "t"),
    ],
)
def test_files(line: tuple[str, ...]) -> None:
    """The shell completes files, which click alone does not offer."""
    assert [one.type for one in offered(*line)] == ["file"]


def test_completion_imports_nothing_heavy() -> None:
    """A key press takes no time for libraries."""
    done = subprocess.run([sys.executable, "-c", _COMPLETE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
