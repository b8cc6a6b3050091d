"""Room on disk: whether there is enough before a run, and whether an error says that there is none left."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

from treeopt.errors import Code, TreeoptError

_FULL = (errno.ENOSPC, errno.EDQUOT)
# What is said of a full disk without a number: by safetensors, and by torch.save, which has no words for it.
_SAID = (
    *("No space left on device", "os error 28", "Disk quota exceeded", "os error 122"),
    *("inline_container", "PytorchStreamWriter", "iostream error"),
)


def check_room(folder: Path, needed: int, what: str) -> None:
    """Raise E403 where the disk of a folder, which need not exist yet, has fewer bytes free than are needed."""
    known = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    free = shutil.disk_usage(known).free
    if free < needed:
        raise TreeoptError(
            Code.OUT_OF_MEMORY,
            f"{what} take {in_words(needed)} on disk, and {in_words(free)} are free",
            at=str(folder),
            fix="make room, or name a folder on another disk with -o",
        )


def is_full(error: BaseException | None) -> bool:
    """Whether an error, or one that it comes from, says that a disk is full."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _FULL:
            return True
        if not isinstance(error, TreeoptError) and any(said in str(error) for said in _SAID):
            return True
        error = error.__cause__ or error.__context__
    return False


def in_words(size: int) -> str:
    """Bytes as people read them."""
    for unit, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if size >= unit:
            return f"{size / unit:.1f} {name}"
    return f"{size} bytes"
