"""Work with small results that several processes divide: each makes some of the parts, and all get all of them.

Results travel through the store of the processes as JSON, so machines need no common folder.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from treeopt.runs.processes import Processes
from treeopt.runs.stages import Stages

T = TypeVar("T")
Tally = Callable[[str, int], int]  # adds a number to a sum of all processes, and returns the sum


class Division:
    """The processes that divide a task.

    All of them call the same methods in the same order.

    Args:
        team: the processes; None for this one alone.
    """

    def __init__(self, team: Processes | None = None) -> None:
        self._team = team
        self._stages = None if team is None else Stages(team, _wait)

    def each(self, count: int, make: Callable[[int], T]) -> list[T]:
        """`make(i)` for i = 0 .. count - 1. Each process makes the next one that none has taken.

        Args:
            count: the same in all processes.
            make: returns types of JSON; what it returns must depend on i alone.

        Raises:
            TreeoptError: E405 where another process has ended.
            ProcessFailed: in the first process, where another has failed.
        """
        if self._team is None or self._stages is None:
            return [make(i) for i in range(count)]
        self._stages.agree("number of parts", str(count))
        stage = self._stages.next()
        while (i := self._team.take(stage)) < count:
            self._team.give(f"{stage}/{i}", json.dumps(make(i)))
        self._stages.meet(stage)
        found = [json.loads(self._team.given(f"{stage}/{i}")) for i in range(count)]
        self._team.await_others(stage)  # the first process may end after this, and the store with it
        return found

    def tally(self) -> Tally:
        """New sums, which begin with 0."""
        if self._team is None or self._stages is None:
            sums: Counter[str] = Counter()

            def add(name: str, number: int) -> int:
                sums[name] += number
                return sums[name]

            return add
        team, stage = self._team, self._stages.next()
        return lambda name, number: team.add(f"{stage}/{name}", number)

    def check_same(self, settings: Callable[[], Mapping[str, Any]]) -> None:
        """Raise E406 unless all processes have the same settings, in types of JSON; one alone does not compute them."""
        if self._stages is not None:
            self._stages.check_settings(settings())

    def leader_only(self) -> None:
        """End this process unless it is the first: the rest of the work is not divided.

        Raises:
            SystemExit: in all processes but the first.
        """
        if self._team is not None and self._team.rank > 0:
            sys.exit(0)


ALONE = Division()


def _wait() -> None:
    """What a process does while it waits for others: nothing, as it has stored nothing."""
