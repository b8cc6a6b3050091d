"""The layout of a command's help, and the options that every command has."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

import click

from treeopt.cli.configuration import COMMON, command_name, config_option
from treeopt.cli.examples import EXAMPLES


def write_options(command: click.Command, context: click.Context, formatter: click.HelpFormatter) -> None:
    """Write the options of a command, then those that all commands have."""
    particular: list[tuple[str, str]] = []
    common: list[tuple[str, str]] = []
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record is not None:
            (common if parameter.name in COMMON or "--help" in parameter.opts else particular).append(record)
    for title, records in (("Options", particular), ("Common options", common)):
        if records:
            with formatter.section(title):
                formatter.write_dl(records)


def write_examples(context: click.Context, formatter: click.HelpFormatter) -> None:
    """Write the examples of a command; a line is not broken, so that it can be copied."""
    examples = EXAMPLES.get(command_name(context), ())
    if not examples:
        return
    with formatter.section("Examples"):
        for what, line in examples:
            formatter.write(f"{'':{formatter.current_indent}}# {what}\n{'':{formatter.current_indent}}{line}\n")


# Variables by which other libraries print errors only; each is read when its library is imported.
QUIET_LIBRARIES = {
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TQDM_DISABLE": "1",
}


@dataclass(frozen=True)
class Shown:
    """What a command prints besides its result: `quiet` is without progress and notes, `verbose` with all messages."""

    quiet: bool = False
    verbose: bool = False
    no_progress: bool = False


def colored() -> bool:
    """Whether text may be colored, as rich decides: on a terminal, by NO_COLOR and by FORCE_COLOR."""
    forced = bool(os.environ.get("FORCE_COLOR")) and not os.environ.get("NO_COLOR")
    return forced or bool(sys.stdout and sys.stdout.isatty())


def common_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """The options of every command; the command gets a `console` in place of them."""
    for option in (
        click.option("--debug", is_flag=True, help="Show the traceback of an error."),
        click.option("--no-progress", is_flag=True, help="No progress bar and no lines of progress."),
        click.option("-v", "--verbose", is_flag=True, help="Messages of the library and of transformers too."),
        click.option("-q", "--quiet", is_flag=True, help="No progress and no notes."),
        click.option("--json", is_flag=True, help="Print one JSON object and nothing else."),
        config_option,
    ):
        function = option(function)
    return function


def shown_by(parameters: MutableMapping[str, Any]) -> Shown:
    """What the options say, which are removed from the parameters."""
    shown = Shown(**{name: parameters.pop(name) for name in ("quiet", "verbose", "no_progress")})
    if shown.quiet and shown.verbose:
        raise click.UsageError("give either --quiet or --verbose")
    return shown


def show_messages(shown: Shown) -> None:
    """Print the messages of the library to standard error: notes; with --verbose all, and those of transformers."""
    log = logging.getLogger("treeopt")
    if not log.handlers:
        log.addHandler(logging.StreamHandler())
    log.setLevel(logging.DEBUG if shown.verbose else logging.INFO)
    if not shown.verbose:
        return
    for name in QUIET_LIBRARIES:
        os.environ.pop(name, None)
    os.environ["TRANSFORMERS_VERBOSITY"] = "info"
    if "transformers" in sys.modules:
        from transformers.utils import logging as transformers_logging

        transformers_logging.set_verbosity_info()
