"""Corpus: modules lie whole on one side, and openings are what they say."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from treeopt.train import corpus
from treeopt.train.corpus import Document, is_unseen, openings, standard_library

DEFINITION = re.compile(r" *(async )?(def|class) \w+.*:")


@pytest.fixture(scope="module")
def library() -> tuple[Document, ...]:
    """All of the standard library."""
    return standard_library()


def made(text: str) -> Document:
    """A document of one module."""
    return Document("made", "made.py", text)


def test_standard_library_holds_code_and_topics(library: tuple[Document, ...]) -> None:
    """Known modules and documentation topics are there, names are unique, and tests are left out."""
    names = [document.name for document in library]
    assert {"argparse.py", "json/decoder.py", "topic lambda"} <= set(names)
    assert len(set(names)) == len(names) > 500
    assert not [name for name in names if {"test", "tests", "encodings", "site-packages"} & set(name.split("/"))]
    assert "class ArgumentParser" in next(document.text for document in library if document.name == "argparse.py")


def test_standard_library_is_the_same_each_time(library: tuple[Document, ...]) -> None:
    """Read again, it has the same documents in the same order."""
    assert standard_library() == library


def test_no_module_is_on_both_sides(library: tuple[Document, ...]) -> None:
    """All files of a package are on its side, and both sides hold many modules."""
    sides: dict[str, set[bool]] = {}
    for document in library:
        sides.setdefault(document.name.split("/")[0].removesuffix(".py"), set()).add(is_unseen(document, 10))
    assert all(len(found) == 1 for found in sides.values())
    unseen = sum(found == {True} for found in sides.values())
    assert 0.05 < unseen / len(sides) < 0.2


def test_is_unseen_by_module_alone() -> None:
    """Neither a document's name nor its text moves it; one in one is every module."""
    names = [f"module{i}" for i in range(100)]
    one = [is_unseen(Document(name, "a", "a"), 4) for name in names]
    assert one == [is_unseen(Document(name, "b", "b"), 4) for name in names]
    assert 10 < sum(one) < 40
    assert all(is_unseen(Document(name, "a", "a"), 1) for name in names)


def test_openings_by_hand() -> None:
    """An opening is whole lines up to a definition's first line; one without a line before it is none."""
    text = "import os\nimport re\n\ndef one(a):\n    return a\n\nclass Two:\n    pass\n\n    async def three():\n"
    assert openings(made(text), 30) == (
        "import re\n\ndef one(a):",
        "    return a\n\nclass Two:",
        "\n    async def three():",
    )
    assert openings(made(text), 12) == ("\nclass Two:",)
    assert openings(made(text), 10) == ()


@pytest.mark.parametrize("characters", [40, 320])
def test_openings_of_the_library(library: tuple[Document, ...], characters: int) -> None:
    """Openings are parts of their document in order, never overlap, end with a definition, and are short enough."""
    count = 0
    for document in random.Random(0).sample(library, 100):
        at = 0
        for opening in openings(document, characters):
            assert len(opening) <= characters
            lines = opening.splitlines()
            assert len(lines) > 1
            assert DEFINITION.fullmatch(lines[-1])
            found = document.text.find(opening, at)
            assert found >= at
            assert document.text[found - 1] == "\n"
            at = found + len(opening)
            count += 1
    assert count > 100


def test_openings_of_a_long_last_line() -> None:
    """A definition longer than allowed, in a file that ends without a newline, is no opening."""
    assert openings(made("import os\n" * 5 + "def " + "f" * 50 + "():"), 20) == ()


def test_library_is_read_from_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sources come from the installation's folder, package by package."""
    for name in ("b.py", "a/x.py", "a/test/y.py", "site-packages/z.py", "config-3/c.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"# {name}\n")
    monkeypatch.setattr(corpus.sysconfig, "get_path", lambda _name: str(tmp_path))
    found = [(document.module, document.name) for document in standard_library() if document.name.endswith(".py")]
    assert found == [("a", "a/x.py"), ("b", "b.py")]
