"""Marks: the last line of a text file of ours, from which a later run knows that it may replace the file.

The line names the kind of the file and a hash of all text before it. A file that was edited, or that anything else
wrote, does not match it. The arrays of `treeopt.files.tensors` carry the same in their header.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

from treeopt.files.atomic import write_text

TREE, PICTURE, BUFFERS = "tree", "picture", "compiled tree"  # kinds that are cheap to make again
BUFFERS_SCHEMA = "treeopt.buffers/1"  # of the arrays of a compiled tree
_COMMENTS = {".svg": ("<!-- ", " -->"), ".dot": ("// ", ""), ".gv": ("// ", "")}  # by suffix; YAML's otherwise
_YAML_COMMENT = ("# ", "")
_MARK = re.compile(r"(?:<!-- |// |# )treeopt ([a-z ]+), unedited: sha256 ([0-9a-f]{64})(?: -->)?\n")
LONGEST = 200  # bytes of a mark's line


def write_marked(path: str | os.PathLike[str], content: str, kind: str) -> None:
    """Write text that ends with a line break, and its mark.

    Raises:
        TreeoptError: as `treeopt.files.atomic.write_bytes`.
    """
    assert content.endswith("\n")
    before, after = _COMMENTS.get(Path(path).suffix.lower(), _YAML_COMMENT) if kind == PICTURE else _YAML_COMMENT
    digest = hashlib.sha256(content.encode()).hexdigest()
    write_text(path, f"{content}{before}treeopt {kind}, unedited: sha256 {digest}{after}\n")


def unedited_kind(path: Path) -> str | None:
    """The kind that the mark of a regular file names; None where there is no mark, or the text before it differs."""
    size = path.stat().st_size
    with path.open("rb") as stream:
        stream.seek(max(0, size - LONGEST))
        last = stream.read(LONGEST).splitlines(keepends=True)[-1:]
        found = _MARK.fullmatch(b"".join(last).decode(errors="replace"))
        if found is None:
            return None
        stream.seek(0)
        text = stream.read(size - len(last[0]))
    return found[1] if hashlib.sha256(text).hexdigest() == found[2] else None
