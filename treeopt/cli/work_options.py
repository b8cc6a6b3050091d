"""Long work: the options `--resume` and `--shard`, and what Ctrl-C does and prints."""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing import parent_process
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

import treeopt
from treeopt.cli.checks import check_apart, given
from treeopt.cli.console import Console
from treeopt.cli.numbers import COUNT, NumberOrAuto
from treeopt.cli.options import force_option, group
from treeopt.cli.processes import known_team, nproc_option, team_of
from treeopt.defaults import AUTO, AUTO_BATCH
from treeopt.errors import TreeoptError

if TYPE_CHECKING:
    from treeopt.calibrate.results import Shard
    from treeopt.runs.work import Work


def _shard(context: click.Context, option: click.Parameter, text: str | None) -> Shard | None:
    """`i/n`, with i from 0."""
    if text is None:
        return None
    from treeopt.calibrate.results import Shard

    found = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text, flags=re.ASCII)
    if found is None:
        raise click.BadParameter(f"{text!r} is not i/n, such as 0/4", context, option)
    try:
        return Shard(int(found[1]), int(found[2]))
    except ValueError as error:
        raise click.BadParameter(str(error), context, option) from error


batch_option = click.option(  # of commands that store their batches
    "--batch-size",
    type=NumberOrAuto(COUNT),
    default=16,
    help=f"Prompts decoded together; {AUTO}: {AUTO_BATCH}, halved where memory runs out.",
)


def batch_settings(console: Console, options: Mapping[str, Any]) -> dict[str, Any]:
    """`batch_size`, or `auto_batch`, of the library's functions."""
    if options["batch_size"] != AUTO:
        return {"batch_size": options["batch_size"]}
    if options.get("shard") is not None:
        raise click.UsageError(f"--shard needs a --batch-size that is a number: with {AUTO} shards could differ in it")
    return {"auto_batch": treeopt.AutoBatch(say=console.warn)}


shard_option = click.option(  # of a command whose batches can be divided among jobs
    "--shard",
    callback=_shard,
    metavar="i/n",
    help="Calibrate part i of n (from 0), for `treeopt merge` [-o calibration.i-of-n.safetensors].",
)
work_options = group(  # of commands that store their batches in a work folder, and can divide them
    nproc_option,
    click.option("--resume", is_flag=True, help="Continue the unfinished run in OUTPUT.partial."),
    force_option,
)


def name_shard(options: dict[str, Any]) -> None:
    """Give the output of a shard a name with its number, where none is given."""
    shard: Shard | None = options["shard"]
    if shard is not None and not given("output"):
        output = Path(options["output"])
        options["output"] = str(output.with_name(f"{output.stem}.{shard.index}-of-{shard.count}{output.suffix}"))


def open_work(options: Mapping[str, Any]) -> Work:
    """The work folder of the output, after checking that a run can begin or continue there, and its processes."""
    from treeopt.runs.work import Work

    check_apart("resume", "force")
    team = known_team(click.get_current_context())
    work = Work(Path(options["output"]), resume=options["resume"], overwrite=options["force"], team=team)
    work.team = team_of(options)  # starts the other processes of --nproc, after the checks of `Work`
    return work


@contextmanager
def interruptible(console: Console, state: Callable[[], str]) -> Iterator[None]:
    """Context of long work: an interruption prints what is kept of it, and is raised again."""
    try:
        yield
    except KeyboardInterrupt as error:
        console.warn(f"interrupted; {state()}")
        if console.for_people:
            error.args = ("said",)  # `treeopt.cli.main` prints nothing more
        raise


@contextmanager
def ending_work(console: Console, work: Work) -> Iterator[None]:
    """Context of the work in a folder.

    The first Ctrl-C ends it when the chunk in flight is stored, the second at once; so does the first where no chunk is
    in flight. Both print how to continue. A failed run that stored nothing leaves no folder.
    """
    before = signal.getsignal(signal.SIGINT)

    def stop(_number: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        work.stop()
        console.warn("stopping: the batch in flight is finished and stored; Ctrl-C again ends at once")

    def stored() -> str:
        return f"the same command with --resume continues with {work.folder}" if work.chunks else "nothing is written"

    # Other threads cannot set handlers; and a process that --nproc started is ended by the one that started it.
    handles = threading.current_thread() is threading.main_thread() and parent_process() is None
    if handles:
        signal.signal(signal.SIGINT, stop)
    try:
        with interruptible(console, stored):
            yield
    except BaseException:
        with suppress(OSError, TreeoptError):  # the error that ends the work is printed
            if not work.chunks:
                work.remove()
        raise
    finally:
        work.release()
        if handles:
            signal.signal(signal.SIGINT, before)
