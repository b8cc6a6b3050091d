"""Starts the processes of `--nproc` on this machine: copies of the command with the environment that torchrun sets."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from multiprocessing import parent_process

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # its stubs lack the store
from torch.multiprocessing.spawn import ProcessContext, start_processes

from treeopt.errors import first_line
from treeopt.models.devices import unusable
from treeopt.processes.team import Processes

_HERE = "127.0.0.1"


def launched(main: Callable[[], None], arguments: Sequence[str], size: int) -> Processes:
    """Start `size` - 1 processes that run the same command, and lead them.

    They use as many threads as this process: sums are rounded differently with another number.

    Args:
        main: the program, a function of a module; it reads `sys.argv`.
        arguments: of the program.
        size: number of processes, this one among them.
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
