"""Checks of options before a model is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from treeopt.cli.configuration import is_given
from treeopt.cli.console import Console
from treeopt.errors import Code, TreeoptError

if TYPE_CHECKING:
    from treeopt.models.base import Base


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


def warn_no_trees(console: Console, base: Base, but: str) -> None:
    """Warn where a base model cannot verify trees, for commands whose output is useful without trees."""
    from treeopt.verify.probe import check_trees

    try:
        check_trees(base)
    except TreeoptError as error:
        console.warn(f"warning: {error.what} ({error.why}); {but}")
