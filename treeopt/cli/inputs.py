"""The files that a command reads: which parameters name them, and what is stored of them for `treeopt reproduce`."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from treeopt.errors import TreeoptError
from treeopt.files.configurations import INPUTS, MADE_BY
from treeopt.files.read import sha256_of
from treeopt.version import VERSION

# Parameters that name files or models to read.
INPUT_OPTIONS = (
    *("heads", "model", "adapter", "draft", "prompts", "prompts_learn", "responses", "exclude", "data"),
    *("tree", "calibration", "calibrations", "drafter", "profile", "compare", "fit"),
    *("validation", "comparison", "decoding", "file", "files", "first", "second"),
)


def made_of(context: click.Context) -> dict[str, dict[str, str]]:
    """The SHA-256 of every file that the parameters name, and the versions; see `treeopt.files.configurations`."""
    named = [value for name in INPUT_OPTIONS for value in several(context.params.get(name))]
    versions = {"treeopt": VERSION, "python": platform.python_version(), "numpy": importlib.metadata.version("numpy")}
    found = hashes_of(str(name) for name in named if name)
    return {**({INPUTS: found} if found else {}), MADE_BY: versions}


def hashes_of(names: Iterable[str]) -> dict[str, str]:
    """The SHA-256 of each name that is a regular file; models in folders have ids of their own, in what is written."""
    found = {}
    for name in names:
        with contextlib.suppress(OSError, ValueError, TreeoptError):  # the command itself refuses what it cannot read
            place = Path(name).expanduser()
            if place.is_file():
                found[os.fspath(name)] = sha256_of(place)
    return found


def several(value: Any) -> Iterable[Any]:
    """The values of an option, repeatable or not."""
    return value if isinstance(value, (list, tuple)) else [value]
