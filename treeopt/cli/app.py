"""The program `treeopt`: commands are imported when called, so that `--help` is instant."""

from __future__ import annotations

import importlib
import io
import json
import os
import sys

import click

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


class LazyGroup(click.Group):
    """A group that knows its commands' names and help lines without importing them."""

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
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # None where the caller closed it
            stream.reconfigure(errors="backslashreplace")  # an encoding without Greek letters is no fault
    try:
        status = program.main(standalone_mode=False)
        if sys.stdout is not None:  # closed by the caller: >&-
            sys.stdout.flush()
    except click.ClickException as error:
        if "--json" in sys.argv:
            data = {"error": "usage", "what": error.format_message(), "exit_status": error.exit_code}
            click.echo(json.dumps(data), err=True)
        else:
            error.show()
        sys.exit(error.exit_code)
    except click.Abort:
        raise KeyboardInterrupt from None
    except BrokenPipeError:  # `treeopt list | head`: the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is still buffered goes nowhere
        sys.exit(_EXIT_PIPE)
    sys.exit(status if isinstance(status, int) else 0)
