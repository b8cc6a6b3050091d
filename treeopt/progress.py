"""How long work tells its caller how far it is."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[int, int, str], None]  # done, total, a note


def silent(done: int, total: int, note: str) -> None:
    """Says nothing: the default."""
