"""What is assumed about the environment: nothing that the cheap commands need, and dependencies that go together."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from conftest import ROOT_FOLDER
from looped import looped

from treeopt.cli.console import Console
from treeopt.cli.generate_command import _prompt, _streamed
from treeopt.decode.stream import Piece

PYPROJECT = tomllib.loads((ROOT_FOLDER / "pyproject.toml").read_text())
# One interpreter runs all of them; the status is that of the first that fails.
COMMANDS = (
    ("list",),
    ("show", "mc_sim_7b_63"),
    ("show", "mc_sim_7b_63", "--json"),
    ("render", "mc_sim_7b_63", "-o", "tree.svg"),
)
RUN = """
import sys
from treeopt.cli import main
for arguments in %r:
    sys.argv = ["treeopt", *arguments]
    try:
        main()
    except SystemExit as end:
        if end.code:
            raise
"""
# What is set, or unset where None, in the environment of a run.
ENVIRONMENTS: dict[str, dict[str, str | None]] = {
    "nothing-there": {"HOME": None, "PATH": "/nonexistent", "TMPDIR": "/nonexistent"},
    "home-not-writable": {"HOME": "/proc/1", "HF_HOME": "/proc/1", "TERM": "dumb", "COLUMNS": "0"},
    "columns-no-number": {"TERM": "", "COLUMNS": "-5", "LINES": "many", "OMP_NUM_THREADS": "several"},
    "posix": {"LANG": None, "LC_ALL": "POSIX", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
    "ascii": {"PYTHONIOENCODING": "ascii"},
    "latin-1": {"PYTHONIOENCODING": "latin-1"},
}


def run(
    commands: tuple[tuple[str, ...], ...], folder: Path, redirect: str = "", **changes: str | None
) -> tuple[int, bytes, bytes]:
    """Exit status, output and errors of commands in a shell, with the streams closed as `redirect` says."""
    given = {**os.environ, "PYTHONPATH": str(ROOT_FOLDER), **changes}
    set_ = {name: value for name, value in given.items() if value is not None}
    shell = ["/bin/sh", "-c", f'exec "$@" {redirect}', "sh", sys.executable, "-c", RUN % (commands,)]
    done = subprocess.run(shell, cwd=folder, env=set_, capture_output=True, check=False, stdin=subprocess.DEVNULL)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
@looped("changes", ENVIRONMENTS.values())
def test_commands_run_in_a_bare_environment(changes: dict[str, str | None], tmp_path: Path) -> None:
    """No home, program, temporary folder, terminal or Greek letters are needed; nothing else is left in the folder."""
    status, output, errors = run(COMMANDS, tmp_path, **changes)
    assert status == 0, errors.decode(errors="replace")
    assert b"Traceback" not in errors
    assert [path.name for path in tmp_path.iterdir()] == ["tree.svg"]
    (data,) = [json.loads(line) for line in output.splitlines() if line.startswith(b"{")]
    assert data["nodes"] == 64


@pytest.mark.slow
@looped(
    ("redirect", "commands"),
    [("<&-", COMMANDS), ("2>&-", COMMANDS), (">&-", COMMANDS[-1:]), ("<&- >&- 2>&-", COMMANDS[-1:])],
)
def test_commands_run_with_closed_streams(redirect: str, commands: tuple[tuple[str, ...], ...], tmp_path: Path) -> None:
    """Standard streams that a command does not need may be closed; a result that cannot be printed is E404."""
    status, _, errors = run(commands, tmp_path, redirect)
    assert status == 0, errors.decode(errors="replace")
    assert [path.name for path in tmp_path.iterdir()] == ["tree.svg"]


@looped(("letter", "shown"), [("\u00f8", b"\xf8"), ("\u4f60", b"\\u4f60")])
def test_letters_that_the_encoding_lacks_are_escaped(letter: str, shown: bytes, tmp_path: Path) -> None:
    """A letter that the terminal's encoding lacks is shown by its number."""
    status, _, errors = run((("show", letter),), tmp_path, PYTHONIOENCODING="latin-1")
    assert status == 3
    assert shown in errors


def test_text_is_written_with_standard_output_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """`generate` decodes on where nobody reads."""
    pieces = [Piece([1], "a"), Piece([2], "b")]
    monkeypatch.setattr(sys, "stdout", None)
    assert list(_streamed(iter(pieces), Console(as_json=False, quiet=False))) == pieces


def test_prompt_from_closed_standard_input_is_a_usage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """`generate -` without a standard input says so."""
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(Exception, match="standard input is closed"):
        _prompt("-")


def bounds() -> dict[str, str]:
    """The lower bound of each dependency, by its normal name."""
    project = PYPROJECT["project"]
    extras = project["optional-dependencies"]
    listed = [*project["dependencies"], *extras["dev"], *extras["bench"]]
    matches = [re.fullmatch(r"([\w.-]+)>=([\w.]+)(?:,<\w+)?(?:; .+)?", one) for one in listed]
    assert all(matches), listed
    return {match[1].lower(): match[2] for match in matches if match}


def pins(name: str) -> dict[str, str]:
    """Package and version of each line of a constraints file, by its normal name."""
    lines = [line for line in (ROOT_FOLDER / name).read_text().splitlines() if line and not line.startswith("#")]
    return {package.lower(): version for package, version in (line.split("==") for line in lines)}


def test_lowest_constraints_are_the_lower_bounds() -> None:
    """constraints-min.txt pins each dependency of pyproject.toml to its lower bound, and nothing else."""
    assert pins("constraints-min.txt") == bounds()


def test_constraints_are_within_the_bounds() -> None:
    """constraints.txt pins nothing below its lower bound."""
    numbers = {name: tuple(map(int, version.split("."))) for name, version in bounds().items()}
    pinned = {name: tuple(map(int, version.split("."))) for name, version in pins("constraints.txt").items()}
    assert {name for name in numbers if name in pinned and pinned[name] < numbers[name]} == set()


def test_makefile_installs_either_set() -> None:
    """The Makefile takes the file that CONSTRAINTS names, and its default is there."""
    makefile = (ROOT_FOLDER / "Makefile").read_text()
    assert "CONSTRAINTS ?= constraints.txt" in makefile
    assert "-c $(CONSTRAINTS)" in makefile
    assert "make venv CONSTRAINTS=constraints-min.txt" in (ROOT_FOLDER / "constraints-min.txt").read_text()
