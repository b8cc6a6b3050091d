"""Detection of a full disk from the errors that libraries raise during training."""

from __future__ import annotations

import errno

from treeopt.errors import TreeoptError

_FULL = (errno.ENOSPC, errno.EDQUOT)
# Messages of errors without an errno: of safetensors, and of torch.save, whose message does not name the disk.
_MESSAGES = (
    *("No space left on device", "os error 28", "Disk quota exceeded", "os error 122"),
    *("inline_container", "PytorchStreamWriter", "iostream error"),
)


def is_full(error: BaseException | None) -> bool:
    """Whether an error, or one of its causes, means that a disk is full."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _FULL:
            return True
        if not isinstance(error, TreeoptError) and any(message in str(error) for message in _MESSAGES):
            return True
        error = error.__cause__ or error.__context__
    return False
