"""Output, progress and errors of all commands.

Results go to standard output, everything else to standard error. With `--json` standard output is one JSON object.
"""

import functools
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import click
from click.shell_completion import CompletionItem

from treeopt.cli.checks import input_names, made_of
from treeopt.cli.configuration import COMMON, command_name, config_option, configuration_of
from treeopt.cli.examples import EXAMPLES
from treeopt.cli.processes import follows, is_passed_on, join_team
from treeopt.cli.terminal import bar, echo, echo_json, heartbeat, printable_cell, show_messages
from treeopt.errors import EXIT_BUG, TreeoptError, error_of, system_error
from treeopt.facts import Part, keyed, lines
from treeopt.files.configurations import MADE_BY
from treeopt.progress import Progress, silent

# In a context's meta: errors pass through, to the command that runs this one. False where its notes are left out, too.
RAISING = "treeopt.raising"
_BUG = "bug"  # in place of the number of an error


class Console:
    """The output of a command, by `--json` and `--quiet`; under torchrun only the first process prints."""

    def __init__(
        self,
        as_json: bool,
        quiet: bool = False,
        configure: Callable[[], Mapping[str, Any]] = dict,
        *,
        verbose: bool = False,
        no_progress: bool = False,
    ) -> None:
        silenced = follows()
        self._warnings: list[str] = []
        self._data: dict[str, Any] = {}
        self._configure = configure
        self.made_with: dict[str, Any] = {}  # what a run knows of its machine: stored in the configuration
        if (verbose or (sys.stderr and sys.stderr.isatty())) and not (quiet or silenced):
            show_messages(verbose=verbose)
        self.for_people = not (as_json or silenced)
        self.for_programs = as_json and not silenced
        self.notes = True  # `treeopt reproduce` prints none of the command that it runs
        self.quiet = quiet or not self.for_people  # with --json only the result and errors are printed
        self.no_progress = no_progress

    @functools.cached_property
    def configuration(self) -> dict[str, Any]:
        """What is stored in the files that the command writes.

        It has the hashes of the inputs. They are computed here, at the end of a command, so that a reader has refused
        what is too large before, and a command that stores nothing hashes nothing.
        """
        found = dict(self._configure())
        return {**found, MADE_BY: {**found.get(MADE_BY, {}), **self.made_with}} if self.made_with else found

    def say(self, text: str = "") -> None:
        if self.for_people:
            echo(text)

    def note(self, text: str) -> None:
        """Print a line about the run to standard error."""
        if self.notes and not self.quiet:
            echo(text, err=True)

    def warn(self, *texts: str) -> None:
        """Print lines in spite of --quiet; with --json they are the result's `warnings`."""
        for text in texts:
            self._warnings.append(text.removeprefix("warning: "))
            if self.for_people:
                echo(text, err=True)

    def report(self, *parts: Part) -> None:
        """Print the parts of a report; those that have a key are in the JSON object of `result`."""
        for line in lines(parts) if self.for_people else ():
            if isinstance(line, str):
                echo(line)
            else:
                self.table(line.header, line.cells)
        self._data |= keyed(parts) if self.for_programs else {}

    def result(self, data: Mapping[str, Any]) -> None:
        """Print this and the parts of reports that have a key as one JSON object, where --json is given."""
        if self.for_programs:
            from treeopt.files.results import plain

            more = {"warnings": self._warnings, "configuration": self.configuration}
            echo_json(plain({**self._data, **data, **{name: value for name, value in more.items() if value}}))

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
        if self.quiet or self.no_progress:
            yield silent
        elif sys.stderr and sys.stderr.isatty():
            with bar(name) as update:
                yield update
        else:
            yield heartbeat(name)


