"""The program as tests run it: in this process, with its exit status checked."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

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
