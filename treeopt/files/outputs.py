"""Checks of output files before any work: which existing files a command may replace.

Without --force a command replaces an existing file only if it is a tree, a compiled tree or a picture, of the kind that
the command writes, has treeopt's mark and was not edited. All other files need --force: calibrations, drafters,
profiles, heads and texts take long to make, and formats such as PNG hold no mark. An input of the same run is never
replaced.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from treeopt.errors import Code, TreeoptError
from treeopt.files.atomic import check_writable
from treeopt.files.marks import BUFFERS, BUFFERS_SCHEMA, unedited_kind
from treeopt.files.tensors import unedited_schema

_Name = str | os.PathLike[str]
_SCHEMA_KINDS = {BUFFERS_SCHEMA: BUFFERS}


def check_output(path: _Name, *, kind: str | None = None, force: bool, inputs: Iterable[_Name | None] = ()) -> Path:
    """The path, after checking that a command may write its output there.

    Args:
        path: the output.
        kind: one of `treeopt.files.marks`, for outputs that are fast to make again; None for all others.
        force: replace any file that is not an input.
        inputs: files and model folders that the command reads; None for an option that is not given.

    Raises:
        TreeoptError: E202 where a file exists that must not be replaced without --force; E204 where it is an input, or
            cannot be written.
    """
    target = check_writable(path, overwrite=True)
    check_no_input(path, *inputs)
    if not target.exists() or force:
        return target
    found = None if kind is None else _cheap_kind(target)
    if found is None or found != kind:
        raise TreeoptError(Code.FILE_EXISTS, f"{path} exists", why=_reason(kind, found), fix=_FIX)
    return target


def check_no_input(path: _Name, *inputs: _Name | None) -> None:
    """Raise E204 where an output is an input of the same run, or a file in a model folder that is an input.

    Files of treeopt in a model's folder, such as calibrations, are not part of the model.
    """
    target = Path(path)
    for source in (Path(name).expanduser() for name in inputs if name):
        if not (target.exists() and source.exists()):
            continue
        inside = source.is_dir() and target.resolve().parent == source.resolve()
        if target.samefile(source) or (inside and not _ours(target)):
            what = f"{path} is an input of this command" + (f", a file of {source}" if inside else "")
            why = "an input is never replaced, not even with --force"
            raise TreeoptError(Code.FILE_UNWRITABLE, what, why=why, fix="choose another name with -o")


def check_distinct(*outputs: _Name | None) -> None:
    """Raise E204 where two outputs of a command are one file; None for an output that is not written."""
    given = [name for name in outputs if name is not None]
    places = [os.path.realpath(name) for name in given]
    for i, name in enumerate(given):
        if places[i] in places[:i]:
            what = f"{given[places.index(places[i])]} and {name} are one file, and two are written"
            raise TreeoptError(Code.FILE_UNWRITABLE, what, fix="give each output a name of its own")


_FIX = "choose another name with -o, or overwrite it with --force"


def _reason(kind: str | None, found: str | None) -> str:
    if kind is None:
        return ""
    if found is None:
        return f"only an unedited {kind} that treeopt wrote is replaced without --force"
    return f"it is a {found}, and the output is a {kind}"


def _cheap_kind(path: Path) -> str | None:
    return unedited_kind(path) or _SCHEMA_KINDS.get(unedited_schema(path) or "")


def _ours(path: Path) -> bool:
    """Whether treeopt wrote the file, in a format that is not part of a model's checkpoint."""
    return path.is_file() and (unedited_kind(path) or unedited_schema(path)) is not None
