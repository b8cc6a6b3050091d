"""The unfinished file of a distillation: its checks, and the rows that a resumed run keeps.

A run appends whole batches of rows. A killed run leaves these and at most a part of the next batch, whose last line may
be incomplete. Any other content is an error, and is never deleted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treeopt.errors import Code, TreeoptError
from treeopt.files.locks import Lock
from treeopt.files.read import is_regular, parse_json
from treeopt.files.resume import damaged, other_settings

_ROW_BEGIN = b'{"id": "'
_LONGEST = 1 << 28  # bytes of a line: a row of millions of tokens


@dataclass(frozen=True)
class Kept:
    """The whole batches of an earlier run, and their rows, tokens and bytes."""

    batches: int = 0
    rows: int = 0
    tokens: int = 0
    bytes: int = 0


def rows_of(target: Path) -> Path:
    """The output whose work folder, `TARGET.rows.partial`, holds the rows that several processes make."""
    return target.with_name(target.name + ".rows")


def partial_of(target: Path) -> Path:
    """The unfinished file of `target`."""
    return target.with_name(target.name + ".partial")


def check_unfinished(target: Path, *, resume: bool, overwrite: bool) -> None:
    """Check that a run can begin or continue in the unfinished file of `target`.

    A run of several processes that was killed early has left the folder of its rows, and no file.

    Raises:
        TreeoptError: E202 where there is an unfinished file, E204 where it is not a regular file, or another process is
            writing it, E205 where there is no file to resume.
    """
    partial = partial_of(target)
    try:
        partial.exists()
    except OSError as error:  # for example a name that is too long with the suffix
        raise TreeoptError(Code.FILE_UNWRITABLE, f"{partial} cannot be written: {error.strerror}") from error
    if partial.is_symlink() or (partial.is_file() and partial.stat().st_nlink > 1):
        what = f"{partial} is a link, so answers would be written to a file of another name"
        raise TreeoptError(Code.FILE_UNWRITABLE, what, fix="remove the link, or choose another name with -o")
    if partial.exists() and not partial.is_file():
        kind = "a folder" if partial.is_dir() else "a device or pipe"
        what = f"{partial} is {kind}, but answers are written to a file of this name"
        raise TreeoptError(Code.FILE_UNWRITABLE, what, fix="move it away, or choose another name with -o")
    Lock(partial).check()
    rows = rows_of(target)
    if resume and not (partial.exists() or rows.with_name(rows.name + ".partial").is_dir()):
        raise TreeoptError(Code.RESUME_INVALID, f"there is no unfinished {partial}", fix="leave out --resume")
    if partial.exists() and not (resume or overwrite):
        what = f"{partial} is an unfinished run"
        raise TreeoptError(Code.FILE_EXISTS, what, fix="continue with --resume, or start again with --force")


def kept_of(partial: Path, made_by: Mapping[str, Any], place: Callable[[str], int | None], batch_size: int) -> Kept:
    """The part of an unfinished file that is kept: all batches but the last, which may be half-written.

    Args:
        partial: the file.
        made_by: the origin that every row must have.
        place: a function from a conversation's id to its index among all; None for an unknown id.
        batch_size: conversations of a batch.

    Raises:
        TreeoptError: E205 where the file is of a run with other settings, or holds other content.
    """
    kept = before = Kept()
    for index, length, row in _checked_rows(partial, made_by, place):
        if index // batch_size != kept.batches:
            before = kept
        tokens = sum(end - start for start, end in row["answers"])
        kept = Kept(index // batch_size, kept.rows + 1, kept.tokens + tokens, kept.bytes + length)
    return Kept(kept.batches, before.rows, before.tokens, before.bytes)


def check_whole(partial: Path, made_by: Mapping[str, Any], place: Callable[[str], int | None], rows: int) -> None:
    """Check a file that is to be renamed: it has the rows that the run wrote, of the run's settings and prompts.

    Raises:
        TreeoptError: E404 where it was deleted.
        RuntimeError: where it has other rows, which is a fault of this program or of a second run without a lock.
    """
    if not partial.exists():
        raise TreeoptError(Code.SYSTEM_REFUSED, f"{partial} was deleted while it was written", fix="start again")
    try:
        found = sum(1 for _ in _checked_rows(partial, made_by, place))
    except TreeoptError as error:
        raise RuntimeError(f"{partial} is not what this run wrote: {error.what}") from error
    if found != rows:
        raise RuntimeError(f"{partial} has {found} rows, and this run wrote {rows}")


def _checked_rows(
    partial: Path, made_by: Mapping[str, Any], place: Callable[[str], int | None]
) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """The whole rows of a run, each with the index of its conversation and its bytes; E205 for any other row."""
    last = 0
    for number, line, row in _rows(partial):
        begun = {**row["source"], "model_id": row["model_id"]}
        if begun != made_by:
            raise other_settings(partial, begun, made_by)
        at = f"{partial}:{number}"
        found = place(row["id"])
        if found is None:
            what = f"answers {row['id']}, which is not among these prompts: give the same --prompts, --skip and --limit"
            raise damaged(partial, what, at=at)
        if found < last:
            raise damaged(partial, "holds rows in another order than the prompts", at=at)
        last = found
        yield found, len(line) + 1, row


def _rows(partial: Path) -> Iterator[tuple[int, bytes, dict[str, Any]]]:
    """The whole rows with their line's number and bytes; an incomplete last line is left out."""
    for number, line in enumerate(_lines(partial), start=1):
        at = f"{partial}:{number}"
        if not line.endswith(b"\n"):
            if line[: len(_ROW_BEGIN)] != _ROW_BEGIN[: len(line)]:
                raise damaged(partial, "ends with a line that treeopt distill did not write", at=at)
            return
        row = _row(line)
        if row is None:
            raise damaged(partial, "holds a line that treeopt distill did not write", at=at)
        yield number, line[:-1], row


def _lines(partial: Path) -> Iterator[bytes]:
    """The lines with their ends; a file may be of any size, a line may not."""
    if not is_regular(partial):
        raise damaged(partial, "is not a regular file")
    try:
        with partial.open("rb") as stream:
            while line := stream.readline(_LONGEST + 1):
                if len(line) > _LONGEST:
                    raise damaged(partial, f"has a line of more than {_LONGEST:,} bytes")
                yield line
    except OSError as error:
        raise damaged(partial, f"cannot be read: {error.strerror}") from error


def _row(line: bytes) -> dict[str, Any] | None:
    """A row that `treeopt distill` wrote; None for another line."""
    try:
        row = parse_json(line)
        known = isinstance(row["id"], str) and isinstance(row["source"], dict) and isinstance(row["model_id"], str)
        spans = all(0 <= start <= end <= len(row["ids"]) for start, end in row["answers"])
    except (ValueError, KeyError, TypeError):
        return None
    return row if known and spans else None
