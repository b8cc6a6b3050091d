"""Memory: out-of-memory errors of torch as E403."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from treeopt.errors import Code, TreeoptError, first_line, out_of_memory


@contextmanager
def memory_as_error(fix: str) -> Iterator[None]:
    """Raise E403 where the block runs out of memory, on the CPU or on a device."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        raise TreeoptError(Code.OUT_OF_MEMORY, first_line(error), fix=fix) from error
