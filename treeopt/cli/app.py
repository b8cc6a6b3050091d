"""The program `treeopt`: commands are imported when called, so that `--help` is instant."""

from __future__ import annotations

import difflib
import importlib
import io
import os
import sys
from typing import Any

import click

from treeopt.cli.terminal import echo, echo_json, escape_unencodable
from treeopt.errors import system_error
from treeopt.version import VERSION

# Command -> one line of help; its module is treeopt.cli.<command>_command with the click command `command`.
COMMANDS = {
    "demo": "The whole job on the built-in model, in about a minute.",
    "calibrate": "Measure how often each head's guesses are right.",
    "learn": "Learn to correct the heads' guesses by the tokens before them.",
    "profile": "Time a decode step by the size of the tree.",
    "build": "Grow the best tree for a number of nodes.",
    "curve": "Tokens per step, overhead and speedup by the size of the tree.",
    "compile": "Turn a tree into attention mask, positions and indices.",
    "render": "Draw a tree as SVG, DOT, or what graphviz offers.",
    "validate": "Decode with a tree: lossless? as predicted? faster?",
    "generate": "Continue a prompt with a tree, shown as it is decoded.",
    "distill": "Let the base model write texts to train heads on.",
    "train": "Train draft heads for a base model (Medusa-1).",
    "list": "List the trees and prompt sets that come with treeopt.",
    "show": "Print a tree, and what a calibration expects of it.",
}

# What the libraries below say on their own would break results, logs and progress bars.
_QUIET = {
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TQDM_DISABLE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}

_EXIT_PIPE = 141  # what shells report of a program that a closed pipe ended


class _ReaderClosed(Exception):
    """The reader of standard output closed the pipe; click would exit 1, the status of our bugs."""


class LazyGroup(click.Group):
    """A group that knows its commands' names and help lines without importing them."""

    def make_context(self, *args: Any, **settings: Any) -> click.Context:
        """As click's, where `--help` prints; a closed pipe raises `_ReaderClosed`."""
        try:
            return super().make_context(*args, **settings)
        except BrokenPipeError as error:
            raise _ReaderClosed from error

    def invoke(self, ctx: click.Context) -> Any:
        """As click's, where commands run; a closed pipe raises `_ReaderClosed`."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:
            raise _ReaderClosed from error

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click's, with the names that are close to an unknown one."""
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
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(VERSION, prog_name="treeopt")
def program() -> None:
    """Measure draft heads, build the best tree for them, and decode with it, losslessly.

    \b
    treeopt calibrate --heads HEADS --prompts PROMPTS    measure the heads
    treeopt build --nodes 64 -o tree.yaml                grow the tree
    treeopt validate --heads HEADS --tree tree.yaml --prompts PROMPTS
    treeopt generate "Once upon a time" --heads HEADS --tree tree.yaml
    """


def run() -> None:
    """Run the program and exit with a status of `treeopt.errors`; KeyboardInterrupt passes through."""
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    escape_unencodable()
    try:
        status = program.main(standalone_mode=False)
        if sys.stdout is not None:  # closed by the caller: >&-
            sys.stdout.flush()
    except click.ClickException as error:
        if "--json" in sys.argv:
            echo_json({"error": "usage", "what": error.format_message(), "exit_status": error.exit_code}, err=True)
        else:
            _say_usage(error)
        sys.exit(error.exit_code)
    except click.Abort:
        raise KeyboardInterrupt from None
    except (_ReaderClosed, BrokenPipeError):  # `treeopt list | head`: the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is still buffered goes nowhere
        sys.exit(_EXIT_PIPE)
    except OSError as error:  # `treeopt list > /dev/full`: found when the last of the output is written
        known = system_error(error)
        if known is None:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        echo(str(known), err=True)
        sys.exit(known.exit_status)
    sys.exit(status if isinstance(status, int) else 0)


def _say_usage(error: click.ClickException) -> None:
    """What click's `show` prints, through the place that escapes control characters."""
    shown = io.StringIO()
    error.show(file=shown)
    echo(shown.getvalue(), err=True, end="")
