"""The files that a command reads: which parameters name them, and what is stored of them for `treeopt reproduce`."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import os
import platform
from collections.abc import Callable, Iterable
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


def check_inputs() -> None:
    """Raise the error of a reader for an input that is missing.

    Commands that load a model call it after their usage errors, before they import libraries that take seconds.

    Only names that can be nothing but a path are looked up; hubs, named sets and data sets are left to the commands.

    Raises:
        TreeoptError: E201; for prompts E203 and E302 too, where the file is too large or of another format.
    """
    from treeopt.models.hub import here, looks_local

    parameters = click.get_current_context().params
    given = {one: several(parameters.get(one)) for one in INPUT_OPTIONS}
    for option, name in ((one, str(name)) for one, names in given.items() for name in names if name):
        path = here(name)
        if path is None and looks_local(name):
            _READ.get(option, _read_nothing)(name)
        elif path is not None and option in _PROMPTS:
            _check_prompts(path)


def _read_nothing(_name: str) -> None:
    """The command itself refuses the name."""


def _read_prompts(name: str) -> None:
    from treeopt.texts.prompts import read_rows

    read_rows(name, limit=1)


def _check_prompts(path: Path) -> None:
    """Read a file that is no file of prompts, which raises the error."""
    from treeopt.files.read import MOST_TEXT
    from treeopt.texts.prompts import FORMATS

    if path.suffix.lower() not in FORMATS or (path.is_file() and path.stat().st_size > MOST_TEXT):
        _read_prompts(os.fspath(path))


def _read_tree(name: str) -> None:
    from treeopt.files.policies import load_plan

    load_plan(name)


def _read_drafter(name: str) -> None:
    from treeopt.files.drafters import load_drafter

    load_drafter(name)


def _read_heads(name: str) -> None:
    from treeopt.models.hub import find_heads

    find_heads(name, ())


def _read_base(name: str, option: str = "--model") -> None:
    from treeopt.models.hub import find_base

    find_base(name, option)


_PROMPTS = ("prompts", "prompts_learn", "responses", "exclude", "data")
_READ: dict[str, Callable[[str], None]] = {
    **dict.fromkeys(_PROMPTS, _read_prompts),
    "tree": _read_tree,
    "drafter": _read_drafter,
    "heads": _read_heads,
    "model": _read_base,
    "draft": functools.partial(_read_base, option="--draft"),
}


def input_names(context: click.Context) -> list[str]:
    """The names of files and models that the parameters give."""
    return [str(name) for one in INPUT_OPTIONS for name in several(context.params.get(one)) if name]


def made_of(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """The SHA-256 of every file among the inputs, and the versions; see `treeopt.files.configurations`."""
    versions = {"treeopt": VERSION, "python": platform.python_version(), "numpy": importlib.metadata.version("numpy")}
    found = hashes_of(names)
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
