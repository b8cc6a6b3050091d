"""The program `treeopt`. A command is imported when it is called, so that `--help` is fast."""

import importlib
import io
import os
import sys
from typing import Any

import click

from treeopt.cli.processes import PROGRAM, follows
from treeopt.cli.terminal import QUIET_LIBRARIES, closed_output, echo, echo_json, escape_unencodable
from treeopt.errors import TreeoptError, system_error
from treeopt.version import VERSION

# What people do -> command -> one line of help. treeopt.cli.<command>_command has the click command as `run`.
GROUPS = {
    "Measure": {
        "calibrate": "Measure how often a drafter's guesses are correct.",
        "learn": "Learn a drafter from the model's own text, with or without heads.",
        "profile": "Measure the seconds of a decoding step for trees of each size.",
        "merge": "Join shards of a calibration, or calibrations of different prompts.",
    },
    "Build": {
        "build": "Build the best tree for a number of nodes.",
        "curve": "Print tokens per step, overhead and speedup for trees of each size.",
        "plan": "Model overhead and speedup on a device that you do not have.",
    },
    "Look": {
        "show": "Print a tree, compare it, explain a path, or check it for an engine.",
        "list": "List the trees and prompt sets that come with treeopt.",
        "render": "Draw a tree as SVG, DOT, or another format of graphviz.",
        "report": "Write calibrations, a tree and results as one HTML file.",
        "reproduce": "Run the command that made a file again, and compare the results.",
    },
    "Run": {
        "validate": "Check that a tree is lossless, and measure its speed.",
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
        "train": "Train draft heads for a base model.",
    },
    "Set-up": {
        "demo": "Run every step on the built-in model, in one to two minutes.",
        "doctor": "Check the installation, or whether a drafter is wired as it was trained.",
    },
}
COMMANDS = {name: what for commands in GROUPS.values() for name, what in commands.items()}

# Messages of these libraries would break results, logs and progress bars; --verbose shows them.
_QUIET = {**QUIET_LIBRARIES, "TOKENIZERS_PARALLELISM": "false"}

_EXIT_PIPE = 141  # the status that shells report for a program ended by a closed pipe


class LazyGroup(click.Group):
    """A group of commands whose names and help lines are known without importing them."""

    def make_context(self, info_name: str | None, args: list[str], *more: Any, **settings: Any) -> click.Context:
        """As in click; `treeopt.cli.processes` starts others with these arguments."""
        context = super().make_context(info_name, list(args), *more, **settings)
        context.meta[PROGRAM] = run, tuple(args)
        return context

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"treeopt.cli.{cmd_name}_command").run
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, COMMANDS))
        for group, commands in GROUPS.items():
            with formatter.section(group):
                formatter.write_dl([(f"{name:{width}}", what) for name, what in commands.items()])


@click.group(
    cls=LazyGroup,
    commands=[click.Command(name) for name in COMMANDS],  # of a misspelled name, click suggests one of these
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(VERSION, prog_name="treeopt")
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
        status = _called()
        sys.stdout.flush()
    except click.ClickException as error:
        if follows():
            pass  # the first process prints the same
        elif "--json" in sys.argv:
            echo_json({"error": "usage", "what": error.format_message(), "exit_status": error.exit_code}, err=True)
        else:
            shown = io.StringIO()
            error.show(file=shown)
            echo(shown.getvalue(), err=True, end="")  # control characters are escaped
        sys.exit(error.exit_code)
    except BrokenPipeError:  # such as `treeopt list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # buffered output is discarded
        sys.exit(_EXIT_PIPE)
    except (OSError, TreeoptError) as error:  # such as `treeopt list > /dev/full`: raised when the buffer is flushed
        known = error if isinstance(error, TreeoptError) else system_error(error)
        if known is None:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if status:
            sys.exit(status)  # the command has printed its error
        if "--json" in sys.argv:
            echo_json(known.as_dict(), err=True)
        else:
            echo(str(known), err=True)
        sys.exit(known.exit_status)
    sys.exit(status)


def _called() -> int:
    """Call the program as click does, but for its own handling of Ctrl-C and closed pipes; returns the status."""
    if "_TREEOPT_COMPLETE" in os.environ:  # by a shell
        program.main(prog_name="treeopt")
    try:
        with program.make_context("treeopt", sys.argv[1:]) as context:
            program.invoke(context)
    except click.exceptions.Exit as end:
        return end.exit_code
    return 0
