"""`AutoBatch`: sizes of forwards that are halved where memory runs out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from treeopt.models.auto_batch import AutoBatch, in_parts

ERRORS: list[Callable[[], Exception]] = [
    lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    lambda: RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    MemoryError,
]


def limited(limit: int, error: Callable[[], Exception], tried: list[int]) -> Callable[[Sequence[int]], list[int]]:
    """A function of rows that runs out of memory with more than `limit` of them."""

    def run(rows: Sequence[int]) -> list[int]:
        tried.append(len(rows))
        if len(rows) > limit:
            raise error()
        return [row + 100 for row in rows]

    return run


@pytest.mark.parametrize("error", ERRORS)
def test_sizes_are_halved_and_kept(error: Callable[[], Exception]) -> None:
    """From 8 to 2 by three tries; finished parts are not run again, and later batches begin with the smaller size."""
    said: list[str] = []
    auto, tried = AutoBatch(8, said.append), list[int]()
    run = limited(3, error, tried)
    assert auto.in_parts(range(5), run) == [100, 101, 102, 103, 104]
    assert tried == [5, 4, 2, 2, 1]
    assert (auto.size, len(said)) == (2, 1)
    assert said == ["memory ran out: from here on at most 2 prompts at once, not 8"]
    tried.clear()
    assert auto.in_parts(range(3), run) == [100, 101, 102]
    assert tried == [2, 1]
    assert len(said) == 1


def test_memory_that_runs_out_later_costs_only_the_part_in_flight() -> None:
    """Rows that are done before an error stay done."""
    auto, tried = AutoBatch(4), list[list[int]]()

    def run(rows: Sequence[int]) -> list[int]:
        tried.append(list(rows))
        if len(rows) > 1 and max(rows) > 5:
            raise MemoryError
        return list(rows)

    assert auto.in_parts(range(8), run) == list(range(8))
    assert tried == [[0, 1, 2, 3], [4, 5, 6, 7], [4, 5], [6, 7], [6], [7]]


def test_a_part_that_does_not_fit_is_not_tried_again() -> None:
    """Two rows do not fit at size 8: the next size is 1, not 4, with which the same two rows would be run."""
    tried: list[int] = []
    auto = AutoBatch(8)
    assert auto.in_parts(range(2), limited(1, MemoryError, tried)) == [100, 101]
    assert (tried, auto.size) == ([2, 1, 1], 1)


def test_one_row_that_does_not_fit_is_the_error() -> None:
    """With one row nothing can be halved; other errors are raised at once."""
    tried: list[int] = []
    with pytest.raises(MemoryError):
        AutoBatch(4).in_parts(range(4), limited(0, MemoryError, tried))
    assert tried == [4, 2, 1]
    tried.clear()
    with pytest.raises(RuntimeError, match="shape"):
        AutoBatch(4).in_parts(range(4), limited(0, lambda: RuntimeError("shape"), tried))
    assert tried == [4]


def test_without_it_rows_are_run_at_once() -> None:
    """None passes all rows on, and the error."""
    tried: list[int] = []
    assert in_parts(None, range(4), limited(4, MemoryError, tried)) == [100, 101, 102, 103]
    with pytest.raises(MemoryError):
        in_parts(None, range(5), limited(4, MemoryError, tried))
    assert tried == [4, 5]


@pytest.mark.parametrize("first", [0, -1, 1.5, True])
def test_other_sizes_are_refused(first: int) -> None:
    """A size is a whole number from 1."""
    with pytest.raises(ValueError, match="first"):
        AutoBatch(first)
