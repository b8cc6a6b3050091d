"""The layout of a command's help: its options, the options of all commands in a section of their own, and examples."""

from __future__ import annotations

import click

from treeopt.cli.examples import EXAMPLES

COMMON = ("config", "json", "quiet", "verbose", "no_progress", "color", "debug")  # parameters that every command has


def command_name(context: click.Context) -> str:
    """The name of a command without that of the program: `build`, `heads show`."""
    names: list[str] = []
    one: click.Context | None = context
    while one is not None and one.parent is not None:
        names.insert(0, one.info_name or "")
        one = one.parent
    return " ".join(names)


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
