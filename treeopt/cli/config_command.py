"""`treeopt config`: the options that a file was made with."""

from __future__ import annotations

import click

from treeopt.cli.console import Console, command


@command("config")
@click.argument("file")
def run(console: Console, file: str) -> None:
    """Print the options that FILE was made with, as YAML that `--config` reads.

    FILE is a calibration, tree, policy, drafter, profile, compiled tree, picture or report that a command wrote, a
    folder of heads, or a result of --json. The options include defaults. Those of outputs, such as -o and --force, are
    not stored.
    """
    from treeopt.files.configurations import configuration_yaml, stored_configuration

    stored = stored_configuration(file)
    console.say(configuration_yaml(stored).rstrip("\n"))
    console.result({"stored": stored})


command = run
