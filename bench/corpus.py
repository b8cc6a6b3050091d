"""Text of every Python installation: the sources and documentation topics of the standard library.

A module is for training (seen) or for evaluation (unseen) as a whole, by a hash of its top-level name. So no file of an
unseen module is ever trained on.
"""

from __future__ import annotations

import hashlib
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Tests are repetitive, and encodings are tables of escapes; both are left out.
_LEFT_OUT = frozenset({"__pycache__", "encodings", "idle_test", "pydoc_data", "site-packages", "test", "tests"})
_DEFINITION = re.compile(r"^ *(?:async )?(?:def|class) \w+.*:$", re.MULTILINE)


@dataclass(frozen=True)
class Document:
    """One source file or documentation topic; `module` is the top-level name that the split is made by."""

    module: str
    name: str
    text: str


def standard_library() -> tuple[Document, ...]:
    """All source files and documentation topics of the running Python, in a fixed order."""
    return (*_sources(Path(sysconfig.get_path("stdlib"))), *_topics())


def is_unseen(document: Document, one_in: int) -> bool:
    """Whether the document's module is for evaluation, as one in `one_in` modules is."""
    return int(hashlib.sha256(document.module.encode()).hexdigest(), 16) % one_in == 0


def openings(document: Document, characters: int) -> tuple[str, ...]:
    """Openings to continue: text up to the colon of a definition's first line, at most `characters` long.

    Each begins at the start of a line, and they do not overlap. They end before the line break, because tokenizers join
    it with the spaces after it.
    """
    found, last = [], 0
    for match in _DEFINITION.finditer(document.text):
        start = document.text.find("\n", max(match.end() - characters, 0)) + 1
        if max(last, 1) <= start < match.start():  # start is 0 where no line begins there
            found.append(document.text[start : match.end()])
            last = match.end()
    return tuple(found)


def _sources(root: Path) -> Iterator[Document]:
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root)
        if _LEFT_OUT.isdisjoint(inside.parts) and "config-" not in inside.parts[0]:
            text = path.read_text(encoding="utf-8", errors="ignore")
            yield Document(inside.parts[0].removesuffix(".py"), str(inside), text)


def _topics() -> Iterator[Document]:
    from pydoc_data.topics import topics

    for name, text in sorted(topics.items()):
        yield Document(f"topic {name}", f"topic {name}", text)
