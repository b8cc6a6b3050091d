"""The program `treeopt`. A command is imported when it is called, so that `--help` is fast."""

from __future__ import annotations

import difflib
import importlib
import io
import os
import sys
from typing import Any

import click

from treeopt.cli.help_text import QUIET_LIBRARIES
from treeopt.cli.processes import PROGRAM, follows
from treeopt.cli.terminal import closed_output, echo, echo_json, escape_unencodable
from treeopt.errors import TreeoptError, system_error
from treeopt.version import VERSION

# What people do -> command -> one line of help. treeopt.cli.<command>_command has the click command as `command`.
GROUPS = {
    "Measure": {
        "calibrate": "Measure how often the candidates of each head or level are right.",
        "learn": "Learn a drafter from the model's own text, with heads or without.",
        "profile": "Measure the time of a decode step by the size of the tree.",
        "merge": "Join shards of a calibration, or calibrations of different prompts.",
    },
    "Build": {
        "build": "Build the best tree for a number of nodes.",
        "curve": "Tokens per step, overhead and speedup by the size of the tree.",
        "plan": "Model overhead and speedup on a device that need not be at hand.",
    },
    "Look": {
        "show": "Print a tree, what differs, why, rules it breaks, or what made it.",
        "list": "List the trees and prompt sets that come with treeopt.",
        "render": "Draw a tree as SVG, DOT, or another format of graphviz.",
        "report": "Write calibrations, a tree and results as one HTML file.",
        "reproduce": "Run the command that made a file again, and compare.",
    },
    "Run": {
        "validate": "Check that a tree is lossless and as predicted; measure its speed.",
        "compare": "Compare methods of speculative decoding on your model and prompts.",
        "generate": "Continue a prompt with a tree, and stream the text.",
    },
    "Engines": {
        "compile": "Write the attention mask, positions and indices of a tree.",
        "export": "Write a tree in the format of an inference engine.",
        "import": "Read a tree from the file of an engine, or from a pasted list.",
        "heads": "Describe Medusa heads, or convert them for an engine.",
    },
    "Train": {
        "distill": "Generate training texts with the base model.",
        "train": "Train draft heads for a base model (Medusa-1).",
    },
    "Set-up": {
        "demo": "Run every step on the built-in model, in about a minute.",
        "doctor": "Check the installation, and say what to do where it does not work.",
    },
}
COMMANDS = {name: what for commands in GROUPS.values() for name, what in commands.items()}

# Messages of these libraries would break results, logs and progress bars; --verbose shows them.
_QUIET = {**QUIET_LIBRARIES, "TOKENIZERS_PARALLELISM": "false"}

_EXIT_PIPE = 141  # the status that shells report for a program ended by a closed pipe


class _ReaderClosed(Exception):
    """The reader of standard output closed the pipe; click would exit with 1, the status of bugs."""


class LazyGroup(click.Group):
    """A group of commands whose names and help lines are known without importing them."""

    def make_context(self, info_name: str | None, args: list[str], *more: Any, **settings: Any) -> click.Context:
        """As in click, which prints `--help` here; a closed pipe raises `_ReaderClosed`."""
        given = tuple(args)
        try:
            context = super().make_context(info_name, args, *more, **settings)
            context.meta[PROGRAM] = run, given
            return context
        except BrokenPipeError as error:
            raise _ReaderClosed from error

    def invoke(self, ctx: click.Context) -> Any:
        """As in click, which runs commands here; a closed pipe raises `_ReaderClosed`."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:
            raise _ReaderClosed from error

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As in click; for an unknown name, similar names are suggested."""
        near = difflib.get_close_matches(args[0], COMMANDS, n=2)
        if args[0] not in COMMANDS and near:
            ctx.fail(f"No such command {args[0]!r}. Did you mean {' or '.join(near)}?")
        return super().resolve_command(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"treeopt.cli.{cmd_name}_command").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, COMMANDS))
        for group, commands in GROUPS.items():
            with formatter.section(group):
                formatter.write_dl([(f"{name:{width}}", what) for name, what in commands.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "auto_envvar_prefix": "TREEOPT"})
@click.version_option(VERSION, prog_name="treeopt", allow_from_autoenv=False)
def program() -> None:
    """Measure a drafter, build the best tree for it, and decode with it, losslessly.

    \b
    treeopt calibrate --model MODEL --prompts PROMPTS    learn and measure a drafter
    treeopt build --nodes 64 -o tree.yaml                build the tree
    treeopt validate --model MODEL --tree tree.yaml --prompts PROMPTS
    treeopt generate "Once upon a time" --model MODEL --tree tree.yaml

    With Medusa heads for the model: --heads HEADS.
    """


def run() -> None:
    """Run the program and exit with a status of `treeopt.errors`; KeyboardInterrupt passes through."""
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    if sys.stdout is None:  # closed by the caller: >&-
        sys.stdout = closed_output()
    escape_unencodable()
    status = 0
    try:
        status = program.main(standalone_mode=False)
        sys.stdout.flush()
    except click.ClickException as error:
        if follows():
            pass  # the first process prints the same
        elif "--json" in sys.argv:
            echo_json({"error": "usage", "what": error.format_message(), "exit_status": error.exit_code}, err=True)
        else:
            _say_usage(error)
        sys.exit(error.exit_code)
    except click.Abort as error:
        cause = error.__cause__
        raise (cause if isinstance(cause, KeyboardInterrupt) else KeyboardInterrupt()) from None
    except (_ReaderClosed, BrokenPipeError):  # such as `treeopt list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # buffered output is discarded
        sys.exit(_EXIT_PIPE)
    except (OSError, TreeoptError) as error:  # such as `treeopt list > /dev/full`: raised when the buffer is flushed
        known = error if isinstance(error, TreeoptError) else system_error(error)
        if known is None:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(status, int) and status:
            sys.exit(status)  # the command has printed its error
        if "--json" in sys.argv:
            echo_json(known.as_dict(), err=True)
        else:
            echo(str(known), err=True)
        sys.exit(known.exit_status)
    sys.exit(status if isinstance(status, int) else 0)


def _say_usage(error: click.ClickException) -> None:
    """Print click's message, with control characters escaped."""
    shown = io.StringIO()
    error.show(file=shown)
    echo(shown.getvalue(), err=True, end="")
