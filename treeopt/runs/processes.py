"""The processes of one run and their messages, which torch's key-value store carries (torch.distributed.TCPStore).

Process 0 leads: it prints, and writes all files but chunks of work. The messages are few and small: who makes what, who
has come how far, errors, and small results (`treeopt.runs.work`). No tensor is sent. `launched`
starts those of `--nproc`.
"""

import contextlib
import json
import os
import signal
import sys
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import parent_process
from typing import Any

import torch
from torch.distributed import DistError, Store, TCPStore  # type: ignore[attr-defined]  # its stubs lack the store
from torch.distributed.rendezvous import rendezvous
from torch.multiprocessing.spawn import ProcessContext, ProcessExitedException, ProcessRaisedException, start_processes

from treeopt.errors import EXIT_BUG, Code, TreeoptError, first_line
from treeopt.models.devices import unusable

_POLL = 0.05  # seconds between two looks at the store
_PATIENCE = 30.0  # seconds that a failed process of torchrun gives the first one to print the error
_FAILED, _ENDED, _STOP, _STOPPED = "failed", "ended", "stop", "stopped"
_PART = 1 << 20  # bytes; the store refuses values of more than 8 MiB
_RESUME = "the same command again, with --resume where it has it"


class ProcessFailed(Exception):
    """An error of another process, as that process would print it: its `TreeoptError.as_dict`, or `error: bug`."""

    def __init__(self, report: Mapping[str, Any]) -> None:
        super().__init__(report["what"])
        self.report = {**report, "at": "\n".join(filter(None, [str(report["at"]), f"process {report['process']}"]))}


class Processes:
    """The processes of a run as number `rank` sees them; it watches those it `started`, and may be `watched` itself."""

    def __init__(
        self, store: Store, rank: int, size: int, *, started: ProcessContext | None = None, watched: bool = False
    ) -> None:
        self._store = store
        self.rank, self.size = rank, size
        self._started, self._watched = started, watched

    def take(self, stage: str) -> int:
        """The next number from 0 that no process took at this stage; raises as `_check` does."""
        self._check()
        return self._store.add(f"{stage}/taken", 1) - 1

    def add(self, name: str, number: int) -> int:
        """Add a number to the sum of that name of all processes; the sum."""
        return self._store.add(f"{name}/sum", number)

    def give(self, name: str, text: str) -> None:
        """Store a text of any length for all processes."""
        content = zlib.compress(text.encode())
        parts = [content[i : i + _PART] for i in range(0, len(content), _PART)]
        for i, part in enumerate(parts):
            self._store.set(f"{name}/part{i}", part)  # type: ignore[arg-type]  # bytes are taken too
        self._store.set(f"{name}/parts", str(len(parts)))

    def given(self, name: str) -> str:
        """The text that a process has stored under that name."""
        parts = int(self._store.get(f"{name}/parts"))
        return zlib.decompress(b"".join(self._store.get(f"{name}/part{i}") for i in range(parts))).decode()

    def meet(self, stage: str, value: str, *, waiting: Callable[[], None]) -> list[str]:
        """The values of all processes, when all have called this; `waiting` is called while others have not."""
        keys = [f"{stage}/{rank}" for rank in range(self.size)]
        self._store.set(keys[self.rank], value)
        while not self._store.check(keys):
            waiting()
            self._check(keys)
            time.sleep(_POLL)
        return [self._store.get(key).decode() for key in keys]

    def await_others(self, stage: str) -> None:
        """In the first process, wait until all others have called this; the others go on at once."""
        if self.rank:
            self.add(stage, 1)
            return
        while self.add(stage, 0) < self.size - 1:
            self._check()
            time.sleep(_POLL)

    def stop(self) -> None:
        """Tell the other processes to end when their chunks in flight are stored."""
        if self.rank == 0:
            self._store.set(_STOP, "")

    def await_stopped(self) -> None:
        """In the first process, wait until the others have called `close`, or one of them has failed."""
        if self.rank:
            return
        while self._store.add(_STOPPED, 0) < self.size - 1 and not self._store.check([_FAILED]):
            if self._started is not None and not any(one.is_alive() for one in self._started.processes):
                return
            time.sleep(_POLL)

    def fail(self, report: Mapping[str, Any]) -> bool:
        """Tell the first process the error by which this one ends; whether that one prints it."""
        try:
            self._store.compare_set(_FAILED, "", json.dumps({**report, "process": self.rank}))
            if self._watched:  # the first process sees the exit status, and reads this
                return True
            end = time.monotonic() + _PATIENCE
            while not self._store.check([_ENDED]) and time.monotonic() < end:
                time.sleep(_POLL)
            return self._store.check([_ENDED])
        except DistError:  # the first process has ended, with the store
            return True

    def close(self) -> None:
        """End the processes that this one started. In another process than the first, tell it that this one ends."""
        if self.rank:
            with contextlib.suppress(DistError):  # the first process has ended, with the store
                self._store.add(_STOPPED, 1)
            return
        self._store.set(_ENDED, "")
        for process in [] if self._started is None else self._started.processes:
            process.terminate()
            process.join()

    def _check(self, awaited: Sequence[str] = ()) -> None:
        """Raise where the run cannot or must not go on; it can go on where the awaited messages have come."""
        try:
            if self.rank:
                if self._store.check([_STOP]):
                    raise KeyboardInterrupt
                # The messages are looked at last: the first process may send its own and then end.
                if self._store.check([_ENDED]) and not (awaited and self._store.check(list(awaited))):
                    what = f"process 0 has ended before process {self.rank}"
                    raise TreeoptError(Code.PROCESS_ENDED, what, fix=_RESUME)
                return
            if self._store.check([_FAILED]):
                raise ProcessFailed(json.loads(self._store.get(_FAILED)))
        except DistError as error:
            what = f"process {self.rank} has lost the first process of the run"
            raise TreeoptError(Code.PROCESS_ENDED, what, fix=_RESUME) from error
        try:
            if self._started is not None:
                self._started.join(timeout=0)
        except (ProcessExitedException, ProcessRaisedException) as error:
            raise self._lost(error) from error

    def _lost(self, error: ProcessExitedException | ProcessRaisedException) -> Exception:
        """The error of a process that has ended."""
        if self._store.check([_FAILED]):
            return ProcessFailed(json.loads(self._store.get(_FAILED)))
        rank = error.error_index + 1
        how = getattr(error, "signal_name", None)
        status = getattr(error, "exit_code", EXIT_BUG)
        ended = f"was ended by {how}" if how else f"ended with status {status}"
        what = f"process {rank} of {self.size} (numbered from 0) {ended}"
        fix = f"{_RESUME}; with fewer processes (--nproc) where memory was used up"
        return TreeoptError(Code.PROCESS_ENDED, what, at=f"pid {error.error_pid}", fix=fix)


