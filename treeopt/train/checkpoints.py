"""Checkpoints of a training run, and the note of its settings with which a resumed run is compared.

The Trainer writes a checkpoint file by file. When it is complete, a mark with the digest of each file is added. So a
checkpoint without a mark is half-written, and a checkpoint that differs from its mark is damaged; a damaged checkpoint
is an error, and is never deleted.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate.utils import wait_for_everyone
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from treeopt.errors import Code, TreeoptError
from treeopt.files.atomic import make_folder, write_text
from treeopt.files.read import sha256_of
from treeopt.runs.lock import Lock
from treeopt.runs.work import damaged, other_settings, read_note

FOLDER = "checkpoints"
_NOTE = "begun.json"
_MARK = "whole.json"
_PREFIX = "checkpoint-"


def check_unfinished(heads: Path, *, resume: bool, overwrite: bool) -> None:
    """Check that a run can begin or continue in the folder of its checkpoints."""
    folder = heads / FOLDER
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        kind = "link" if folder.is_symlink() else "file"
        what = f"{folder} is a {kind}, but checkpoints would be written to a folder of this name"
        raise TreeoptError(Code.FILE_UNWRITABLE, what, fix="move it away, or choose another folder with -o")
    Lock(folder).check()
    begun = folder.is_dir() and any(folder.iterdir())
    if begun and not resume and not (folder / _NOTE).is_file():  # a resumed run reads the note itself
        what = f"{folder} holds files that treeopt train did not write: {_NOTE} is not among them"
        why = "checkpoints are written there, and deleted at the end of the run"
        raise TreeoptError(Code.FILE_UNWRITABLE, what, why=why, fix="move them away, or choose another folder with -o")
    if resume and not begun:
        raise TreeoptError(Code.RESUME_INVALID, f"{heads} holds no unfinished run", fix="leave out --resume")
    if begun and not (resume or overwrite):
        what = f"{heads} holds an unfinished run"
        raise TreeoptError(Code.FILE_EXISTS, what, fix="continue with --resume, or start again with --force")


def begin(folder: Path, begun: Mapping[str, Any]) -> None:
    """Empty the folder, and write the note of a run."""
    if folder.exists():
        shutil.rmtree(folder)
    make_folder(folder)
    write_text(folder / _NOTE, json.dumps(begun))


def check_same(folder: Path, begun: Mapping[str, Any]) -> None:
    """Raise E205 unless the note of the run there equals this one."""
    found = read_note(folder / _NOTE)
    expected = json.loads(json.dumps(begun))
    if found != expected:
        raise other_settings(folder.parent, found, expected)


def last_checkpoint(folder: Path) -> Path | None:
    """The latest whole checkpoint, whose files are those that were saved; None where none was complete."""
    whole = [path for path in folder.glob(f"{_PREFIX}*") if step_of(path) >= 0 and (path / _MARK).exists()]
    if not whole:
        return None
    last = max(whole, key=step_of)
    files = read_note(last / _MARK).get("files")
    if not isinstance(files, dict) or not all(name and name == Path(name).name for name in files):
        raise damaged(last / _MARK, "is not what treeopt wrote")
    for name, digest in files.items():
        if not (last / name).is_file() or sha256_of(last / name) != digest:
            fix = f"put it back, remove {last} to continue from the one before, or use --force instead of --resume"
            raise damaged(last / name, "is missing, or differs from what was saved", fix=fix)
    return last


def drop_half_written(folder: Path) -> None:
    """Delete checkpoints without a mark, such as one that a full disk interrupted."""
    for path in folder.glob(f"{_PREFIX}*"):
        if step_of(path) >= 0 and not (path / _MARK).exists():
            shutil.rmtree(path, ignore_errors=True)  # another process may delete it too


def step_of(checkpoint: Path) -> int:
    """The step of a checkpoint; -1 for a path of another name."""
    number = checkpoint.name.removeprefix(_PREFIX)
    return int(number) if number.isdecimal() and checkpoint.is_dir() else -1


class Marks(TrainerCallback):
    """Adds the mark to each complete checkpoint."""

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        wait_for_everyone()  # each process writes one of the files
        if state.is_world_process_zero:
            checkpoint = Path(args.output_dir) / f"{_PREFIX}{state.global_step}"
            files = {path.name: sha256_of(path) for path in sorted(checkpoint.iterdir()) if path.is_file()}
            write_text(checkpoint / _MARK, json.dumps({"files": files}))
