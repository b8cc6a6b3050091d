"""Progress of long work: a bar on a terminal, regular lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from treeopt.cli.terminal import echo
from treeopt.progress import Progress

_HEARTBEAT_SECONDS = 30.0
_HEARTBEAT_SHARE = 0.1
_FIRST_SECONDS = 2.0  # until the first line


@contextmanager
def bar(name: str, **colors: Any) -> Iterator[Progress]:
    """A bar on standard error, which is removed at the end; `colors` are options of rich's console."""
    from rich.console import Console as RichConsole
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as RichProgress

    columns = (
        TextColumn(name),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with RichProgress(*columns, console=RichConsole(stderr=True, **colors), transient=True) as shown:
        task = shown.add_task(name, total=None, note="")

        def update(done: int, total: int, note: str) -> None:
            shown.update(task, completed=done, total=total, note=note)

        yield update


def heartbeat(name: str) -> Progress:
    """A callback that prints a line every 30 seconds or 10 %, whichever is first; the first line after 2 seconds."""
    begin = previous = last_time = time.monotonic()
    last_done, last_share, wait = 0, 0.0, _FIRST_SECONDS

    def update(done: int, total: int, note: str) -> None:
        nonlocal begin, previous, last_time, last_done, last_share, wait
        now, share = time.monotonic(), done / max(total, 1)
        if done < last_done:  # another task has begun, at the last report of the one before
            begin, last_share = previous, 0.0
        previous, last_done = now, done
        if share - last_share < _HEARTBEAT_SHARE and now - last_time < wait and done < total:
            return
        last_time, last_share, wait = now, share, _HEARTBEAT_SECONDS
        left = f"{(now - begin) * (1 - share) / share:.0f} s left" if share else "just begun"
        echo(f"{name} {done}/{total} {share:.0%} {left}  {note}", err=True)

    return update