def joined() -> Processes:
    """The processes that torchrun or `launched` started, of which this is one; E405 where it cannot reach them."""
    try:
        store, rank, size = next(rendezvous("env://"))
    except (DistError, ValueError) as error:
        size = os.environ.get("WORLD_SIZE", "")
        what = f"WORLD_SIZE is {size}, and the other processes of the run cannot be reached"
        at = " ".join(f"{name}={os.environ.get(name, '')}" for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"))
        fix = "start all of them with torchrun; for one process, unset WORLD_SIZE"
        raise TreeoptError(Code.PROCESS_ENDED, what, at=at, fix=fix) from error
    return Processes(store, rank, size, watched=parent_process() is not None)


_HERE = "127.0.0.1"


def launched(main: Callable[[], None], arguments: Sequence[str], size: int) -> Processes:
    """Start `size` - 1 processes that run the same command, and lead them.

    They use as many threads as this process, as sums are rounded differently with another number. `main` is a function
    of a module, which reads `sys.argv`.
    """
    store = TCPStore(_HERE, 0, is_master=True, wait_for_workers=False)
    given = (main, tuple(arguments), store.port, size, torch.get_num_threads())
    start: Callable[..., ProcessContext] = start_processes
    started = start(_follow, given, nprocs=size - 1, join=False, daemon=True, start_method="spawn")
    return Processes(store, 0, size, started=started)


def is_launched() -> bool:
    """Whether this process was started by `launched`."""
    return parent_process() is not None


def check_device(device: str, size: int) -> None:
    """Raise E402 unless each of so many processes has a device of its own, or all of them the CPU."""
    try:
        name = torch.device(device).type if device != "auto" else ""
    except RuntimeError as error:  # torch knows no device of this name
        raise unusable(device, first_line(error)) from error
    if name == "cpu" or not (name or torch.accelerator.is_available()):
        return
    count = torch.accelerator.device_count()
    if size > count:
        why = f"--nproc {size} needs {size} devices, and there are {count}"
        raise unusable(device, why, f"--nproc {count}, or --device cpu" if count else "--device cpu")


def _follow(index: int, main: Callable[[], None], arguments: Sequence[str], port: int, size: int, threads: int) -> None:
    """The command in one of the other processes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process tells when to end
    threading.Thread(target=_end_with_parent, daemon=True).start()
    rank = str(index + 1)
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=str(size), MASTER_ADDR=_HERE, MASTER_PORT=str(port))
    os.environ.update(TORCHELASTIC_RUN_ID="treeopt", TORCHELASTIC_USE_AGENT_STORE="True")
    torch.set_num_threads(threads)
    sys.argv[1:] = arguments
    main()


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)  # files are written atomically
