"""How long work tells its caller how far it is."""

from __future__ import annotations

import time
from collections.abc import Callable

Progress = Callable[[int, int, str], None]  # done, total, a note


def silent(done: int, total: int, note: str) -> None:
    """Says nothing: the default."""


def late(progress: Progress, seconds: float = 2.0) -> Progress:
    """The same, but for the first seconds silent: work that is done by then needs no line."""
    begin = time.monotonic()

    def update(done: int, total: int, note: str) -> None:
        if time.monotonic() - begin >= seconds:
            progress(done, total, note)

    return update


class Meter:
    """Tells how many parts of one task are done; says nothing between tasks."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.note = ""
        self._done = self._total = 0

    def begin(self, parts: int) -> None:
        """So many parts follow."""
        self._done, self._total = 0, parts

    def add(self, parts: int) -> None:
        """So many are done, or turned out not to be needed."""
        self._done = min(self._done + parts, self._total)
        if parts and self._total:
            self.progress(self._done, self._total, self.note)

    def end(self) -> None:
        """What had been expected and not done was not needed; what follows belongs to no task."""
        self.add(self._total - self._done)
        self.begin(0)
