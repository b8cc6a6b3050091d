"""Users' pages and the program's help: the words of the field, and nothing that a reader does not have."""

from __future__ import annotations

import re
from collections.abc import Iterator

import click
from conftest import ROOT_FOLDER
from looped import looped
from test_readme import USER_PAGES

from treeopt.cli.app import program

# Words of this project's developers that a reader of vLLM's or llama.cpp's documentation reads twice.
DIALECT = (
    r"\brooms\b",
    r"\b(?:a|each|every|the|this) room\b",
    r"\bverbs\b",
    r"\bof before\b",
    r"\bof now\b",
    r"\bmend(?:ed|s)?\b",
    r"\bat hand\b",
    r"\bwho guess(?:es|ed)?\b",
    r"\btold\b",
    r"(?<!frequently )\basked\b(?! in \[)",  # of issues of other projects
    r"\bflatter(?:s|ed)?\b",
    r"\bstands\b(?! for)",
    r"\bsays? so\b",
)
# Files and models that a reader with the repository alone does not have.
ABSENT = (r"\.\./shared\b", r"\btiny-?stories\b")


def found(text: str, patterns: tuple[str, ...]) -> list[str]:
    """`line: words` of each place in a text that a pattern matches; a line end counts as a space."""
    flat = text.replace("\n", " ")
    matches = [match for pattern in patterns for match in re.finditer(pattern, flat, flags=re.IGNORECASE)]
    return [f"{text.count(chr(10), 0, match.start()) + 1}: {match[0]}" for match in matches]


def helps(command: click.Command, context: click.Context) -> Iterator[tuple[str, str]]:
    """Path and help of a command and of those below it."""
    yield context.command_path, command.get_help(context)
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            yield from helps(below, click.Context(below, info_name=name, parent=context))


@looped("name", USER_PAGES)
def test_pages_use_the_words_of_the_field(name: str) -> None:
    """No user's page has a word of DIALECT."""
    assert found((ROOT_FOLDER / name).read_text(), DIALECT) == []


@looped("name", USER_PAGES)
def test_pages_need_the_repository_alone(name: str) -> None:
    """No user's page names a file or a model of ABSENT."""
    assert found((ROOT_FOLDER / name).read_text(), ABSENT) == []


def test_help_uses_the_words_of_the_field() -> None:
    """The help of the program, of every command and of every command below one has no word of DIALECT."""
    context = click.Context(program, info_name="treeopt", max_content_width=10_000, terminal_width=10_000)
    listed = list(helps(program, context))
    assert len(listed) > 20
    assert {name: words for name, text in listed if (words := found(text, (*DIALECT, *ABSENT)))} == {}


@looped(
    ("text", "expected"),
    [
        ("The trees\nof before are mended.", ["2: of before", "2: mended"]),
        ("A model that is at\nhand.", ["1: at hand"]),
        ("The program is told its size, as asked.", ["1: told", "1: asked"]),
        ("Make room on the disk. A stand-in. τ stands for tokens per step. Frequently asked questions. Verbose.", []),
    ],
)
def test_words_are_found(text: str, expected: list[str]) -> None:
    """Words are found across the end of a line; words of the field that look alike are not."""
    assert found(text, DIALECT) == expected
