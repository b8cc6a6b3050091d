"""`AutoBatch`: the number of texts in a forward, which is halved where memory runs out."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from treeopt.defaults import AUTO_BATCH
from treeopt.errors import check_counts, out_of_memory

Row = TypeVar("Row")
Found = TypeVar("Found")


class AutoBatch:
    """A batch size that is halved where memory runs out; for the rest of the run.

    The batches of a run, which are stored and numbered, have the first size; each is run in as many forwards as it
    takes. So a smaller size changes no batch that is finished, and a resumed run has the same batches.

    Args:
        first: the size to begin with, a number of texts.
        say: called with a sentence after the first forward of a smaller size.

    Attributes:
        size: the present size.

    Raises:
        ValueError: where the size is not a whole number from 1.
    """

    def __init__(self, first: int = AUTO_BATCH, say: Callable[[str], None] = lambda sentence: None) -> None:
        check_counts(first=first)
        self.first = self.size = int(first)
        self._said, self._say = self.first, say

    def __str__(self) -> str:
        return f"auto, from {self.first}"

    def in_parts(self, rows: Sequence[Row], run: Callable[[Sequence[Row]], Sequence[Found]]) -> list[Found]:
        """The results of `run`, one a row, for at most `size` rows at a time."""
        found: list[Found] = []
        while len(found) < len(rows):
            part = rows[len(found) : len(found) + self.size]
            done = self._tried(part, run)
            if done is not None:
                found += done
                continue
            while self.size >= len(part):  # the last part of a batch is smaller than the size
                self.size //= 2
            if torch.cuda.is_available():
                torch.cuda.empty_cache()  # freed blocks of the larger size do not fit the smaller one
        return found

    def _tried(self, part: Sequence[Row], run: Callable[[Sequence[Row]], Sequence[Found]]) -> Sequence[Found] | None:
        """The results of `run`; None where memory runs out. Its tensors are freed only when the error is forgotten."""
        try:
            done = run(part)
        except (MemoryError, RuntimeError) as error:
            if len(part) == 1 or not out_of_memory(error):
                raise
            return None
        if self.size < self._said:
            self._say(f"memory ran out: from here on at most {self.size} prompts at once, not {self._said}")
            self._said = self.size
        return done


def in_parts(
    auto: AutoBatch | None, rows: Sequence[Row], run: Callable[[Sequence[Row]], Sequence[Found]]
) -> Sequence[Found]:
    """`AutoBatch.in_parts`; all rows at once where None."""
    return run(rows) if auto is None else auto.in_parts(rows, run)
