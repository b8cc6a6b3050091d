"""`treeopt completion`: the script that completes command lines in a shell."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from treeopt.cli.console import Console, command

SHELLS = ("bash", "zsh", "fish")
_FILES = {"bash": "~/.bashrc", "zsh": "~/.zshrc", "fish": "~/.config/fish/completions/treeopt.fish"}


@command("completion")
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def run(context: click.Context, console: Console, shell: str) -> None:
    """Print a script for SHELL that completes commands, options, names of trees, prompt sets and devices, and files.

    Put `eval "$(treeopt completion bash)"` into ~/.bashrc, likewise for zsh into ~/.zshrc; for fish write the script to
    ~/.config/fish/completions/treeopt.fish.
    """
    kind = get_completion_class(shell)
    assert kind is not None
    script = kind(context.find_root().command, {}, "treeopt", "_TREEOPT_COMPLETE").source()
    console.say(script)
    console.result({"shell": shell, "file": _FILES[shell], "script": script})


command = run
