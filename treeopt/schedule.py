"""The schedule record: which tree, policy or none drafts, by the batch and the context of a step.

Drafts cost more in a larger batch, as the device has less spare capacity, so the fastest plan depends on the number of
texts in progress, which falls as texts end, and on the tokens in the cache.
"""

import functools
import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from treeopt.defaults import ONE_NODE
from treeopt.errors import Code, TreeoptError
from treeopt.policy import Plan, TreePolicy
from treeopt.tree import Tree


@dataclass(frozen=True)
class ScheduledPlan:
    """The plan of a batch and a context, with its expected figures.

    Args:
        batch: texts in progress, at least 1.
        context: tokens in the cache of the longest, at least 1.
        plan: a tree or a policy; `Tree(())` is none.
        tokens_per_step: expected, root counted; 1 of none.
        speedup: over autoregressive decoding at this batch and context.
        low, high: the ends of the 90 % interval of the speedup by the sampling of texts; None where there were too few.
    """

    batch: int
    context: int
    plan: Plan
    tokens_per_step: float | None = None
    speedup: float | None = None
    low: float | None = None
    high: float | None = None

    @property
    def key(self) -> tuple[int, int]:
        """(batch, context): the sort key of a schedule, in which it is unique."""
        return self.batch, self.context


@dataclass(frozen=True)
class Schedule:
    """Plans of one drafter by batch and context.

    Args:
        cells: at least one, sorted by (batch, context), each once; `from_cells` sorts. Policies have one depth. Plans
            without drafts get the drafter of the others.
        source: made_by, calibration and the drafter's file; not compared.

    Raises:
        TreeoptError: E103 where a rule above is broken; E223 where plans are of different drafters.
    """

    cells: tuple[ScheduledPlan, ...]
    source: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "cells", tuple(self.cells))
        keys = [one.key for one in self.cells]
        if not keys:
            raise _invalid("it has no cells")
        for one in self.cells:
            _check_cell(one)
        if any(key >= after for key, after in itertools.pairwise(keys)):
            raise _invalid("cells are not sorted by (batch, context), each once; Schedule.from_cells sorts them")
        drafters = {one.plan.drafter for one in self.cells if one.plan.nodes > ONE_NODE}
        if len(drafters) > 1:
            names = " and ".join(f"drafter {name}" if name else "the heads" for name in sorted(drafters))
            what = f"the plans of a schedule are of {names}"
            raise TreeoptError(Code.DRAFTER_MISMATCH, what, why="one drafter follows the texts", fix="plans of one")
        if len({one.plan.depth for one in self.cells if isinstance(one.plan, TreePolicy)}) > 1:
            raise _invalid("its policies differ in depth; replay takes one depth for all")
        # Where no plan has drafts, the schedule is none, of the drafter that its first plan names.
        own = drafters.pop() if drafters else self.cells[0].plan.drafter
        plans = (one.plan if one.plan.drafter == own else replace(one.plan, drafter=own) for one in self.cells)
        cells = (replace(one, plan=plan) for one, plan in zip(self.cells, plans, strict=True))
        object.__setattr__(self, "cells", tuple(cells))

    @classmethod
    def from_cells(cls, cells: Iterable[ScheduledPlan], source: Mapping[str, Any] | None = None) -> Self:
        """The schedule of these cells in any order."""
        return cls(tuple(sorted(cells, key=lambda one: one.key)), source or {})

    @property
    def drafter(self) -> str:
        """Id of the drafter of all plans; empty for the `heads` drafter."""
        return self.cells[0].plan.drafter

    @functools.cached_property
    def plans(self) -> tuple[Plan, ...]:
        """The different plans, in the order of the cells."""
        return tuple(dict.fromkeys(one.plan for one in self.cells))

    @property
    def nodes(self) -> int:
        """The largest number of nodes of any plan, root counted."""
        return max(plan.nodes for plan in self.plans)

    @property
    def depth(self) -> int:
        """The depth of the deepest plan."""
        return max(plan.depth for plan in self.plans)

    def at(self, batch: int, context: int) -> Plan:
        """The plan of so many texts in progress, the longest of which has so many cached tokens.

        It is that of the smallest batch in the schedule which is as large, or of the largest, and likewise of the
        contexts of that batch.
        """
        return self.plans[self.index(batch, context)]

    def index(self, batch: int, context: int) -> int:
        """The index of that plan among `plans`."""
        batches, rows = self._rows
        contexts, plans = rows[_place(batches, batch)]
        return plans[_place(contexts, context)]

    @functools.cached_property
    def _rows(self) -> tuple[list[int], list[tuple[list[int], list[int]]]]:
        """The batches, and of each its contexts and the index of each one's plan."""
        number = {plan: i for i, plan in enumerate(self.plans)}
        batches = list(dict.fromkeys(one.batch for one in self.cells))
        rows = [[one for one in self.cells if one.batch == batch] for batch in batches]
        return batches, [([one.context for one in row], [number[one.plan] for one in row]) for row in rows]


Planned = Plan | Schedule  # what a decoder's steps are planned by


def _place(sizes: list[int], size: int) -> int:
    """The place of the smallest of ascending sizes that is as large; of the last where there is none."""
    return next((i for i, one in enumerate(sizes) if one >= size), len(sizes) - 1)


def _check_cell(cell: ScheduledPlan) -> None:
    """Raise E103 where a number of a cell is out of range."""
    for name in ("batch", "context"):
        value = getattr(cell, name)
        if type(value) is not int or value < 1:
            raise _invalid(f"{name} is {value!r}, not a whole number from 1")
    if not isinstance(cell.plan, (Tree, TreePolicy)):
        raise _invalid(f"the plan of batch {cell.batch}, context {cell.context} is neither a tree nor a policy")
    for name in ("tokens_per_step", "speedup", "low", "high"):
        value = getattr(cell, name)
        if value is not None and not 0 <= value < math.inf:
            raise _invalid(f"batch {cell.batch}, context {cell.context} has {name} {value!r}, not a positive number")


def _invalid(fault: str) -> TreeoptError:
    why = "a schedule has a plan for each batch and context, and one drafter"
    return TreeoptError(Code.TREE_INVALID, f"not a schedule: {fault}", why=why, fix="treeopt build makes one")
