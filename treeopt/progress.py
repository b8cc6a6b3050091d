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
