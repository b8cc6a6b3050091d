"""A run: its batches, made by this process alone or divided among several, of which the first leads.

The processes run the same command, so they reach the same stages in the same order. What a process makes depends on the
others, and what a batch holds does not. The others follow the first: they make batches, and write and print nothing;
where the rest of the work is not divided, its function returns None to them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from treeopt.errors import Code, TreeoptError
from treeopt.progress import Progress, silent

if TYPE_CHECKING:
    from treeopt.runs.processes import Processes

T = TypeVar("T")
Tally = Callable[[str, int], int]  # adds a number to a sum of all processes, and returns the sum


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
        if self.team is None:
            return
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
