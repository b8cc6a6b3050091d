"""Checkpoints of a training run: what a run notes when it begins, and which checkpoint a resumed one goes on from.

The Trainer writes a checkpoint file by file. When all are there a mark is added, with the digest of each. So a
checkpoint without a mark is one that a kill left half-written, and one that differs from its mark is damaged: that one
is refused, and never dropped.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate.utils import wait_for_everyone
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from treeopt.errors import Code, TreeoptError
from treeopt.files.atomic import make_folder, write_text
from treeopt.train.resume import begun_otherwise, damaged

FOLDER = "checkpoints"
_NOTE = "begun.json"
_MARK = "whole.json"
_PREFIX = "checkpoint-"


def check_unfinished(heads: Path, *, resume: bool, overwrite: bool) -> Path:
    """Where a run keeps its checkpoints in a folder of heads, after checking that it can begin or go on there.

    Raises:
        TreeoptError: E202 where an unfinished run is in the way, E204 where something else is, E205 where there is
            none to resume.
    """
    folder = heads / FOLDER
    if folder.exists() and not folder.is_dir():
        what = f"{folder} is a file, where checkpoints would go"
        raise TreeoptError(Code.FILE_UNWRITABLE, what, fix="move it away, or name another folder with -o")
    begun = folder.is_dir() and any(folder.iterdir())
    if begun and not resume and not (folder / _NOTE).is_file():  # a run that goes on reads the note itself
        what = f"{folder} holds files that no run of treeopt train wrote: {_NOTE} is not among them"
        why = "checkpoints are collected there, and removed when the heads are done"
        raise TreeoptError(Code.FILE_UNWRITABLE, what, why=why, fix="move them away, or name another folder with -o")
    if resume and not begun:
        raise TreeoptError(Code.RESUME_INVALID, f"{heads} holds no unfinished run", fix="leave out --resume")
    if begun and not (resume or overwrite):
        what = f"{heads} holds an unfinished run"
        raise TreeoptError(Code.FILE_EXISTS, what, fix="go on with --resume, or begin anew with --force")
    return folder


def begin(folder: Path, begun: Mapping[str, Any]) -> None:
    """Drop what is there, and note what a run is made of."""
    if folder.exists():
        shutil.rmtree(folder)
    make_folder(folder)
    write_text(folder / _NOTE, json.dumps(begun))


def check_same(folder: Path, begun: Mapping[str, Any]) -> None:
    """Raise E205 unless the run that was begun there is made of the same."""
    found = _object(folder / _NOTE)
    wanted = json.loads(json.dumps(begun))
    if found != wanted:
        raise begun_otherwise(folder.parent, found, wanted)


def last_checkpoint(folder: Path, first: int) -> Path | None:
    """The latest whole checkpoint; None where the run was killed before its first one was whole.

    Args:
        folder: of the checkpoints.
        first: the step of a run's first checkpoint.

    Raises:
        TreeoptError: E205 where a checkpoint that was whole is damaged.
    """
    found = [path for path in folder.glob(f"{_PREFIX}*") if step_of(path) >= 0]
    whole = [path for path in found if (path / _MARK).exists()]
    if whole:
        last = max(whole, key=step_of)
        _check(last)
        return last
    later = [path for path in found if step_of(path) > first]
    if later:  # the one before it was whole, or it would not have been written
        raise damaged(
            max(later, key=step_of), f"is half-written, and there is no whole one before it: {_MARK} is missing"
        )
    return None


def drop_half_written(folder: Path) -> None:
    """Remove checkpoints without a mark, such as one that a full disk has cut short."""
    for path in folder.glob(f"{_PREFIX}*"):
        if step_of(path) >= 0 and not (path / _MARK).exists():
            shutil.rmtree(path, ignore_errors=True)  # another process may be at it


def step_of(checkpoint: Path) -> int:
    """The step of a checkpoint; -1 for what is none."""
    number = checkpoint.name.removeprefix(_PREFIX)
    return int(number) if number.isdecimal() and checkpoint.is_dir() else -1


class Marks(TrainerCallback):
    """Marks each checkpoint when it is whole."""

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        wait_for_everyone()  # each process writes a file of its own
        if state.is_world_process_zero:
            checkpoint = Path(args.output_dir) / f"{_PREFIX}{state.global_step}"
            files = {path.name: _digest(path) for path in sorted(checkpoint.iterdir()) if path.is_file()}
            mark = {"run": _digest(checkpoint.parent / _NOTE), "files": files}
            write_text(checkpoint / _MARK, json.dumps(mark))


def _check(checkpoint: Path) -> None:
    """Raise E205 unless the checkpoint is what was marked, of the run that it lies in."""
    mark = _object(checkpoint / _MARK)
    files = mark.get("files")
    if not isinstance(files, dict):
        raise damaged(checkpoint / _MARK, "is not what treeopt train wrote")
    fix = f"put it back, remove {checkpoint} to go on from the one before, or --force in place of --resume"
    if mark.get("run") != _digest(checkpoint.parent / _NOTE):
        raise damaged(checkpoint, "is of another run", fix=fix)
    for name, digest in files.items():
        path = checkpoint / name
        if not path.is_file():
            raise damaged(path, "is missing", fix=fix)
        if _digest(path) != digest:
            raise damaged(path, "is damaged: it is not what was saved", fix=fix)


def _digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _object(path: Path) -> dict[str, Any]:
    """A JSON object that a run wrote."""
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise damaged(path, f"cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise damaged(path, "is not what treeopt train wrote") from error
    if not isinstance(found, dict):
        raise damaged(path, "is not what treeopt train wrote")
    return found
