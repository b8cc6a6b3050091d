"""Callbacks that report the progress of long work."""

import time
from collections.abc import Callable

Progress = Callable[[int, int, str], None]  # done, total, a note


def silent(done: int, total: int, note: str) -> None:
    """Do nothing: the default."""


def late(progress: Progress, seconds: float = 2.0) -> Progress:
    """The same callback, but silent for the first seconds: short work needs no report."""
    begin = time.monotonic()

    def update(done: int, total: int, note: str) -> None:
        if time.monotonic() - begin >= seconds:
            progress(done, total, note)

    return update


class Meter:
    """Counts the finished parts of one task at a time, and reports them to a callback."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.note = ""
        self._done = self._total = 0

    def begin(self, parts: int) -> None:
        """Start a task of this number of parts."""
        self._done, self._total = 0, parts

    def add(self, parts: int) -> None:
        """Count parts that are done or not needed."""
        self._done = min(self._done + parts, self._total)
        if parts and self._total:
            self.progress(self._done, self._total, self.note)

    def end(self) -> None:
        """End the task: its remaining parts are not needed."""
        self.add(self._total - self._done)
        self.begin(0)
