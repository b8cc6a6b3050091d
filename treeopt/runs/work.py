"""The work folder of a long command: its finished chunks, from which an interrupted run continues.

A chunk is a batch of answers, of sampled texts or of traces. It is written atomically when it is finished, so a kill,
a full disk or an interruption loses at most the chunk in flight. A resumed run reads the chunks that are there and
makes the others; every chunk is read back in the same form, so the result has the same bytes.

Several processes may make the chunks of a run together in one folder (`Work.share`). The first of them leads: it
begins the run, and it alone writes anything but chunks. From `Work.begin` on it has the lock of the folder
(`treeopt.runs.lock`), so that no other run writes there.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treeopt.errors import Code, TreeoptError
from treeopt.files.atomic import make_folder, write_text
from treeopt.files.read import MOST_SETTINGS, parse_json, read_bytes
from treeopt.files.tensors import read_arrays, write_arrays
from treeopt.progress import Progress, silent
from treeopt.runs.lock import Lock
from treeopt.runs.stages import Stages, Team, differences

Chunk = tuple[Mapping[str, NDArray[Any]], Mapping[str, Any]]  # arrays, and data that JSON can hold
Make = Callable[[], Chunk]
Keep = Callable[[str, Make], Chunk]
Share = Callable[[Mapping[str, Make], Progress], None]

_SCHEMA = "treeopt.chunk/1"
_NOTE = "begun.json"
_NAME = re.compile(r"[a-z]+-[0-9]{6,}")
_CHUNK = re.compile(rf"{_NAME.pattern}\.safetensors")
_TEMPORARY = re.compile(rf"\.({re.escape(_NOTE)}|{_CHUNK.pattern})\..+")  # of an atomic write that was killed
ROWS = ("numbers", "lengths")  # arrays of `pack_rows`


def unsaved(_name: str, make: Make) -> Chunk:
    """A `Keep` that stores nothing: the chunk is made."""
    return make()


def unshared(_makes: Mapping[str, Make], _progress: Progress) -> None:
    """A `Share` of one process: `Keep` makes each chunk when it is needed."""


@dataclass(frozen=True)
class Recording:
    """How long work is reported, and how its finished chunks are stored, and shared among processes."""

    progress: Progress = silent
    keep: Keep = unsaved
    share: Share = unshared


SILENT = Recording()


def chunk_name(part: str, number: int) -> str:
    """The name of a chunk: its part of the work, in lower case, and its number."""
    return f"{part}-{number:06}"


def pack_rows(rows: Sequence[Sequence[int]], **data: Any) -> Chunk:
    """Rows of numbers of different lengths as a chunk, with further data."""
    lengths = np.array([len(row) for row in rows], np.int64)
    numbers = np.concatenate([np.zeros(0, np.int64), *(np.asarray(row, np.int64) for row in rows)])
    return dict(zip(ROWS, (numbers, lengths), strict=True)), data


def unpack_rows(chunk: Chunk) -> list[list[int]]:
    """The rows of a chunk that `pack_rows` made.

    Raises:
        TreeoptError: E205 where it has none.
    """
    arrays, _ = chunk
    fault = rows_fault(arrays)
    if fault:
        raise damaged_part(fault)
    ends = np.cumsum(arrays["lengths"])
    return [arrays["numbers"][end - length : end].tolist() for end, length in zip(ends, arrays["lengths"], strict=True)]


def rows_fault(arrays: Mapping[str, NDArray[Any]]) -> str:
    """What makes arrays no rows of `pack_rows`, for a message; empty where nothing does."""
    for name in ROWS:
        if name not in arrays or arrays[name].ndim != 1 or arrays[name].dtype != np.int64:
            return f"it has no {name} of int64"
    numbers, lengths = (arrays[name] for name in ROWS)
    if np.any(lengths < 0) or np.any(lengths > len(numbers)) or int(lengths.sum()) != len(numbers):
        return f"its lengths are not those of {len(numbers)} numbers"
    return ""


class Work:
    """The chunks of one run.

    Args:
        target: the output; its work folder is `TARGET.partial`.
        resume: continue an unfinished run.
        overwrite: delete an unfinished run.
        team: the processes that make the chunks; None for this one alone.

    Raises:
        TreeoptError: E202 where there is an unfinished run and neither is given, E204 where the folder is another's, or
            another process is writing it, E205 where there is no run to resume.
    """

    def __init__(
        self, target: Path, *, resume: bool = False, overwrite: bool = False, team: Team | None = None
    ) -> None:
        self.folder = target.with_name(target.name + ".partial")
        self._resume, self._overwrite = resume, overwrite
        self._settings: Any = None  # until the run is begun
        self._lock = Lock(self.folder)
        self._team = team
        self._stages = None if team is None else Stages(team, self._end_if_stopping)
        self._in_flight = self._stopping = False
        if not self.follows:  # the first process may have begun the run already
            self._check()

    def begin(self, settings: Mapping[str, Any]) -> None:
        """Begin the run, or continue it.

        Args:
            settings: all that the chunks depend on, in types of JSON.

        Raises:
            TreeoptError: E205 where the run was started with other settings, E406 where those of another process
                differ, or it does not see the folder; as `Work`, `make_folder` and `write_text`.
        """
        self._settings = json.loads(json.dumps(settings))
        if not self.follows:
            self._lock.take()
            self._check()  # another run may have begun, or ended, since the first check
            self._begin()
        if self._stages is not None:
            self._stages.check_same(self._settings, self._note)

    def _begin(self) -> None:
        if self._resume and self._note.exists():  # absent where a run was killed before its first chunk
            found = self._read()
            if found != self._settings:
                raise other_settings(self.folder, found, self._settings)
            return
        self._delete()
        make_folder(self.folder)
        write_text(self._note, json.dumps(self._settings))

    def chunk(self, name: str, make: Make) -> Chunk:
        """The chunk of that name: the stored one, or the one that `make` returns, which is stored.

        Raises:
            KeyboardInterrupt: after `stop`, when the chunk in flight is stored.
            TreeoptError: E204 where another run has begun in the folder, E205 where a stored chunk is damaged, E403
                where the disk is full, E404 where the folder was deleted.
            ValueError: where the name is not one of `chunk_name`, so that nothing is written outside the folder.
        """
        file = self._file(name)
        if not file.exists():
            self._in_flight = True
            try:
                self._write(file, *make())
            finally:
                self._in_flight = False
            if self._stopping:
                raise KeyboardInterrupt
        try:
            arrays, header = read_arrays(file, _SCHEMA)
            chunk = arrays, header["data"]
        except (TreeoptError, KeyError) as error:
            self._check_note()
            fix = f"remove {file} and give --resume again, which makes this part again"
            raise damaged(file, "is damaged", fix=fix) from error
        self._check_note()
        return chunk

    def share(self, makes: Mapping[str, Make], progress: Progress = silent) -> None:
        """Make the chunks that are missing together with the other processes of the run; `chunk` then reads them.

        Each process takes the next chunk that none has taken, so what a process makes depends on the others, and what a
        chunk holds does not. One process alone does nothing here.

        Args:
            makes: by the names of the chunks, the same in all processes.
            progress: called with the number of finished chunks.

        Raises:
            KeyboardInterrupt: after `stop`, when the chunks in flight are stored.
            TreeoptError: as `chunk`; E405 where another process has ended, E406 where its chunks are not seen here.
        """
        if self._stages is None:
            return
        stage, team, names = self._stages.next(), self._stages.team, list(makes)
        self._in_flight = True
        try:
            while (number := team.take(stage)) < len(names):
                file = self._file(names[number])
                if not file.exists():
                    self._write(file, *makes[names[number]]())
                progress(team.note_made(stage), len(names), f"batches: {names[0].partition('-')[0]}")
                self._end_if_stopping()
            self._stages.meet(stage)
        finally:
            self._in_flight = False
        self._stages.await_files([self._file(name) for name in names])
        self._stages.meet(self._stages.next())  # the first process may delete the folder after this

    def agree(self, what: str, value: str) -> None:
        """Raise E406 unless all processes of the run have computed the same value; `what` names it."""
        if self._stages is not None:
            self._stages.agree(what, value)

    @property
    def follows(self) -> bool:
        """Whether another process leads: this one makes chunks, and writes and prints nothing else."""
        return self._team is not None and self._team.rank > 0

    def leader_only(self) -> None:
        """End this process unless it leads: the rest of the work is not divided.

        Raises:
            SystemExit: in all processes but the first.
        """
        if self.follows:
            sys.exit(0)

    def stop(self) -> None:
        """End the run when the chunk in flight is stored: then `chunk` raises KeyboardInterrupt.

        Raises:
            KeyboardInterrupt: at once, where no chunk is in flight.
        """
        if not self._in_flight:
            raise KeyboardInterrupt
        self._stopping = True
        if self._team is not None:
            self._team.stop()

    def remove(self) -> None:
        """Delete the folder with the files of the run, if this process has begun it; files of other names stay."""
        if self._lock.held and not self.follows:
            self._delete()
            self._lock.release()

    def release(self) -> None:
        """Let other processes continue the run; the end of this process does it too."""
        if not self.follows:
            self._lock.release()

    def _delete(self) -> None:
        if not self.folder.is_dir():
            return
        try:
            for file in self.folder.iterdir():
                if _is_ours(file):
                    file.unlink()
        except OSError as error:
            what = f"{self.folder} cannot be deleted: {error.strerror}"
            why = "it holds only the parts of a run, and none of its outputs"
            raise TreeoptError(Code.SYSTEM_REFUSED, what, why=why, fix=f"delete {self.folder}") from error
        with contextlib.suppress(OSError):  # files of other names
            self.folder.rmdir()

    @property
    def chunks(self) -> int:
        """Number of chunks that are stored."""
        try:
            return sum(_CHUNK.fullmatch(file.name) is not None for file in self.folder.iterdir())
        except (FileNotFoundError, NotADirectoryError):  # the first process may delete it at any time
            return 0

    def _file(self, name: str) -> Path:
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} is not the name of a chunk, such as answers-000000")
        return self.folder / f"{name}.safetensors"

    def _end_if_stopping(self) -> None:
        if self._stopping:
            assert self._team is not None
            self._team.await_stopped()
            raise KeyboardInterrupt

    @property
    def _note(self) -> Path:
        """The file with the settings of the run."""
        return self.folder / _NOTE

    def _check_note(self) -> None:
        """Raise E404 where the folder was deleted, E204 where it is that of another run, which locks would prevent."""
        if self._settings is None:
            return
        if not self._note.exists():
            what = f"{self.folder} was deleted while it was written"
            why = "it holds the finished parts of the run until the output is written"
            raise TreeoptError(Code.SYSTEM_REFUSED, what, why=why, fix="give the same command again")
        if self._read() != self._settings:
            what = f"another run has begun in {self.folder}"
            fix = "give the same command again with another -o, or when the other run has ended"
            raise TreeoptError(Code.FILE_UNWRITABLE, what, why="parts of two runs are not mixed", fix=fix)

    def _check(self) -> None:
        """Raise the errors of `Work`."""
        begun = self._check_folder()
        self._lock.check()
        if self._resume and not begun:
            raise TreeoptError(Code.RESUME_INVALID, f"there is no unfinished {self.folder}", fix="leave out --resume")
        if begun and not (self._resume or self._overwrite):
            what = f"{self.folder} is an unfinished run"
            raise TreeoptError(Code.FILE_EXISTS, what, fix="continue with --resume, or start again with --force")

    def _check_folder(self) -> bool:
        """Whether a run was begun there; E204 unless the folder is missing or holds nothing but a run's files."""
        try:
            if not (self.folder.exists() or self.folder.is_symlink()):
                return False
        except OSError as error:  # for example a name that is too long with the suffix
            raise TreeoptError(Code.FILE_UNWRITABLE, f"{self.folder} cannot be written: {error.strerror}") from error
        if self.folder.is_symlink() or not self.folder.is_dir():
            kind = "a link" if self.folder.is_symlink() else "a file"
            what = f"{self.folder} is {kind}, but unfinished work is written to a folder of this name"
            raise TreeoptError(Code.FILE_UNWRITABLE, what, fix="move it away, or choose another name with -o")
        other = next((file for file in sorted(self.folder.iterdir()) if not _is_ours(file)), None)
        if other is not None:
            what = f"{self.folder} holds {other.name}, which treeopt did not write"
            why = "unfinished work is written to this folder, which is deleted at the end"
            raise TreeoptError(Code.FILE_UNWRITABLE, what, why=why, fix="move it away, or choose another name with -o")
        return True

    def _write(self, file: Path, arrays: Mapping[str, NDArray[Any]], data: Mapping[str, Any]) -> None:
        self._check_note()
        try:
            write_arrays(file, arrays, {"schema": _SCHEMA, "data": data}, overwrite=True)
        except TreeoptError as error:
            if error.code is Code.OUT_OF_MEMORY:
                error.fix = "free some space; the same command with --resume continues"
            raise

    def _read(self) -> dict[str, Any]:
        try:
            found = parse_json(read_bytes(self._note, MOST_SETTINGS))
            return dict(found.items())
        except (ValueError, AttributeError, TreeoptError) as error:
            raise damaged(self._note, "is not what treeopt wrote") from error


