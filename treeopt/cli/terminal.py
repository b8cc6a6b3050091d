"""Printing to a terminal: control characters in text from files, models and users are escaped.

An escape sequence in a tree file, a prompt's category or a file name could otherwise color or erase text on the
terminal. JSON is printed in ASCII, in which such characters are escaped.
"""

import contextlib
import io
import json
import logging
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import click

from treeopt.errors import Code, TreeoptError
from treeopt.progress import Progress

# C0 and C1 control characters, DEL, marks that reorder text (bidirectional), line separators, and lone surrogates.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_LAYOUT = "\n\t"


def printable(text: str, *, keep: str = _LAYOUT) -> str:
    """The text with every control character escaped, such as `\\x1b`, except those in `keep`."""
    return _UNSAFE.sub(lambda found: found[0] if found[0] in keep else ascii(found[0])[1:-1], text)


def printable_cell(text: str) -> str:
    """`printable` for a cell of a table, where tabs and line ends are escaped too."""
    return printable(text, keep="")


def echo(text: str = "", *, err: bool = False, end: str = "\n") -> None:
    """Print text to standard output or standard error, without control characters other than line ends and tabs."""
    _write(printable(text) + end, err=err)


def echo_json(data: Mapping[str, Any], *, err: bool = False) -> None:
    _write(json.dumps(data, allow_nan=False) + "\n", err=err)


def _write(text: str, *, err: bool) -> None:
    """Print text; errors of writing to standard error are ignored."""
    try:
        click.echo(text, err=err, nl=False)
    except OSError:
        if not err:
            raise
        with contextlib.suppress(OSError, AttributeError):  # else Python writes the buffer again, and exits with 120
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def escape_unencodable() -> None:
    """Let standard output and error escape characters that their encoding lacks, instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # None where the caller closed it; streams of tests lack the method
            stream.reconfigure(errors="backslashreplace")


class _Closed(io.FileIO):
    """A file whose errors of writing are those of a closed standard output."""

    def write(self, content: Any) -> Any:
        try:
            return super().write(content)
        except OSError as error:
            what, fix = "standard output is closed", "leave it open; > /dev/null discards the result"
            raise TreeoptError(Code.SYSTEM_REFUSED, what, why="the result is printed there", fix=fix) from error


def closed_output() -> io.TextIOWrapper:
    """A stream in place of a closed standard output: what is written to it is E404, as it is E403 on a full disk."""
    unwritable = os.open(os.devnull, os.O_RDONLY)  # until another file takes its number, as `treeopt.cli.app.run` does
    return io.TextIOWrapper(io.BufferedWriter(_Closed(unwritable, "w")), encoding="utf-8")


_HEARTBEAT_SECONDS = 30.0
_HEARTBEAT_SHARE = 0.1
_FIRST_SECONDS = 2.0  # until the first line


@contextmanager
def bar(name: str) -> Iterator[Progress]:
    """A bar on standard error, which is removed at the end."""
    from rich.console import Console as RichConsole
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as RichProgress

    noted = TextColumn("{task.fields[note]}")
    columns = (TextColumn(name), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), noted)
    with RichProgress(*columns, console=RichConsole(stderr=True), transient=True) as shown:
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


# Variables by which other libraries print errors only; each is read when its library is imported.
QUIET_LIBRARIES = {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TQDM_DISABLE": "1"}


def show_messages(*, verbose: bool) -> None:
    """Print the messages of the library to standard error: notes; verbose all, and those of transformers."""
    log = logging.getLogger("treeopt")
    if not log.handlers:
        log.addHandler(logging.StreamHandler())
    log.setLevel(logging.DEBUG if verbose else logging.INFO)
    if not verbose:
        return
    for name in QUIET_LIBRARIES:
        os.environ.pop(name, None)
    os.environ["TRANSFORMERS_VERBOSITY"] = "info"
    if "transformers" in sys.modules:
        from transformers.utils import logging as transformers_logging

        transformers_logging.set_verbosity_info()


def colored() -> bool:
    """Whether text may be colored, as rich decides: on a terminal, by NO_COLOR and by FORCE_COLOR."""
    forced = bool(os.environ.get("FORCE_COLOR")) and not os.environ.get("NO_COLOR")
    return forced or bool(sys.stdout and sys.stdout.isatty())
