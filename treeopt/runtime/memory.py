"""Memory: what torch raises where it runs out of it, as our error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from treeopt.errors import Code, TreeoptError, first_line

_SAID = ("can't allocate memory", "not enough memory", "out of memory", "Storage size calculation overflowed")


@contextmanager
def memory_as_error(fix: str) -> Iterator[None]:
    """Raise E403 where there is too little memory for what is done within, on the CPU or on a device."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        known = isinstance(error, (MemoryError, torch.OutOfMemoryError)) or any(text in str(error) for text in _SAID)
        if not known:
            raise
        raise TreeoptError(Code.OUT_OF_MEMORY, first_line(error), fix=fix) from error