def _is_ours(file: Path) -> bool:
    """Whether a file has a name that a run writes."""
    ours = file.name == _NOTE or _CHUNK.fullmatch(file.name) or _TEMPORARY.fullmatch(file.name)
    return bool(ours) and file.is_file() and not file.is_symlink()


def other_settings(place: Path, begun: Mapping[str, Any], now: Mapping[str, Any]) -> TreeoptError:
    """E205, with the settings that differ."""
    what = f"{place} was started with other settings"
    at = "\n".join(differences(begun, now))
    return TreeoptError(
        Code.RESUME_INVALID, what, at=at, fix="give the same settings, or use --force instead of --resume"
    )


def damaged(place: Path, what: str, *, at: str = "", fix: str = "") -> TreeoptError:
    """E205 for a file that an interrupted run cannot have left in this state."""
    why = "files that this run did not write are neither continued nor deleted"
    fix = fix or f"restore {place.name}, or start again with --force, which deletes the unfinished run"
    return TreeoptError(Code.RESUME_INVALID, f"{place} {what}", at=at or str(place), why=why, fix=fix)


def damaged_part(fault: str) -> TreeoptError:
    """E205 for a stored chunk that is not what its run needs."""
    what = f"a part of the unfinished run is damaged: {fault}"
    return TreeoptError(Code.RESUME_INVALID, what, fix="start again with --force, which deletes the unfinished run")
