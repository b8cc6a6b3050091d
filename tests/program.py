"""The program as tests run it: in this process, with its exit status checked."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from click.testing import CliRunner, Result

from treeopt.cli.app import program


def treeopt(*arguments: str | Path, status: int = 0) -> Result:
    """Run the program in this process and check its exit status."""
    result = CliRunner().invoke(program, [str(argument) for argument in arguments])
    assert result.exit_code == status, result.output + repr(result.exception)
    return result


def treeopt_json(*arguments: str | Path, status: int = 0) -> dict[str, Any]:
    """The one JSON object on standard output."""
    parsed: dict[str, Any] = json.loads(treeopt(*arguments, "--json", status=status).stdout)
    return parsed


def error_number(result: Result) -> str:
    """The number of the one error on standard error."""
    found = re.findall(r"^error\[(E\d+)\]", result.stderr, flags=re.MULTILINE)
    assert len(found) == 1, result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
    return str(found[0])


def error_of(number: str, *arguments: str | Path, status: int = 3) -> str:
    """Standard error of the program, which ends with this error alone."""
    result = treeopt(*arguments, status=status)
    assert error_number(result) == number, result.stderr
    return result.stderr


def all_commands() -> Iterator[tuple[str, click.Command]]:
    """Every command and subcommand, by its name without that of the program."""
    context = click.Context(program)
    for name in program.list_commands(context):
        command = program.get_command(context, name)
        assert command is not None
        yield name, command
        if isinstance(command, click.Group):
            yield from ((f"{name} {sub}", one) for sub, one in command.commands.items())
