"""The README is right: its commands exist as written, its Python runs, its links lead to files."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest
from conftest import ROOT_FOLDER

from treeopt.cli.app import program

README = (ROOT_FOLDER / "README.md").read_text()
PAGES = ("README.md", *sorted(f"docs/{path.name}" for path in (ROOT_FOLDER / "docs").glob("*.md")))


def code_blocks(language: str, page: str = README) -> list[str]:
    """A page's fenced blocks in one language ('' is the command line)."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    return [block for name, block in blocks if name == language]


def test_commands_parse_as_written() -> None:
    """Every treeopt line of the README and of docs/ names a command and options that exist."""
    blocks = [block for name in PAGES for block in code_blocks("", (ROOT_FOLDER / name).read_text())]
    lines = [line for block in blocks for line in block.splitlines() if line.startswith("treeopt ")]
    assert len(lines) >= 20
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


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_to_files(name: str) -> None:
    """Every picture and page that a page links to is in the repository."""
    page = ROOT_FOLDER / name
    paths = re.findall(r"\]\((?!http)(.*?)\)", page.read_text())
    assert [path for path in paths if not (page.parent / path).is_file()] == []


@pytest.mark.parametrize("name", PAGES)
def test_benches_named_exist(name: str) -> None:
    """Every bench script that a page names is in the repository."""
    for script in re.findall(r"bench/\w+\.py", (ROOT_FOLDER / name).read_text()):
        assert (ROOT_FOLDER / script).is_file()