class Command(click.Command):
    """A command that prints every error in one form, and exits with its status; other exceptions are bugs."""

    def invoke(self, ctx: click.Context) -> Any:
        self._check_given(ctx)
        options, inputs = configuration_of(ctx), input_names(ctx)
        as_json, debug = ctx.params.pop("json"), ctx.params.pop("debug")
        shown = {name: ctx.params.pop(name) for name in ("quiet", "verbose", "no_progress")}
        if shown["quiet"] and shown["verbose"]:
            raise click.UsageError("give either --quiet or --verbose")
        console = ctx.params["console"] = Console(as_json, configure=lambda: options | made_of(inputs), **shown)
        console.notes = ctx.meta.get(RAISING, True)
        try:
            join_team(ctx)
            return super().invoke(ctx)
        except (click.exceptions.Exit, click.ClickException, click.Abort, KeyboardInterrupt, BrokenPipeError):
            raise  # handled by `treeopt.cli.app.run`
        except Exception as error:
            if RAISING in ctx.meta:
                raise
            if debug:
                echo(traceback.format_exc(), err=True, end="")
            known = error if isinstance(error, TreeoptError) else system_error(error)
            _exit_with(ctx, _bug(error) if known is None else known.as_dict(), as_json)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        as_json = "--json" in args
        try:
            return super().parse_args(ctx, args)
        except TreeoptError as error:  # of --config
            if RAISING in ctx.meta:
                raise
            _exit_with(ctx, error.as_dict(), as_json)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """As in click, with the options of all commands last."""
        records = [(one, one.get_help_record(ctx)) for one in self.get_params(ctx)]
        for title, common in (("Options", False), ("Common options", True)):
            shown = [record for one, record in records if record and (one.opts[-1] in _OF_ALL) == common]
            if shown:
                with formatter.section(title):
                    formatter.write_dl(shown)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples of the command; a line is not broken, so that it can be copied."""
        with formatter.section("Examples"):
            for what, line in EXAMPLES[command_name(ctx)]:
                formatter.write(f"{'':{formatter.current_indent}}# {what}\n{'':{formatter.current_indent}}{line}\n")

    def _check_given(self, ctx: click.Context) -> None:
        """Refuse empty names of files and models: an unset variable of a script must not mean the default."""
        for option in (one for one in self.params if isinstance(one, click.Option) and one.default != ""):
            value = ctx.params.get(str(option.name))
            if "" in (value if isinstance(value, tuple) else (value,)):
                raise click.BadParameter("it is empty", ctx, option)


def run_inside(words: Sequence[str], *, notes: bool) -> None:
    """Run a command of the program in the running one, which gets its errors."""
    program = click.get_current_context().find_root().command
    with program.make_context("treeopt", [*words]) as context:
        context.meta[RAISING] = notes
        program.invoke(context)


def _exit_with(ctx: click.Context, report: Mapping[str, Any], as_json: bool) -> NoReturn:
    """Print an error, unless another process does, and exit with its status."""
    if is_passed_on(ctx, report):
        pass
    elif as_json:
        echo_json(report, err=True)
    elif report["error"] == _BUG:
        echo(f"error: {report['what']}\n  at:  {report['at']}", err=True)
        echo("  why: this is a bug in treeopt; please report it", err=True)
        echo("  fix: run it again with --debug for the traceback", err=True)
    else:
        echo(str(error_of(report)), err=True)
    ctx.exit(report["exit_status"])


def _bug(error: Exception) -> dict[str, Any]:
    """What is printed of an exception that is none of ours, or of an error of another process."""
    if hasattr(error, "report"):  # a `treeopt.runs.processes.ProcessFailed`
        return dict(error.report)
    place = traceback.extract_tb(error.__traceback__)[-1]
    what = f"{type(error).__name__}: {str(error).strip() or 'no message'}"
    return {"error": _BUG, "what": what, "at": f"{place.filename}:{place.lineno}", "exit_status": EXIT_BUG}


class _FileText(click.types.StringParamType):
    """A text, for which a shell offers files."""

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(incomplete, type="file")]


_COMMON_OPTIONS = (  # those named COMMON, of which the command gets a `console`
    click.option("--debug", is_flag=True, help="Show the traceback of an error."),
    click.option("--no-progress", is_flag=True, help="No progress bar and no lines of progress."),
    click.option("-v", "--verbose", is_flag=True, help="Messages of the library and of transformers too."),
    click.option("-q", "--quiet", is_flag=True, help="No progress and no notes."),
    click.option("--json", is_flag=True, help="Print one JSON object and nothing else."),
    config_option,
)


_OF_ALL = {"--help", *(f"--{name.replace('_', '-')}" for name in COMMON)}


def command(name: str, **settings: Any) -> Callable[[Callable[..., Any]], click.Command]:
    """Decorator of a command: adds the options that all commands have, and passes a `console`."""

    def decorate(function: Callable[..., Any]) -> click.Command:
        for option in _COMMON_OPTIONS:
            function = option(function)
        made = click.command(name, cls=Command, context_settings={"show_default": True}, **settings)(function)
        for one in made.params:
            if isinstance(one.type, click.types.StringParamType):
                one.type = _FileText()
        return made

    return decorate
