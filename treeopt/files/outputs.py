"""Outputs that are cheap to make again are overwritten, but never what took hours, and never their own input."""

from __future__ import annotations

import json
import os
from pathlib import Path

from treeopt.errors import Code, TreeoptError
from treeopt.files.atomic import check_writable
from treeopt.files.calibrations import SCHEMA as CALIBRATION
from treeopt.files.drafters import SCHEMA as DRAFTER

_MAX_HEADER = 1 << 28
_KEPT = {CALIBRATION: "calibration", DRAFTER: "drafter"}  # what takes long to make


def check_output(path: str | os.PathLike[str], *inputs: str | os.PathLike[str]) -> Path:
    """The path, after checking that a cheap file may be written there; called before any work.

    Raises:
        TreeoptError: E202 where a calibration or a drafter stands there; E204 where it is one of the inputs, or cannot
            be written.
    """
    target = check_writable(path, overwrite=True)
    check_no_input(target, *inputs)
    kept = _KEPT.get(_schema(target) or "") if target.exists() else None
    if kept is not None:
        what = f"{target} is a {kept}"
        raise TreeoptError(Code.FILE_EXISTS, what, fix="choose another name with -o, or remove it yourself")
    return target


def check_no_input(path: str | os.PathLike[str], *inputs: str | os.PathLike[str]) -> None:
    """Raise E204 where an output is one of the inputs."""
    if os.path.exists(path) and any(os.path.exists(source) and os.path.samefile(source, path) for source in inputs):
        raise TreeoptError(Code.FILE_UNWRITABLE, f"{path} is the input", fix="choose another name with -o")


def _schema(path: Path) -> str | None:
    """The schema of one of our safetensors files; None for any other file."""
    try:
        with path.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(length)) if length <= _MAX_HEADER else {}
        return str(json.loads(header["__metadata__"]["treeopt"])["schema"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
