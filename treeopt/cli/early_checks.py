"""What the commands of long work refuse before they load a model, and say where they are interrupted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from treeopt.cli.console import Console
from treeopt.errors import Code, TreeoptError

if TYPE_CHECKING:
    from treeopt.models.base import Base


def check_suffix(path: str, *suffixes: str) -> None:
    """Raise E204 unless a file's name ends as what is written to it: other commands go by that."""
    if Path(path).suffix.lower() not in suffixes:
        what = f"{path} is not the name of a {' or '.join(suffixes)} file"
        why = "a file's form is known by its name"
        raise TreeoptError(Code.FILE_UNWRITABLE, what, why=why, fix=f"-o {Path(path).with_suffix(suffixes[0])}")


def given(name: str) -> bool:
    """Whether an option of the running command was named on the command line."""
    return click.get_current_context().get_parameter_source(name) is not ParameterSource.DEFAULT


def check_apart(*names: str) -> None:
    """Refuse options of which each excludes the others, where more than one is given."""
    found = [f"--{name.replace('_', '-')}" for name in names if given(name)]
    if len(found) > 1:
        raise click.UsageError(f"give either {' or '.join(found)}")


def check_belongs(names: tuple[str, ...], to: str, holds: bool) -> None:
    """Refuse options that have no meaning where what they belong to is not asked for."""
    found = [f"--{name.replace('_', '-')}" for name in names if given(name)]
    if found and not holds:
        raise click.UsageError(f"{found[0]} belongs to {to}")


def check_static_only(names: Sequence[str]) -> None:
    """Refuse options that only --kind static has."""
    check_belongs(tuple(names), "--kind static", holds=False)


def warn_no_trees(console: Console, base: Base, but: str) -> None:
    """Warn where a base model cannot verify trees, of work that is still worth something."""
    from treeopt.verify.probe import check_trees

    try:
        check_trees(base)
    except TreeoptError as error:
        console.warn(f"warning: {error.what} ({error.why}); {but}")


@contextmanager
def unkept(console: Console, options: Mapping[str, Any]) -> Iterator[None]:
    """Long work that cannot be resumed: an interruption says so, and passes on."""
    try:
        yield
    except KeyboardInterrupt:
        console.warn(f"interrupted; nothing was kept: {options['output']} is not written")
        raise
