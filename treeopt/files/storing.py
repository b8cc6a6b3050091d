"""The configuration of the running command, for files that are written together with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from treeopt.files.configurations import KEY, Configuration

_running: ContextVar[Configuration | None] = ContextVar("running", default=None)


@contextmanager
def storing(configuration: Configuration) -> Iterator[None]:
    """Context in which heads, adapters and merged models are written with the configuration of a command."""
    before = _running.set(configuration)
    try:
        yield
    finally:
        _running.reset(before)


def with_stored(data: Mapping[str, Any]) -> dict[str, Any]:
    """The data of a JSON file, with the configuration of the command that writes it; unchanged outside of commands."""
    running = _running.get()
    return dict(data) if running is None else {**data, KEY: running}
