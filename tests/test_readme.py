"""README and docs are right: their commands exist as written, their Python runs, their links lead to files."""

from __future__ import annotations

import re
import shlex

import click
import pytest
from conftest import ROOT_FOLDER
from looped import looped

from treeopt.cli.app import program

README = (ROOT_FOLDER / "README.md").read_text()


def pages_of(*folders: str) -> tuple[str, ...]:
    """The pages in these folders of docs/, not in folders inside them; '' is docs/ itself."""
    found = (path for folder in folders for path in (ROOT_FOLDER / "docs" / folder).glob("*.md"))
    return tuple(sorted(path.relative_to(ROOT_FOLDER).as_posix() for path in found))


USER_PAGES = ("README.md", *pages_of("", "engines"))  # for people who deploy a model
DEVELOPER_PAGES = pages_of("develop")
PAGES = (*USER_PAGES, *DEVELOPER_PAGES, "CONTRIBUTING.md", "SECURITY.md")
MOST_WORDS = {USER_PAGES: 16_000, (*USER_PAGES, *DEVELOPER_PAGES): 34_400}  # issue 43, with what later issues add
LANGUAGES = ("", "sh", "python", "text", "yaml")


def code_blocks(language: str, page: str) -> list[str]:
    """A page's fenced blocks in one language ('' is the command line, 'sh' one of which a part is missing)."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    return [block for name, block in blocks if name == language]


def treeopt_lines(page: str, *languages: str) -> list[str]:
    """The treeopt lines in a page's blocks of these languages; a backslash at a line's end joins it to the next."""
    blocks = [block for language in languages for block in code_blocks(language, page)]
    lines = [line.strip() for block in blocks for line in re.sub(r"\\\n\s*", "", block).splitlines()]
    return [bare for line in lines if (bare := line.removeprefix(".venv/bin/")).startswith("treeopt ")]


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
    lines = [re.sub(r"\$\w+", "1", line) for text in texts for line in treeopt_lines(text, "", "sh")]
    assert len(lines) >= 20
    for line in lines:
        name, *arguments = shlex.split(line.partition(" > ")[0], comments=True)[1:]
        parent = click.Context(program)  # whose commands a file of --config may name
        command = program.get_command(parent, name)
        assert command is not None, line
        command.make_context(name, arguments, parent=parent)


def test_readme_is_short() -> None:
    """The first page stays one that is read; the rest has a place in docs/."""
    assert len(README.splitlines()) <= 120


def test_every_page_belongs_to_a_group() -> None:
    """A folder of docs/ that no constant of this file names would be tested by nothing."""
    pages = {path.relative_to(ROOT_FOLDER).as_posix() for path in (ROOT_FOLDER / "docs").rglob("*.md")}
    assert pages == {*USER_PAGES, *DEVELOPER_PAGES} - {"README.md"}


@looped(("pages", "most"), MOST_WORDS.items())
def test_pages_have_few_words(pages: tuple[str, ...], most: int) -> None:
    """Words as `wc -w` counts them. Pages that are made when the site is built do not count."""
    words = {name: len((ROOT_FOLDER / name).read_text().split()) for name in pages}
    assert sum(words.values()) <= most, words


@looped("name", PAGES)
def test_make_targets_exist(name: str) -> None:
    """Every make target that a page names is in the Makefile."""
    text = (ROOT_FOLDER / name).read_text()
    targets = set(re.findall(r"(?:^|`|&& )make ([a-z-]+)\b", text, flags=re.MULTILINE))
    made = set(re.findall(r"^([a-z-]+):", (ROOT_FOLDER / "Makefile").read_text(), flags=re.MULTILINE))
    assert targets <= made


def python_blocks(*names: str) -> list[tuple[str, str]]:
    """The Python blocks of these pages, each with its page."""
    return [(name, block) for name in names for block in code_blocks("python", (ROOT_FOLDER / name).read_text())]


@looped(("name", "block"), python_blocks(*PAGES))
def test_python_runs_as_pasted(
    name: str, block: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The Python examples run from the repository's root with the repository alone, and print."""
    monkeypatch.chdir(ROOT_FOLDER)
    exec(compile(block, name, "exec"), {})
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
