"""Checks of options before work, the inputs of a command, and what a result says of its origin."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import os
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
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
    from treeopt.policy import Plan


def check_suffix(path: str, *suffixes: str, option: str = "-o") -> None:
    """Raise E204 unless the file of an option has the suffix of its format, by which other commands know it."""
    if Path(path).suffix.lower() not in suffixes:
        what = f"{path} is not the name of a {' or '.join(suffixes)} file"
        why = "commands know a file's format by its suffix"
        raise TreeoptError(Code.FILE_UNWRITABLE, what, why=why, fix=f"{option} {Path(path).with_suffix(suffixes[0])}")


def given(name: str) -> bool:
    """Whether an option of the running command is given: on the command line, in the environment or by --config."""
    return is_given(click.get_current_context(), name)


def option_of(name: str) -> str:
    """The option of a parameter of the running command, as it is typed."""
    parameters = click.get_current_context().command.params
    return next(one.opts[-1] for one in parameters if one.name == name)


def check_once(name: str, files: Sequence[str]) -> None:
    """Raise a usage error where a file is given twice for an option that takes several."""
    places = [Path(file).resolve() for file in files]
    twice = [file for i, file in enumerate(files) if places[i] in places[:i]]
    if twice:
        raise click.UsageError(f"{option_of(name)} {twice[0]} is given twice")


def check_alone(name: str, options: Mapping[str, Any]) -> None:
    """Raise a usage error where another option is given beside one that uses none."""
    others = [option_of(other) for other in options if other != name and given(other)]
    if others:
        raise click.UsageError(f"{option_of(name)} is given alone, without {others[0]}")


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


def check_static_only(names: Sequence[str]) -> None:
    """Raise a usage error for options that only --kind static uses."""
    check_belongs(tuple(names), "--kind static", holds=False)


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


def origin_of(
    base: Base, loaded: LoadedHeads | None, draft: Base | None = None, plan: Plan | None = None
) -> dict[str, Any]:
    """The keys `command` and `made_with` of a result of the running command."""
    from treeopt.files.policies import plan_id

    made_with = {
        "model": base.name,
        "model_id": base.fingerprint,
        "dtype": base.dtype_name,
        "heads_id": "" if loaded is None else loaded.fingerprint,
        "draft_id": "" if draft is None else draft.fingerprint,
        **({} if plan is None else {"drafter_id": plan.drafter, "tree_id": plan_id(plan)}),
    }
    return {"command": command_line(click.get_current_context()), "made_with": made_with}
