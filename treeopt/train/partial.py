"""The unfinished file of a distillation: what may stand in it, and which of its rows a resumed run keeps.

A run appends whole batches of rows. A kill leaves these and at most a piece of the next batch, whose last line may be
torn. Anything else was not left by a kill, so it is refused and never dropped.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treeopt.errors import Code, TreeoptError
from treeopt.train.resume import begun_otherwise, damaged

_ROW_BEGIN = b'{"id": "'


@dataclass(frozen=True)
class Kept:
    """What an earlier run left: whole batches, their rows, tokens and bytes."""

    batches: int = 0
    rows: int = 0
    tokens: int = 0
    bytes: int = 0


def partial_of(target: Path, *, resume: bool, overwrite: bool) -> Path:
    """The unfinished file of `target`, after checking that a run can begin or go on there.

    Raises:
        TreeoptError: E202 where an unfinished file is in the way, E204 where something else is, E205 where there is
            none to resume.
    """
    partial = target.with_name(target.name + ".partial")
    try:
        partial.exists()
    except OSError as error:  # such as a name that is too long with its ending
        raise TreeoptError(Code.FILE_UNWRITABLE, f"{partial} cannot be written: {error.strerror}") from error
    if partial.is_symlink() or (partial.is_file() and partial.stat().st_nlink > 1):
        what = f"{partial} is a link: answers would be written to a file of another name"
        raise TreeoptError(Code.FILE_UNWRITABLE, what, fix="remove the link, or choose another name with -o")
    if partial.exists() and not partial.is_file():
        what = f"{partial} is {'a folder' if partial.is_dir() else 'a device or pipe'}, where answers are collected"
        raise TreeoptError(Code.FILE_UNWRITABLE, what, fix="move it away, or choose another name with -o")
    if resume and not partial.exists():
        raise TreeoptError(Code.RESUME_INVALID, f"there is no unfinished {partial}", fix="leave out --resume")
    if partial.exists() and not (resume or overwrite):
        what = f"{partial} is an unfinished run"
        raise TreeoptError(Code.FILE_EXISTS, what, fix="go on with --resume, or begin anew with --force")
    return partial


def kept_of(partial: Path, made_by: Mapping[str, Any], place: Callable[[str], int | None], batch_size: int) -> Kept:
    """What of an unfinished file is kept. Its last batch may be half-written, so that one is made again.

    Args:
        partial: the file.
        made_by: what every row must say of its origin.
        place: from a conversation's id to its place among all; None for the id of none.
        batch_size: conversations of a batch.

    Raises:
        TreeoptError: E205 where the file was begun with other settings, or was not left by such a run.
    """
    kept = before = Kept()
    last = 0
    for number, line, row in _rows(partial):
        begun = {**row["source"], "model_id": row["model_id"]}
        if begun != made_by:
            raise begun_otherwise(partial, begun, made_by)
        at = f"{partial}:{number}"
        found = place(row["id"])
        if found is None:
            what = f"answers {row['id']}, which is not among these prompts: give the same --prompts, --skip and --limit"
            raise damaged(partial, what, at=at)
        if found < last:
            raise damaged(partial, "holds rows in another order than the prompts", at=at)
        last = found
        if last // batch_size != kept.batches:
            before = kept
        tokens = sum(end - start for start, end in row["answers"])
        kept = Kept(last // batch_size, kept.rows + 1, kept.tokens + tokens, kept.bytes + len(line) + 1)
    return Kept(kept.batches, before.rows, before.tokens, before.bytes)


def _rows(partial: Path) -> Iterator[tuple[int, bytes, dict[str, Any]]]:
    """The whole rows with their line's number and bytes; a torn line at the end is left out."""
    try:
        *whole, torn = partial.read_bytes().split(b"\n")
    except OSError as error:
        raise damaged(partial, f"cannot be read: {error.strerror}") from error
    for number, line in enumerate(whole, start=1):
        row = _row(line)
        if row is None:
            raise damaged(partial, "holds a line that treeopt distill did not write", at=f"{partial}:{number}")
        yield number, line, row
    if torn[: len(_ROW_BEGIN)] != _ROW_BEGIN[: len(torn)]:
        raise damaged(partial, "ends with what treeopt distill did not write", at=f"{partial}:{len(whole) + 1}")


def _row(line: bytes) -> dict[str, Any] | None:
    """A row of ours; None for anything else."""
    try:
        row = json.loads(line)
        known = isinstance(row["id"], str) and isinstance(row["source"], dict) and isinstance(row["model_id"], str)
        spans = all(0 <= start <= end <= len(row["ids"]) for start, end in row["answers"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return row if known and spans else None
