"""Full disks: whether what a library raised while training says that there is no room left."""

from __future__ import annotations

import errno

from treeopt.errors import TreeoptError

_FULL = (errno.ENOSPC, errno.EDQUOT)
# What is said of a full disk without a number: by safetensors, and by torch.save, which has no words for it.
_SAID = (
    *("No space left on device", "os error 28", "Disk quota exceeded", "os error 122"),
    *("inline_container", "PytorchStreamWriter", "iostream error"),
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
