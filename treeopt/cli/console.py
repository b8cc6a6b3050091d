"""Output, progress and errors of all commands.

Results go to standard output, everything else to standard error. With `--json` standard output is one JSON object.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from treeopt.cli.terminal import echo, echo_json, printable_cell
from treeopt.errors import EXIT_BUG, TreeoptError, system_error
from treeopt.progress import Progress, silent

if TYPE_CHECKING:
    from treeopt.evaluate.metrics import Spread

_HEARTBEAT_SECONDS = 30.0
_HEARTBEAT_SHARE = 0.1
_FIRST_SECONDS = 2.0  # until the first line
_SHOWN_SKIPPED = 5


class Console:
    """The output of a command, by `--json` and `--quiet`; under torchrun only the first process prints."""

    def __init__(self, as_json: bool, quiet: bool) -> None:
        follows = "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("RANK", "0") != "0"
        self._warnings: list[str] = []
        if sys.stderr and sys.stderr.isatty() and not (quiet or follows):
            _show_notes()
        self.for_people = not (as_json or follows)
        self.for_programs = as_json and not follows
        self.quiet = quiet or not self.for_people  # with --json only the result and errors are printed

    def say(self, text: str = "") -> None:
        """Print a line of the result, unless --json is given."""
        if self.for_people:
            echo(text)

    def note(self, text: str) -> None:
        """Print a line about the run to standard error."""
        if not self.quiet:
            echo(text, err=True)

    def warn(self, text: str) -> None:
        """Print a line in spite of --quiet; with --json it is among the result's `warnings`."""
        self._warnings.append(text.removeprefix("warning: "))
        if self.for_people:
            echo(text, err=True)

    def result(self, data: Mapping[str, Any]) -> None:
        """Print the result as one JSON object, where --json is given."""
        if self.for_programs:
            echo_json(_plain({**data, "warnings": self._warnings} if self._warnings else data))

    def table(self, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print a table: aligned columns on a terminal, tab-separated in a pipe."""
        if not self.for_people:
            return
        header, *rows = ([printable_cell(cell) for cell in row] for row in (header, *rows))
        if not (sys.stdout and sys.stdout.isatty()):
            for row in (header, *rows):
                echo("\t".join(row))
            return
        from rich.console import Console as RichConsole
        from rich.table import Table

        table = Table(box=None, pad_edge=False)
        for i, name in enumerate(header):
            table.add_column(name, justify="right" if i else "left")
        for row in rows:
            table.add_row(*row)
        RichConsole(markup=False).print(table)  # cells may contain rich's markup

    @contextmanager
    def progress(self, name: str) -> Iterator[Progress]:
        """A callback (done, total, note): a bar on a terminal, regular lines elsewhere."""
        if self.quiet:
            yield silent
        elif sys.stderr and sys.stderr.isatty():
            with _bar(name) as update:
                yield update
        else:
            yield _heartbeat(name)


@contextmanager
def resumable(console: Console, where: str) -> Iterator[None]:
    """Context of long work that --resume can continue: an interruption prints how, and is raised again."""
    try:
        yield
    except KeyboardInterrupt:
        console.warn(f"interrupted; the same command with --resume continues {where}")
        raise


@contextmanager
def _bar(name: str) -> Iterator[Progress]:
    from rich.console import Console as RichConsole
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn(name),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=RichConsole(stderr=True), transient=True) as bar:
        task = bar.add_task(name, total=None, note="")

        def update(done: int, total: int, note: str) -> None:
            bar.update(task, completed=done, total=total, note=note)

        yield update


def _heartbeat(name: str) -> Progress:
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


class Command(click.Command):
    """A command that prints every error in one form, and exits with its status; other exceptions are bugs."""

    def invoke(self, ctx: click.Context) -> Any:
        self._check_given(ctx)
        as_json, debug = ctx.params.pop("as_json"), ctx.params.pop("debug")
        ctx.params["console"] = Console(as_json, ctx.params.pop("quiet"))
        try:
            return super().invoke(ctx)
        except (click.exceptions.Exit, click.ClickException, click.Abort, KeyboardInterrupt, BrokenPipeError):
            raise  # handled by `treeopt.cli.app.run`
        except Exception as error:
            if debug:
                echo(traceback.format_exc(), err=True, end="")
            known = error if isinstance(error, TreeoptError) else system_error(error)
            if known is None:
                _say_bug(error, as_json)
                ctx.exit(EXIT_BUG)
            if as_json:
                echo_json(known.as_dict(), err=True)
            else:
                echo(str(known), err=True)
            ctx.exit(known.exit_status)

    def _check_given(self, ctx: click.Context) -> None:
        """Refuse empty names of files and models: an unset variable of a script must not mean the default."""
        for option in (one for one in self.params if isinstance(one, click.Option) and one.default != ""):
            value = ctx.params.get(str(option.name))
            if "" in (value if isinstance(value, tuple) else (value,)):
                raise click.BadParameter("it is empty", ctx, option)


def _say_bug(error: Exception, as_json: bool) -> None:
    place = traceback.extract_tb(error.__traceback__)[-1]
    what = f"{type(error).__name__}: {str(error).strip() or 'no message'}"
    at = f"{place.filename}:{place.lineno}"
    if as_json:
        echo_json({"error": "bug", "what": what, "at": at, "exit_status": EXIT_BUG}, err=True)
    else:
        echo(f"error: {what}\n  at:  {at}\n  why: this is a bug in treeopt; please report it", err=True)
        echo("  fix: run it again with --debug for the traceback", err=True)


def command(name: str, **settings: Any) -> Callable[[Callable[..., Any]], click.Command]:
    """Decorator of a command: adds the options that all commands have, and passes a `console`."""

    def decorate(function: Callable[..., Any]) -> click.Command:
        for option in (
            click.option("--debug", is_flag=True, help="Show the traceback of an error."),
            click.option("-q", "--quiet", is_flag=True, help="No progress and no notes."),
            click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else."),
        ):
            function = option(function)
        return click.command(name, cls=Command, **settings)(function)

    return decorate


def _plain(data: Any) -> Any:
    """The data in types of JSON; numbers that are not finite become null."""
    if isinstance(data, Mapping):
        return {key: _plain(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_plain(value) for value in data]
    if isinstance(data, float):
        return data if math.isfinite(data) else None
    return data


def say_skipped(console: Console, skipped: Sequence[Any]) -> None:
    """Print the prompts that were skipped (records with prompt_id, tokens and reason)."""
    if not skipped:
        return
    named = [f"{row_of(s.prompt_id)} ({s.reason}, {s.tokens} tokens)" for s in skipped[:_SHOWN_SKIPPED]]
    more = f" and {len(skipped) - _SHOWN_SKIPPED} more" if len(skipped) > _SHOWN_SKIPPED else ""
    console.say(f"skipped {len(skipped)} prompts: {', '.join(named)}{more}")


def threads(number: int | str) -> str:
    """The number of threads of a measurement: `1 thread`, `2 threads`."""
    return f"{number} thread" if int(number) == 1 else f"{number} threads"


def spread_text(spread: Spread | None, digits: int) -> str:
    """`2.10 (2.05-2.14)`; one number for one repeat, a dash where nothing was timed."""
    if spread is None:
        return "-"
    if spread.low == spread.high:
        return f"{spread.median:.{digits}f}"
    return f"{spread.median:.{digits}f} ({spread.low:.{digits}f}-{spread.high:.{digits}f})"


def row_of(prompt_id: str) -> str:
    """The row of a prompt in its file, and its turn from the second on."""
    row, _, turn = prompt_id.partition(":")[2].partition(".")
    return f"row {int(row)}" + (f" turn {int(turn)}" if turn else "")


def _show_notes() -> None:
    """Show the library's notes, such as that drafting is being compiled, on the terminal."""
    log = logging.getLogger("treeopt")
    if not log.handlers:
        log.addHandler(logging.StreamHandler())
    log.setLevel(logging.INFO)
