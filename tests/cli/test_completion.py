"""Completion of command lines, through click's own interface of shells."""

from __future__ import annotations

import subprocess
import sys

import pytest
from click.shell_completion import BashComplete, CompletionItem
from program import treeopt

from treeopt.cli.app import COMMANDS, program
from treeopt.files.bundled import prompt_sets, zoo

_COMPLETE = """
import sys
from click.shell_completion import BashComplete
from treeopt.cli.app import program
found = BashComplete(program, {}, "treeopt", "_TREEOPT_COMPLETE").get_completions(["show"], "mc_")
assert [one.value for one in found] == ["mc_sim_7b_63"], found
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


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (("generate", "x", "--tree", "vicuna_7b"), [name for name in zoo() if name.startswith("vicuna_7b")]),
        (("show", "zeph"), ["zephyr_stage2"]),
        (("diff", "mc_sim_7b_63", "tok"), ["token_recycling"]),
        (("calibrate", "--prompts", ""), list(prompt_sets())),
        (("plan", "--device-preset", "h100-s"), ["h100-sxm"]),
        (("validate", "--model", "po"), ["pocket"]),
        (("learn", "--drafter", "ngr"), ["ngram"]),
    ],
)
def test_names(line: tuple[str, ...], expected: list[str]) -> None:
    """Bundled trees, prompt sets, devices, models and drafters."""
    assert values(*line) == expected


@pytest.mark.parametrize(
    "line",
    [
        ("build", "--calibration", "cal"),
        ("build", "--config", "run"),
        ("generate", "x", "--tree", "./my"),
        ("render", "tree.yaml", "-o", "t"),
    ],
)
def test_files(line: tuple[str, ...]) -> None:
    """Where no name begins with the text, the shell completes files."""
    assert [one.type for one in offered(*line)] == ["file"]


def test_completion_imports_nothing_heavy() -> None:
    """A key press takes no time for libraries."""
    done = subprocess.run([sys.executable, "-c", _COMPLETE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_script_calls_the_program(shell: str) -> None:
    """The script of each shell asks the program for what to offer."""
    assert f"_TREEOPT_COMPLETE={shell}_complete" in treeopt("completion", shell).stdout


def test_script_of_bash_is_read_by_bash() -> None:
    """The script has no error in bash, and defines the completion of `treeopt`."""
    script = treeopt("completion", "bash").stdout
    done = subprocess.run(
        ["bash", "--norc", "-c", f"{script}\ncomplete -p treeopt"], capture_output=True, text=True, check=False
    )
    assert "treeopt" in done.stdout, done.stderr
