"""Text that every Python installation holds: the standard library's sources and documentation topics.

A module is seen (trained on) or unseen (judged on) as a whole, by a hash of its top-level name, so that no text of an
unseen module, however it is split into files, is ever trained on.
"""

from __future__ import annotations

import hashlib
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Tests repeat themselves, and the encodings are tables of escapes: neither is text to learn from.
_LEFT_OUT = frozenset({"__pycache__", "encodings", "idle_test", "pydoc_data", "site-packages", "test", "tests"})
_DEFINITION = re.compile(r"^ *(?:async )?(?:def|class) \w+.*:$", re.MULTILINE)


@dataclass(frozen=True)
class Document:
    """One source file or documentation topic; `module` is the top-level name that decides its side of the split."""

    module: str
    name: str
    text: str


def standard_library() -> tuple[Document, ...]:
    """Every source file and documentation topic of the Python that runs this, in a fixed order."""
    return (*_sources(Path(sysconfig.get_path("stdlib"))), *_topics())


def is_unseen(document: Document, one_in: int) -> bool:
    """Whether the document's module is among the one in so many that are kept for judging."""
    return int(hashlib.sha256(document.module.encode()).hexdigest(), 16) % one_in == 0


def openings(document: Document, characters: int) -> tuple[str, ...]:
    """Openings to continue: text up to the colon of a definition's first line, at most so many characters of it.

    Each begins at the start of a line, and none overlaps another. The line break is left to the model: tokenizers join
    it with the spaces after it.
    """
    found, last = [], 0
    for match in _DEFINITION.finditer(document.text):
        start = document.text.find("\n", max(match.end() - characters, 0)) + 1
        if max(last, 1) <= start < match.start():  # 0 where no line begins there
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
