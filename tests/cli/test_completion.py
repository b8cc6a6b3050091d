"""Completion of command lines, through click's own interface of shells."""

from __future__ import annotations

import subprocess
import sys

from click.shell_completion import BashComplete, CompletionItem
from looped import looped

from treeopt.cli.app import COMMANDS, program

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
