"""The README tells the truth: its commands exist as written, and its Python runs as pasted."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest
from conftest import ROOT_FOLDER

from treeopt.cli.app import program

README = (ROOT_FOLDER / "README.md").read_text()


def code_blocks(language: str) -> list[str]:
    """The README's fenced blocks in one language ('' is the command line)."""
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


def test_commands_parse_as_written() -> None:
    """Every treeopt line names a command and options that exist."""
    lines = [line for block in code_blocks("") for line in block.splitlines() if line.startswith("treeopt ")]
    assert len(lines) >= 8
    for line in lines:
        name, *arguments = shlex.split(line)[1:]
        command = program.get_command(click.Context(program), name)
        assert command is not None, line
        command.make_context(name, arguments)


def test_make_targets_exist() -> None:
    """Every make target that the README names is in the Makefile."""
    targets = set(re.findall(r"(?:^|`|&& )make ([a-z]+)\b", README, flags=re.MULTILINE))
    made = set(re.findall(r"^([a-z]+):", (ROOT_FOLDER / "Makefile").read_text(), flags=re.MULTILINE))
    assert targets <= made


@pytest.mark.parametrize("block", code_blocks("python"))
def test_python_runs_as_pasted(
    block: str, shared: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The Python examples run from the repository's root, with the shared folder beside it."""
    monkeypatch.chdir(ROOT_FOLDER)
    exec(compile(block.replace("../shared", str(shared)), "README.md", "exec"), {})
    assert capsys.readouterr().out


def test_pictures_exist() -> None:
    """Every picture that the README shows is in the repository."""
    for path in re.findall(r"!\[.*?\]\((.*?)\)", README):
        assert (ROOT_FOLDER / path).is_file()
