"""Several processes of one run as threads of a test, each with its own client of one store."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from treeopt.runs.processes import Processes

R = TypeVar("R")
HERE = "127.0.0.1"


def team(size: int) -> list[Processes]:
    """The processes of one run, as each of them sees them."""
    server = TCPStore(HERE, 0, is_master=True, wait_for_workers=False)
    clients = [TCPStore(HERE, server.port, is_master=False) for _ in range(1, size)]
    return [Processes(store, rank, size, watched=rank > 0) for rank, store in enumerate([server, *clients])]


def together(function: Callable[[Processes], R], size: int) -> list[R | BaseException]:
    """What the function returns or raises in each of so many processes, which run at the same time."""

    def run(one: Processes) -> R | BaseException:
        try:
            return function(one)
        except BaseException as error:
            if one.rank:
                one.fail({"error": "bug", "what": repr(error), "at": ""})  # else the first would wait for this one
            else:
                one.stop()
            return error
        finally:
            if one.rank:
                one.close()

    members = team(size)  # held until all have ended, as the first one has the store
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, members))
