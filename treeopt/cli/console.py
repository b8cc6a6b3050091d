"""What the commands share: options, output, progress, and how errors reach the user.

Results go to standard output, everything else to standard error. With `--json` standard output holds one object.
"""

from __future__ import annotations

import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from treeopt.calibration import Calibration
from treeopt.cli.terminal import echo, echo_json, printable_cell
from treeopt.drafter import Drafter
from treeopt.errors import EXIT_BUG, TreeoptError, system_error
from treeopt.files.bundled import POCKET
from treeopt.files.calibrations import DEFAULT_FILE
from treeopt.files.outputs import check_no_input, check_output
from treeopt.latency import LatencyProfile
from treeopt.policy import Plan
from treeopt.progress import Progress, silent

if TYPE_CHECKING:
    from treeopt.models.base import Base
    from treeopt.models.layouts import LoadedHeads

# Options that name what a command reads, under every name that a command has for it.
_INPUTS = (
    *("heads", "model", "prompts", "responses", "exclude", "data"),
    *("tree", "calibration", "calibrations", "drafter", "profile"),
)
_HEARTBEAT_SECONDS = 30.0
_HEARTBEAT_SHARE = 0.1
_FIRST_SECONDS = 2.0  # the first line comes no later
_SHOWN_SKIPPED = 5
_FLOAT32 = "float32"  # the dtype of files of before, which do not name it


