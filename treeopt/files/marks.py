"""Marks: the last line of a text file, which shows that treeopt wrote it and that it may be replaced.

The line has the kind of the file and a hash of the text before it, so that an edited file does not match. The header
of the arrays in `treeopt.files.tensors` has the same.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

from treeopt.files.atomic import write_text
from treeopt.files.configurations import Configuration, comment_of
from treeopt.files.read import is_regular

TREE, PICTURE, BUFFERS, REPORT = "tree", "picture", "compiled tree", "report"  # kinds that are fast to make again
BUFFERS_SCHEMA = "treeopt.buffers/1"  # of compiled trees
_COMMENTS = {
    ".svg": ("<!-- ", " -->"),
    ".html": ("<!-- ", " -->"),
    ".dot": ("// ", ""),
    ".gv": ("// ", ""),
}  # by suffix; YAML's otherwise
_YAML_COMMENT = ("# ", "")
_MARK = re.compile(r"(?:<!-- |// |# )treeopt ([a-z ]+), unedited: sha256 ([0-9a-f]{64})(?: -->)?\n")
LONGEST = 200  # bytes of a mark's line
_PIECE = 1 << 20  # bytes that are hashed at a time


def write_marked(
    path: str | os.PathLike[str], content: str, kind: str, configuration: Configuration | None = None
) -> None:
    """Write a text, which must end with a line break, the configuration of its command as a comment, and its mark.

    Raises:
        TreeoptError: as `treeopt.files.atomic.write_bytes`.
    """
    assert content.endswith("\n")
    written_as = Path(path).suffix.lower() if kind in (PICTURE, REPORT) else ""
    before, after = _COMMENTS.get(written_as, _YAML_COMMENT)
    if configuration:
        content += f"{before}{comment_of(configuration)}{after}\n"
    digest = hashlib.sha256(content.encode()).hexdigest()
    write_text(path, f"{content}{before}treeopt {kind}, unedited: sha256 {digest}{after}\n")


def unedited_kind(path: Path) -> str | None:
    """The kind that the mark of a regular file names; None where there is no mark, or the text before it differs."""
    kind, unedited = _mark_of(path)
    return kind if unedited else None


def is_edited(path: Path) -> bool:
    """Whether a file has a mark, and the text before it is not the one that was written."""
    kind, unedited = _mark_of(path)
    return kind is not None and not unedited


def _mark_of(path: Path) -> tuple[str | None, bool]:
    """The kind that the mark of a regular file names, if it has one, and whether the text before it was written so."""
    if not is_regular(path):
        return None, False
    size = path.stat().st_size
    with path.open("rb") as stream:
        stream.seek(max(0, size - LONGEST))
        last = stream.read(LONGEST).splitlines(keepends=True)[-1:]
        found = _MARK.fullmatch(b"".join(last).decode(errors="replace"))
        if found is None:
            return None, False
        stream.seek(0)
        digest, left = hashlib.sha256(), size - len(last[0])
        while left > 0 and (piece := stream.read(min(left, _PIECE))):
            digest.update(piece)
            left -= len(piece)
    return found[1], digest.hexdigest() == found[2]
