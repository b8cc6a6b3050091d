"""Runs: their batches, made by this process alone or divided among several, of which the first leads.

The processes run the same command, so they reach the same stages in the same order. What a process makes depends on the
others, and what a batch holds does not. The others follow the first: they make batches, and write and print nothing;
where the rest of the work is not divided, its function returns None to them.

The batches of `Work` are stored in a folder, from which an interrupted run continues. A batch is written as a chunk,
atomically, when it is finished, so a kill, a full disk or an interruption loses at most the batch in flight; every
chunk is read back in the same form, so the result has the same bytes. From `Work.begin` on the first process has the
lock of the folder (`treeopt.runs.lock`), so that no other run writes there.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from treeopt.errors import Code, TreeoptError
from treeopt.files.atomic import make_folder, write_text
from treeopt.files.read import MOST_SETTINGS, parse_json, read_bytes
from treeopt.files.tensors import read_arrays, write_arrays
from treeopt.progress import Progress, silent
from treeopt.runs.lock import Lock

if TYPE_CHECKING:
    from treeopt.runs.processes import Processes

T = TypeVar("T")
Tally = Callable[[str, int], int]  # adds a number to a sum of all processes, and returns the sum
Chunk = tuple[Mapping[str, NDArray[Any]], Mapping[str, Any]]  # arrays, and data that JSON can hold

_SCHEMA = "treeopt.chunk/1"
_NOTE = "begun.json"
_CHUNK = re.compile(r"[a-z]+-[0-9]{6,}\.safetensors")
_TEMPORARY = re.compile(rf"\.({re.escape(_NOTE)}|{_CHUNK.pattern})\..+")  # of an atomic write that was killed
_VISIBLE = 60.0  # seconds in which a file of one machine is seen by the others; NFS keeps names for up to 30
_POLL = 0.1  # seconds between two looks
_ROWS = ("numbers", "lengths")  # arrays of `pack_rows`


def chunk_name(part: str, number: int) -> str:
    """The name of a chunk: its part of the work, in lower case, and its number."""
    return f"{part}-{number:06}"


def pack_rows(rows: Sequence[Sequence[int]], **data: Any) -> Chunk:
    """Rows of numbers of different lengths as a chunk, with further data."""
    lengths = np.array([len(row) for row in rows], np.int64)
    numbers = np.concatenate([np.zeros(0, np.int64), *(np.asarray(row, np.int64) for row in rows)])
    return dict(zip(_ROWS, (numbers, lengths), strict=True)), data


def unpack_rows(chunk: Chunk) -> list[list[int]]:
    """The rows of a chunk that `pack_rows` made; E205 where it has none."""
    arrays, _ = chunk
    for name in _ROWS:
        if name not in arrays or arrays[name].ndim != 1 or arrays[name].dtype != np.int64:
            raise damaged_part(f"it has no {name} of int64")
    numbers, lengths = (arrays[name] for name in _ROWS)
    if np.any(lengths < 0) or np.any(lengths > len(numbers)) or int(lengths.sum()) != len(numbers):
        raise damaged_part(f"its lengths are not those of {len(numbers)} numbers")
    return [numbers[end - length : end].tolist() for end, length in zip(np.cumsum(lengths), lengths, strict=True)]


class BatchRun(Generic[T]):
    """A run whose batches are not stored; without a `team` this process makes each when it is needed."""

    def __init__(self, team: Processes | None = None) -> None:
        self.team = team
        self._stages = 0

    @property
    def follows(self) -> bool:
        """Whether another process leads."""
        return self.team is not None and self.team.rank > 0

    def each(
        self, part: str, numbers: Sequence[int], make: Callable[[int], T], progress: Progress = silent
    ) -> Iterator[T]:
        """The results of `make` for each number, in their order; each is made in one of the processes.

        What `make` returns must depend on the number alone, and be of JSON's types where there are processes.
        """
        if self.team is None:
            return map(make, numbers)
        self.agree("number of parts", str(len(numbers)))
        stage = self._next()
        while (i := self.team.take(stage)) < len(numbers):
            self.team.give(f"{stage}/{i}", json.dumps(make(numbers[i])))
        self._meet(stage)
        found = [json.loads(self.team.given(f"{stage}/{i}")) for i in range(len(numbers))]
        self.team.await_others(stage)  # the first process may end after this, and the store with it
        return iter(found)

    def tally(self) -> Tally:
        """New sums of all processes, which begin with 0."""
        if self.team is None:
            sums: Counter[str] = Counter()

            def add(name: str, number: int) -> int:
                sums[name] += number
                return sums[name]

            return add
        team, stage = self.team, self._next()
        return lambda name, number: team.add(f"{stage}/{name}", number)

    def agree(self, what: str, value: str) -> None:
        """Raise E406 unless all processes have computed the same value; `what` names it."""
        values = self._meet(self._next(), value)
        other = next((i for i, one in enumerate(values) if one != values[0]), None)
        if other is not None:
            raise TreeoptError(
                Code.PROCESSES_DIFFER,
                f"process {other} computed another {what} than process 0",
                why="floating-point sums differ between kinds of processors, and the parts of a run must not",
                fix="start all processes on machines of one kind",
            )

    def check_same(self, settings: Callable[[], Mapping[str, Any]]) -> None:
        """Raise E406 unless all processes have the same settings, in types of JSON; one alone does not compute them."""
        if self.team is not None:
            self._compared(self.team, settings())

    def _compared(self, team: Processes, settings: Mapping[str, Any], text: str = "") -> str:
        """The text of the first process; E406 unless this one has its settings."""
        first, found = json.loads(self._meet(self._next(), json.dumps([settings, text]))[0])
        if first != json.loads(json.dumps(settings)):
            what = f"process {team.rank} has other settings than process 0"
            fix = "the same models, versions, threads (OMP_NUM_THREADS) and kind of device for all processes"
            at = "\n".join(differences(first, settings))
            raise TreeoptError(Code.PROCESSES_DIFFER, what, at=at, why=Code.PROCESSES_DIFFER.rule, fix=fix)
        return str(found)

    def _next(self) -> str:
        """The name of the next stage."""
        self._stages += 1
        return f"stage{self._stages}"

    def _meet(self, stage: str, value: str = "") -> list[str]:
        """The values of all processes, when all have reached this stage."""
        return [] if self.team is None else self.team.meet(stage, value, waiting=self._waiting)

    def _waiting(self) -> None:
        """Called while this process waits for others; it may raise."""


ALONE: BatchRun[Any] = BatchRun()


def differences(begun: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """A line for each setting that differs."""
    for key in dict.fromkeys([*begun, *now]):
        one, other = begun.get(key), now.get(key)
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            yield from differences(one, other, f"{prefix}{key}.")
        elif one != other:
            yield f"{prefix}{key}: started with {json.dumps(one)}, now {json.dumps(other)}"


class Work(BatchRun[Chunk]):
    """A run whose batches are stored in a folder.

    Args:
        target: the output; its work folder is `TARGET.partial`.
        resume: continue an unfinished run.
        overwrite: delete an unfinished run.
        team: the processes that make the batches; None for this one alone.
    """

    def __init__(
        self, target: Path, *, resume: bool = False, overwrite: bool = False, team: Processes | None = None
    ) -> None:
        super().__init__(team)
        self.folder = target.with_name(target.name + ".partial")
        self._resume, self._overwrite = resume, overwrite
        self._settings: Any = None  # until the run is begun
        self._lock = Lock(self.folder)
        self._in_flight = self._stopping = False
        if not self.follows:  # the first process may have begun the run already
            self._check()

    def begin(self, settings: Mapping[str, Any]) -> None:
        """Begin the run, or continue it; `settings`, in types of JSON, are all that the chunks depend on."""
        self._settings = json.loads(json.dumps(settings))
        if not self.follows:
            self._lock.take()
            self._check()  # another run may have begun, or ended, since the first check
            self._begin()
        if self.team is not None:
            stamp = self._compared(self.team, self._settings, "" if self.follows else _stamp(self._note))
            self._await_files([self._note])
            if _stamp(self._note) != stamp:  # tells two files of one name on two machines apart
                raise self._invisible(self._note)

    def _begin(self) -> None:
        if self._resume and self._note.exists():  # absent where a run was killed before its first chunk
            found = read_note(self._note)
            if found != self._settings:
                raise other_settings(self.folder, found, self._settings)
            return
        self._delete()
        make_folder(self.folder)
        write_text(self._note, json.dumps(self._settings))

    def each(
        self, part: str, numbers: Sequence[int], make: Callable[[int], Chunk], progress: Progress = silent
    ) -> Iterator[Chunk]:
        """The chunks of these numbers, in their order; several processes make the missing ones before any is read."""
        names = {number: chunk_name(part, number) for number in numbers}
        if self.team is not None:
            self._divide(self.team, part, names, make, progress)
        return (self.chunk(name, functools.partial(make, number)) for number, name in names.items())

    def chunk(self, name: str, make: Callable[[], Chunk]) -> Chunk:
        """The chunk of that name: the stored one, or the one that `make` returns, which is stored."""
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

    def _divide(
        self, team: Processes, part: str, names: Mapping[int, str], make: Callable[[int], Chunk], progress: Progress
    ) -> None:
        """Make the chunks that are missing together with the other processes."""
        stage, numbers = self._next(), list(names)
        self._in_flight = True
        try:
            while (i := team.take(stage)) < len(numbers):
                file = self._file(names[numbers[i]])
                if not file.exists():
                    self._write(file, *make(numbers[i]))
                progress(team.add(f"{stage}/made", 1), len(numbers), f"batches: {part}")
                self._waiting()
            self._meet(stage)
        finally:
            self._in_flight = False
        self._await_files([self._file(name) for name in names.values()])
        team.await_others(stage)  # the first process may delete the folder after this

    def stop(self) -> None:
        """Raise KeyboardInterrupt when the chunk in flight is stored; at once where none is."""
        if not self._in_flight:
            raise KeyboardInterrupt
        self._stopping = True
        if self.team is not None:
            self.team.stop()

    def remove(self) -> None:
        """Delete the folder with the files of the run, if this process has begun it; files of other names stay."""
        if self._lock.held and not self.follows:
            self._delete()
            self._lock.release()

    def release(self) -> None:
        """Let other processes continue the run; the end of this process does it too."""
        if not self.follows:
            self._lock.release()

    @property
    def chunks(self) -> int:
        """Number of chunks that are stored."""
        try:
            return sum(_CHUNK.fullmatch(file.name) is not None for file in self.folder.iterdir())
        except (FileNotFoundError, NotADirectoryError):  # the first process may delete it at any time
            return 0

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

    def _file(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"

    def _waiting(self) -> None:
        if self._stopping and self.team is not None:
            self.team.await_stopped()
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
        if read_note(self._note) != self._settings:
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
        fault = ""
        if self.folder.is_symlink() or not self.folder.is_dir():
            fault = "is a link" if self.folder.is_symlink() else "is a file"
        elif others := [file.name for file in self.folder.iterdir() if not _is_ours(file)]:
            fault = f"holds {min(others)}, which treeopt did not write"
        if fault:
            why = "unfinished work is written to a folder of this name, which is deleted at the end"
            fix = "move it away, or choose another name with -o"
            raise TreeoptError(Code.FILE_UNWRITABLE, f"{self.folder} {fault}", why=why, fix=fix)
        return True

    def _write(self, file: Path, arrays: Mapping[str, NDArray[Any]], data: Mapping[str, Any]) -> None:
        self._check_note()
        try:
            write_arrays(file, arrays, {"schema": _SCHEMA, "data": data}, overwrite=True)
        except TreeoptError as error:
            if error.code is Code.OUT_OF_MEMORY:
                error.fix = "free some space; the same command with --resume continues"
            raise

    def _await_files(self, files: Sequence[Path]) -> None:
        """Wait until files that other processes wrote are seen here; E406 where one is not."""
        end = time.monotonic() + _VISIBLE
        for file in files:
            while not file.exists():
                if time.monotonic() > end:
                    raise self._invisible(file)
                self._waiting()
                time.sleep(_POLL)
                if file.parent.is_dir():
                    os.listdir(file.parent)  # a network file system then looks again

    def _invisible(self, file: Path) -> TreeoptError:
        what = f"process {0 if self.team is None else self.team.rank} does not see {file}, which another process wrote"
        fix = "an output (-o) in a folder that all machines share; or --shard i/n, and treeopt merge"
        return TreeoptError(Code.PROCESSES_DIFFER, what, fix=fix)


def _is_ours(file: Path) -> bool:
    """Whether a file has a name that a run writes."""
    ours = file.name == _NOTE or _CHUNK.fullmatch(file.name) or _TEMPORARY.fullmatch(file.name)
    return bool(ours) and file.is_file() and not file.is_symlink()


def _stamp(file: Path) -> str:
    return str(file.stat().st_mtime_ns)


def read_note(file: Path) -> dict[str, Any]:
    """The object in a file of a run; E205 where it is damaged."""
    try:
        return dict(parse_json(read_bytes(file, MOST_SETTINGS)).items())
    except (ValueError, AttributeError, TreeoptError) as error:
        raise damaged(file, "is not what treeopt wrote") from error


def other_settings(place: Path, begun: Mapping[str, Any], now: Mapping[str, Any]) -> TreeoptError:
    """E205, with the settings that differ."""
    what = f"{place} was started with other settings"
    at = "\n".join(differences(begun, now))
    fix = "give the same settings, or use --force instead of --resume"
    return TreeoptError(Code.RESUME_INVALID, what, at=at, fix=fix)


def damaged(place: Path, what: str, *, fix: str = "") -> TreeoptError:
    """E205 for a file that an interrupted run cannot have left in this state."""
    why = "files that this run did not write are neither continued nor deleted"
    fix = fix or f"restore {place.name}, or start again with --force, which deletes the unfinished run"
    return TreeoptError(Code.RESUME_INVALID, f"{place} {what}", at=str(place), why=why, fix=fix)


def damaged_part(fault: str) -> TreeoptError:
    """E205 for a stored chunk that is not what its run needs."""
    what = f"a part of the unfinished run is damaged: {fault}"
    return TreeoptError(Code.RESUME_INVALID, what, fix="start again with --force, which deletes the unfinished run")
