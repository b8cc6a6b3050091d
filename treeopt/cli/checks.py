"""Checks of options before work, the inputs of a command, and what a result says of its origin."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from treeopt.cli.configuration import command_line, is_given
from treeopt.errors import Code, TreeoptError
from treeopt.files.configurations import INPUTS, MADE_BY
from treeopt.files.read import sha256_of
from treeopt.version import VERSION

if TYPE_CHECKING:
    from treeopt.models.base import Base
    from treeopt.models.head_files import LoadedHeads
    from treeopt.schedule import Planned


def check_suffix(path: str, *suffixes: str, option: str = "-o") -> None:
    """Raise E204 unless the file of an option has the suffix of its format, by which other commands know it."""
    if Path(path).suffix.lower() not in suffixes:
        what = f"{path} is not the name of a {' or '.join(suffixes)} file"
        why = "commands know a file's format by its suffix"
        raise TreeoptError(Code.FILE_UNWRITABLE, what, why=why, fix=f"{option} {Path(path).with_suffix(suffixes[0])}")


def given(name: str) -> bool:
    """Whether an option of the running command is given: on the command line or by --config."""
    return is_given(click.get_current_context(), name)


def option_of(name: str) -> str:
    """The option of a parameter of the running command, as it is typed."""
    return next(one.opts[-1] for one in click.get_current_context().command.params if one.name == name)


def check_once(name: str, files: Sequence[str]) -> None:
    """Raise a usage error where a file is given twice for an option that takes several."""
    places = [Path(file).resolve() for file in files]
    twice = [file for i, file in enumerate(files) if places[i] in places[:i]]
    if twice:
        raise click.UsageError(f"{option_of(name)} {twice[0]} is given twice")


def check_apart(*names: str) -> None:
    """Raise a usage error where more than one of these options is given."""
    found = [option_of(name) for name in names if given(name)]
    if len(found) > 1:
        raise click.UsageError(f"give either {' or '.join(found)}")


def check_belongs(names: tuple[str, ...], to: str, holds: bool) -> None:
    """Raise a usage error for options that are given, but are not used unless `holds`."""
    found = [option_of(name) for name in names if given(name)]
    if found and not holds:
        raise click.UsageError(f"{found[0]} belongs to {to}")


# Parameters that name files or models to read.
INPUT_OPTIONS = (
    *("heads", "model", "adapter", "draft", "prompts", "prompts_learn", "responses", "exclude", "data"),
    *("tree", "calibration", "calibrations", "drafter", "memory", "profile", "compare", "fit"),
    *("validation", "comparison", "decoding", "measured", "file", "files", "first", "second"),
)


def check_inputs() -> None:
    """Raise E201 for an input that can be nothing but a path and is missing, before libraries that take seconds."""
    from treeopt.models.hub import here, looks_local

    parameters = click.get_current_context().params
    for option in INPUT_OPTIONS:
        for name in several(parameters.get(option)):
            if name and here(str(name)) is None and (option == "adapter" or looks_local(str(name))):  # never on the hub
                fix = "correct the path" + ("" if option == "adapter" else "; names of the hub are OWNER/NAME")
                raise TreeoptError(Code.FILE_MISSING, f"there is no {name}", at=option_of(option), fix=fix)


def input_names(context: click.Context) -> list[str]:
    """The names of files and models that the parameters give."""
    return [str(name) for one in INPUT_OPTIONS for name in several(context.params.get(one)) if name]


def made_of(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """The SHA-256 of every file among the inputs, and the versions; see `treeopt.files.configurations`."""
    versions = {"treeopt": VERSION, "python": platform.python_version(), "numpy": importlib.metadata.version("numpy")}
    found = {}  # models in folders have ids of their own, in what is written
    for name in names:
        with contextlib.suppress(OSError, ValueError, TreeoptError):  # the command itself refuses what it cannot read
            place = Path(os.path.expanduser(name))
            if place.is_file():
                found[os.fspath(name)] = sha256_of(place)
    return {**({INPUTS: found} if found else {}), MADE_BY: versions}


def several(value: Any) -> Iterable[Any]:
    """The values of an option, repeatable or not."""
    return value if isinstance(value, (list, tuple)) else [value]


def origin_of(
    base: Base, loaded: LoadedHeads | None, draft: Base | None = None, plan: Planned | None = None
) -> dict[str, Any]:
    """The keys `command` and `made_with` of a result of the running command."""
    from treeopt.files.trees import plan_id
    from treeopt.models.origins import models_ids

    made_with = models_ids(base, loaded, draft)
    if plan is not None:
        made_with |= {"drafter_id": plan.drafter, "tree_id": plan_id(plan)}
    return {"command": command_line(click.get_current_context()), "made_with": made_with}