class Console:
    """Where a command prints, by `--json` and `--quiet`; under torchrun only the first process does."""

    def __init__(self, as_json: bool, quiet: bool) -> None:
        follows = "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("RANK", "0") != "0"
        self.for_people = not (as_json or follows)
        self.for_programs = as_json and not follows
        self.quiet = quiet or not self.for_people  # programs read the result; errors alone stand beside it

    def say(self, text: str = "") -> None:
        """A line of the result, for people."""
        if self.for_people:
            echo(text)

    def note(self, text: str) -> None:
        """A line beside the result: what was found, written, or is worth knowing."""
        if not self.quiet:
            echo(text, err=True)

    def warn(self, text: str) -> None:
        """A line that --quiet does not silence."""
        if self.for_people:
            echo(text, err=True)

    def result(self, data: Mapping[str, Any]) -> None:
        """The result, for programs."""
        if self.for_programs:
            echo_json(_plain(data))

    def table(self, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Aligned columns on a terminal, tabs in a pipe; the first column to the left, the others to the right."""
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
        RichConsole(markup=False).print(table)  # names in cells are data

    @contextmanager
    def progress(self, name: str) -> Iterator[Progress]:
        """A callback (done, total, note): a bar on a terminal, a line now and then elsewhere."""
        if self.quiet:
            yield silent
        elif sys.stderr and sys.stderr.isatty():
            with _bar(name) as update:
                yield update
        else:
            yield _heartbeat(name)


@contextmanager
def resumable(console: Console, where: str) -> Iterator[None]:
    """Long work that --resume can go on with: an interruption says so, and passes on."""
    try:
        yield
    except KeyboardInterrupt:
        console.warn(f"interrupted; the same command with --resume goes on {where}")
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
    """A line each 30 seconds or 10 %, whichever comes first; the first one after 2 seconds of work."""
    begin = time.monotonic()
    last_time, last_share = begin, 0.0
    wait = _FIRST_SECONDS

    def update(done: int, total: int, note: str) -> None:
        nonlocal begin, last_time, last_share, wait
        now, share = time.monotonic(), done / total
        if share < last_share:  # another part of the work has begun
            begin, last_share = now, 0.0
        if share - last_share < _HEARTBEAT_SHARE and now - last_time < wait and done < total:
            return
        last_time, last_share, wait = now, share, _HEARTBEAT_SECONDS
        left = (now - begin) * (1 - share) / share
        echo(f"{name} {done}/{total} {share:.0%} {left:.0f} s left  {note}", err=True)

    return update


class Command(click.Command):
    """A command whose faults reach the user in one form: our errors with their own exit status, bugs as bugs."""

    def invoke(self, ctx: click.Context) -> Any:
        as_json, debug = ctx.params.pop("as_json"), ctx.params.pop("debug")
        ctx.params["console"] = Console(as_json, ctx.params.pop("quiet"))
        try:
            return super().invoke(ctx)
        except (click.exceptions.Exit, click.ClickException, click.Abort, KeyboardInterrupt, BrokenPipeError):
            raise  # for the program's entry
        except (MemoryError, TreeoptError, OSError) as error:
            if debug:
                traceback.print_exc()
            known = error if isinstance(error, TreeoptError) else system_error(error)
            if known is None:
                _say_bug(error, as_json)
                ctx.exit(EXIT_BUG)
            if as_json:
                echo_json(known.as_dict(), err=True)
            else:
                echo(str(known), err=True)
            ctx.exit(known.exit_status)
        except Exception as error:
            if debug:
                traceback.print_exc()
            _say_bug(error, as_json)
            ctx.exit(EXIT_BUG)


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
    """A command with the options that all have; the function gets a `console`."""

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
    """JSON's own types: mappings, lists, numbers; not-a-number becomes null."""
    if isinstance(data, Mapping):
        return {key: _plain(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_plain(value) for value in data]
    if isinstance(data, float):
        return data if math.isfinite(data) else None
    return data


def say_skipped(console: Console, skipped: Sequence[Any]) -> None:
    """Name the prompts that were not run (records with prompt_id, tokens and reason)."""
    if not skipped:
        return
    named = [f"{row_of(s.prompt_id)} ({s.reason}, {s.tokens} tokens)" for s in skipped[:_SHOWN_SKIPPED]]
    more = f" and {len(skipped) - _SHOWN_SKIPPED} more" if len(skipped) > _SHOWN_SKIPPED else ""
    console.say(f"skipped {len(skipped)} prompts: {', '.join(named)}{more}")


def row_of(prompt_id: str) -> str:
    """A prompt by the row of its file, and by its turn from the second on."""
    row, _, turn = prompt_id.partition(":")[2].partition(".")
    return f"row {int(row)}" + (f" turn {int(turn)}" if turn else "")


def warn_other_heads(console: Console, calibration: Calibration, profile: LatencyProfile | None) -> None:
    """Warn where a profile was measured with another base or other heads than a calibration."""
    if profile is None:
        return
    own = calibration.provenance
    dtype = own.settings.get("dtype", _FLOAT32)
    _warn_made_for_other(console, "the profile", profile.provenance, own.model_id, dtype, own.heads_id)


def warn_other_tree(console: Console, name: str, tree: Plan, base: Base, loaded: LoadedHeads) -> None:
    """Warn where a tree was built for another base or other heads than these."""
    source = tree.source.get("calibration") or {}
    _warn_made_for_other(console, name, source, base.fingerprint, base.dtype_name, loaded.fingerprint)


def warn_other_drafter(console: Console, drafter: Drafter | None, base: Base, loaded: LoadedHeads) -> None:
    """Warn where a drafter was learned with another base or other heads than these."""
    source = {} if drafter is None else drafter.source
    _warn_made_for_other(console, "the drafter", source, base.fingerprint, base.dtype_name, loaded.fingerprint)


def _warn_made_for_other(
    console: Console, name: str, source: Mapping[str, Any], model_id: str, dtype: str, heads_id: str
) -> None:
    """Warn where what `source` says of how a thing was made is not what it is used with.

    The id of a base is that of its weights as they were loaded: in another dtype the same weights have another, so only
    ids of one dtype are compared. Heads have theirs from the file.
    """
    others = []
    if source.get("dtype", _FLOAT32) == dtype and source.get("model_id") not in (None, "", model_id):
        others.append(f"another base model ({source['model_id']}, this is {model_id})")
    if source.get("heads_id") not in (None, "", heads_id):
        others.append(f"other heads ({source['heads_id']}, these are {heads_id})")
    if others:
        console.warn(f"warning: {name} was made for {' and '.join(others)}")


def check_static_only(names: Sequence[str]) -> None:
    """Refuse options that only --kind static has."""
    context = click.get_current_context()
    given = [name for name in names if context.get_parameter_source(name) is not ParameterSource.DEFAULT]
    if given:
        raise click.UsageError(f"--{given[0].replace('_', '-')} belongs to --kind static")


def device_options(function: Callable[..., Any], *, dtype: str = "auto") -> Callable[..., Any]:
    """The options that say on what, and in which precision, a model runs."""
    dtypes = click.Choice(["auto", "float32", "bfloat16", "float16"])
    for option in (
        click.option("--device", default="auto", show_default=True, help="cpu, cuda, cuda:1, ..."),
        click.option("--dtype", type=dtypes, default=dtype, show_default=True, help="auto: float32 on a CPU."),
    ):
        function = option(function)
    return function


def force_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """The option of every command that writes; `treeopt.files.outputs` says what it decides."""
    shown = "Replace a file that exists, unless it is an input."
    return click.option("--force", is_flag=True, help=shown)(function)


def check_outputs(options: Mapping[str, Any], output: str, *, kind: str | None = None) -> Path:
    """The path of an output; refused where it must not be replaced, or is an input of this command. Before any work."""
    inputs = [value for name in _INPUTS for value in _several(options.get(name))]
    return check_output(output, kind=kind, force=options["force"], inputs=inputs)


def _several(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else [value]


def base_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """The options of commands that need a base model alone."""
    model = click.option("--model", default=POCKET, show_default=True, help="Base model: folder or hub name.")
    return model(device_options(function))


def model_options(function: Callable[..., Any], *, dtype: str) -> Callable[..., Any]:
    """The options of commands that need heads and their base model; `load_models` reads them."""
    for option in (
        click.option("--model", help="Base model: folder or hub name [default: the one in the heads' config]."),
        click.option("--heads", help=f"Heads: folder, weights file or hub name [default: the built-in {POCKET}]."),
    ):
        function = option(function)
    return device_options(function, dtype=dtype)


def load_models(console: Console, options: Mapping[str, Any]) -> tuple[Base, LoadedHeads]:
    """The base model and heads that the options name, said on the console."""
    from treeopt.models.pair import load_pair

    heads, model = _chosen_heads(options), options["model"]
    base, loaded = load_pair(heads, model, dtype=options["dtype"], device=options["device"])
    if "output" in options:  # the base is known only now where the heads' config names it
        check_no_input(options["output"], base.name, loaded.name)
    for note in (f"heads    {loaded.heads.num_heads} in {loaded.file}", *loaded.notes):
        console.note(note)
    say_base(console, base)
    return base, loaded


def _chosen_heads(options: Mapping[str, Any]) -> str:
    """The heads that the options name; the built-in ones where neither heads nor a model are given."""
    if options["heads"] is None and options["model"] is not None:
        raise click.UsageError("--model needs --heads: which heads does it draft with?")
    return options["heads"] or POCKET


def say_base(console: Console, base: Base) -> None:
    """Say which base model was loaded, and how it runs."""
    for note in (f"model    {base.name}  {base.dtype_name} on {base.device}", *base.notes):
        console.note(note)


def text_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """The options that say how prompts become token ids, and how far they are continued."""
    for option in (
        click.option("--chat-template/--no-chat-template", default=True, help="Use the tokenizer's, where it has one."),
        click.option("--max-new-tokens", type=click.IntRange(min=1), default=128, show_default=True),
    ):
        function = option(function)
    return function


def prompt_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """The options that say which prompts are continued, and how far."""
    function = text_options(function)
    for option in (
        click.option("--limit", type=click.IntRange(min=1), help="Only so many prompts."),
        click.option("--skip", type=click.IntRange(min=0), default=0, help="Leave out the first so many prompts."),
        click.option("--prompts", help="File (.json .jsonl .txt .parquet), hub data set, or a set of `treeopt list`."),
    ):
        function = option(function)
    return function


def chosen_prompts(options: Mapping[str, Any]) -> str:
    """The prompts that the options name: the built-in model's own where neither prompts nor heads are given."""
    if options["prompts"] is None and _chosen_heads(options) != POCKET:
        raise click.UsageError("Missing option '--prompts' (such as alpaca_eval), which other heads than pocket need.")
    return options["prompts"] or POCKET


tree_option = click.option("--tree", required=True, help="Tree file, or a name from `treeopt list`.")
drafter_option = click.option("--drafter", help="Drafter file, by `treeopt learn` [default: the one the tree names].")
calibration_option = click.option(
    "--calibration", default=DEFAULT_FILE, show_default=True, help="Traces, by `treeopt calibrate`."
)
