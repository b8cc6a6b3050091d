"""README and docs are right: their commands exist as written, their Python runs, their links lead to files."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest
from conftest import ROOT_FOLDER
from looped import looped

from treeopt.cli.app import program
from treeopt.errors import Code

README = (ROOT_FOLDER / "README.md").read_text()
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    *sorted(f"docs/{path.name}" for path in (ROOT_FOLDER / "docs").glob("*.md")),
)
LANGUAGES = ("", "sh", "python", "text", "yaml")


def code_blocks(language: str, page: str) -> list[str]:
    """A page's fenced blocks in one language ('' is the command line, 'sh' one of which a part is missing)."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    return [block for name, block in blocks if name == language]


def fence_fault(page: str) -> str:
    """The first fence of a page that is wrong: of an unknown language, or without an end; empty where all are right."""
    opened = ""
    for number, line in enumerate(page.splitlines(), 1):
        mark, _, language = line.strip().partition("```")
        if "```" not in line or mark:
            continue
        if opened:
            if language:
                return f"line {number}: {line} inside the block of {opened}"
            opened = ""
        elif language not in LANGUAGES:
            return f"line {number}: {line} is no language of these pages"
        else:
            opened = f"line {number}"
    return opened


@looped("name", PAGES)
def test_blocks_of_code_are_closed(name: str) -> None:
    """Every block of a page has an end and a known language, so that the text behind it is not taken for code."""
    assert fence_fault((ROOT_FOLDER / name).read_text()) == ""


@looped(
    ("page", "fault"),
    [
        ("a\n```sh\nb\n```\n```\nc\n```\n", ""),
        ("```sh\na\n```sh\nb", "line 3: ```sh inside the block of line 1"),
        ("```shell\na\n```", "line 1: ```shell is no language of these pages"),
        ("- a\n  ```\n  b", "line 2"),
    ],
)
def test_faults_of_blocks_are_found(page: str, fault: str) -> None:
    """A fence with a language inside a block, an unknown language, and a block without an end are faults."""
    assert fence_fault(page) == fault


def test_commands_parse_as_written() -> None:
    """Every treeopt line of the README and of docs/ names a command and options that exist. $NAME of `sh` is 1."""
    texts = [(ROOT_FOLDER / name).read_text() for name in PAGES]
    blocks = [block for text in texts for language in ("", "sh") for block in code_blocks(language, text)]
    shell = (line.removeprefix(".venv/bin/").partition(" > ")[0] for block in blocks for line in block.splitlines())
    given = (re.sub(r"\$\w+", "1", line) for line in shell)
    lines = [line for line in given if line.startswith("treeopt ")]
    assert len(lines) >= 20
    for line in lines:
        name, *arguments = shlex.split(line.partition(" > ")[0])[1:]
        parent = click.Context(program)  # whose commands a file of --config may name
        command = program.get_command(parent, name)
        assert command is not None, line
        command.make_context(name, arguments, parent=parent)


def test_readme_is_short() -> None:
    """The first page stays one that is read; the rest has a place in docs/."""
    assert len(README.splitlines()) <= 150


@looped("name", PAGES)
def test_make_targets_exist(name: str) -> None:
    """Every make target that a page names is in the Makefile."""
    text = (ROOT_FOLDER / name).read_text()
    targets = set(re.findall(r"(?:^|`|&& )make ([a-z-]+)\b", text, flags=re.MULTILINE))
    made = set(re.findall(r"^([a-z-]+):", (ROOT_FOLDER / "Makefile").read_text(), flags=re.MULTILINE))
    assert targets <= made


BLOCKS = [(name, block) for name in PAGES for block in code_blocks("python", (ROOT_FOLDER / name).read_text())]


@looped(("name", "block"), BLOCKS)
def test_python_runs_as_pasted(
    name: str, block: str, shared: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The Python examples of every page run from the repository's root, with the shared folder beside it."""
    monkeypatch.chdir(ROOT_FOLDER)
    exec(compile(block.replace("../shared", str(shared)), name, "exec"), {})
    assert capsys.readouterr().out


@looped("name", PAGES)
def test_links_lead_to_files(name: str) -> None:
    """Every picture and page that a page links to is in the repository."""
    page = ROOT_FOLDER / name
    for link in re.findall(r"\]\((?!http)(.*?)\)", page.read_text()):
        path, _, section = link.partition("#")
        target = page.parent / path if path else page
        assert target.is_file(), link
        titles = re.findall(r"^#+ (.*)$", target.read_text(), flags=re.MULTILINE) if section else []
        assert section in ["", *(re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles)], link


@looped("name", PAGES)
def test_benches_named_exist(name: str) -> None:
    """Every bench script that a page names is in the repository."""
    for script in re.findall(r"bench/\w+\.py", (ROOT_FOLDER / name).read_text()):
        assert (ROOT_FOLDER / script).is_file()


def test_page_of_errors_is_the_registry() -> None:
    """docs/errors.md has a row for every error, in order: exit status, cause, rule and remedy are the registry's."""
    page = (ROOT_FOLDER / "docs/errors.md").read_text()
    rows = re.findall(r"^\| (E\d+) \| (.+) \| (.+) \| (.+) \| (.+) \|$", page, re.MULTILINE)
    shown = [(*row[:4], re.sub(r"\[(.+?)\]\(.+?\)", r"\1", row[4].replace("`", ""))) for row in rows]
    codes = sorted(Code, key=lambda code: code.number)
    assert shown == [(one.number, str(one.exit_status), one.cause, one.rule, one.fix) for one in codes]
