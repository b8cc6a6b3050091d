"""What the processes that make the chunks of one run ask of each other: the same settings, folder and results.

The processes run the same command, so they reach the same stages in the same order. The first of them leads.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from treeopt.errors import Code, TreeoptError

_VISIBLE = 60.0  # seconds in which a file of one machine is seen by the others; NFS keeps names for up to 30
_POLL = 0.1  # seconds between two looks


class Team(Protocol):
    """The processes of a run; `treeopt.runs.processes.Processes` is one."""

    @property
    def rank(self) -> int:
        """The number of this process; 0 leads."""

    def take(self, stage: str) -> int:
        """The next number from 0 that no process took at this stage."""

    def note_made(self, stage: str) -> int:
        """Count a finished chunk of a stage; the number of them in all processes."""

    def meet(self, stage: str, value: str, *, waiting: Callable[[], None]) -> list[str]:
        """The values of all processes, when all have called this; `waiting` is called while others have not."""

    def stop(self) -> None:
        """Tell the other processes to end when their chunks in flight are stored."""

    def await_stopped(self) -> None:
        """Wait until they have ended."""


class Stages:
    """The stages of a run, which all its processes reach.

    Args:
        team: the processes.
        waiting: called while this process waits for others; it may raise.
    """

    def __init__(self, team: Team, waiting: Callable[[], None]) -> None:
        self.team = team
        self._waiting = waiting
        self._count = 0

    def next(self) -> str:
        """The name of the next stage."""
        self._count += 1
        return f"stage{self._count}"

    def meet(self, stage: str, value: str = "") -> list[str]:
        """The values of all processes, when all have reached this stage."""
        return self.team.meet(stage, value, waiting=self._waiting)

    def agree(self, what: str, value: str) -> None:
        """Raise E406 unless all processes have computed the same value; `what` names it."""
        values = self.meet(self.next(), value)
        other = next((i for i, one in enumerate(values) if one != values[0]), None)
        if other is not None:
            raise TreeoptError(
                Code.PROCESSES_DIFFER,
                f"process {other} computed another {what} than process 0",
                why="floating-point sums differ between kinds of processors, and the parts of a run must not",
                fix="start all processes on machines of one kind",
            )

    def check_same(self, settings: Mapping[str, Any], note: Path) -> None:
        """Raise E406 unless this process has the settings of the first, and sees the file that the first wrote."""
        stamp = self.check_settings(settings, "" if self.team.rank else _stamp(note))
        self.await_files([note])
        if _stamp(note) != stamp:  # tells two files of one name on two machines apart
            raise self._invisible(note)

    def check_settings(self, settings: Mapping[str, Any], text: str = "") -> str:
        """Raise E406 unless this process has the settings of the first; the text of the first."""
        first, found = json.loads(self.meet(self.next(), json.dumps([settings, text]))[0])
        if first != json.loads(json.dumps(settings)):
            what = f"process {self.team.rank} has other settings than process 0"
            fix = "the same models, versions, threads (OMP_NUM_THREADS) and kind of device for all processes"
            at = "\n".join(differences(first, settings))
            raise TreeoptError(Code.PROCESSES_DIFFER, what, at=at, why=Code.PROCESSES_DIFFER.rule, fix=fix)
        return str(found)

    def await_files(self, files: Sequence[Path]) -> None:
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
        what = f"process {self.team.rank} does not see {file}, which another process wrote"
        fix = "an output (-o) in a folder that all machines share; or --shard i/n, and treeopt merge"
        return TreeoptError(Code.PROCESSES_DIFFER, what, fix=fix)


def _stamp(file: Path) -> str:
    return str(file.stat().st_mtime_ns)


def differences(begun: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """A line for each setting that differs."""
    for key in dict.fromkeys([*begun, *now]):
        one, other = begun.get(key), now.get(key)
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            yield from differences(one, other, f"{prefix}{key}.")
        elif one != other:
            yield f"{prefix}{key}: started with {json.dumps(one)}, now {json.dumps(other)}"
