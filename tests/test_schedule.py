"""The schedule record: its checks, and the plan of any batch and context."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from looped import looped
from refusals import refusal_of

from treeopt.errors import Code
from treeopt.policy import TreePolicy
from treeopt.schedule import Schedule, ScheduledPlan
from treeopt.tree import Tree

CHAIN, PAIR = Tree.chain(3), Tree.from_paths([(0,), (1,)])


def test_plan_of_any_batch_and_context() -> None:
    """The next larger batch, then the next larger context of that batch; beyond the largest, the largest."""
    cells = [
        ScheduledPlan(4, 512, Tree(())),
        ScheduledPlan(1, 128, CHAIN),
        ScheduledPlan(1, 512, PAIR),
        ScheduledPlan(4, 64, CHAIN),
    ]
    schedule = Schedule.from_cells(cells)
    assert [one.key for one in schedule.cells] == [(1, 128), (1, 512), (4, 64), (4, 512)]
    assert (schedule.nodes, schedule.depth, schedule.drafter, schedule.plans) == (4, 3, "", (CHAIN, PAIR, Tree(())))
    wanted = {
        (1, 1): CHAIN,
        (1, 128): CHAIN,
        (1, 129): PAIR,
        (1, 9999): PAIR,
        (2, 64): CHAIN,
        (2, 65): Tree(()),
        (4, 600): Tree(()),
        (99, 10): CHAIN,
    }
    assert {place: schedule.at(*place) for place in wanted} == wanted


places = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=8, unique=True)


@settings(max_examples=50, deadline=None)
@given(places, st.integers(1, 12), st.integers(1, 12))
def test_plan_by_a_scan(keys: list[tuple[int, int]], batch: int, context: int) -> None:
    """The same as a scan over all cells."""
    schedule = Schedule.from_cells(ScheduledPlan(*key, Tree.chain(i)) for i, key in enumerate(keys))
    batches = sorted({one for one, _ in keys})
    row = min((one for one in batches if one >= batch), default=batches[-1])
    contexts = sorted(one for other, one in keys if other == row)
    column = min((one for one in contexts if one >= context), default=contexts[-1])
    assert schedule.at(batch, context) == Tree.chain(keys.index((row, column)))


def test_none_has_the_drafter_of_the_others() -> None:
    """Plans without drafts name no drafter of their own; equal schedules are equal whatever they were given."""
    policy = TreePolicy(8, 3, "d1")
    cells = (ScheduledPlan(1, 9, policy), ScheduledPlan(4, 9, Tree(())))
    schedule = Schedule(cells)
    assert schedule.drafter == "d1"
    assert schedule.at(4, 9) == Tree((), drafter="d1")
    assert schedule == Schedule((cells[0], ScheduledPlan(4, 9, Tree((), drafter="other"))))
    assert Schedule((cells[1],)).drafter == ""


ONE = ScheduledPlan(1, 8, CHAIN)
WRONG: list[tuple[tuple[Any, ...], Code]] = [
    ((), Code.TREE_INVALID),
    ((ONE, ONE), Code.TREE_INVALID),
    ((ScheduledPlan(2, 8, CHAIN), ONE), Code.TREE_INVALID),
    ((ScheduledPlan(0, 8, CHAIN),), Code.TREE_INVALID),
    ((ScheduledPlan(1, True, CHAIN),), Code.TREE_INVALID),
    ((ScheduledPlan(1, 8, [[0]]),), Code.TREE_INVALID),  # type: ignore[arg-type]
    ((dataclasses.replace(ONE, speedup=math.nan),), Code.TREE_INVALID),
    ((dataclasses.replace(ONE, low=-1.0),), Code.TREE_INVALID),
    ((ONE, ScheduledPlan(2, 8, TreePolicy(8, 3, "d1"))), Code.DRAFTER_MISMATCH),
    (tuple(ScheduledPlan(n, 8, TreePolicy(8, n, "d1")) for n in (1, 2)), Code.TREE_INVALID),  # of two depths
]


@looped("cells, code", WRONG)
def test_broken_rules(cells: tuple[Any, ...], code: Code) -> None:
    """Each rule has its error."""
    assert refusal_of(Schedule, cells).code is code


def test_sources_are_not_compared() -> None:
    """As in trees and policies."""
    assert Schedule((ONE,), {"made_by": "a"}) == Schedule((ONE,))
    with pytest.raises(dataclasses.FrozenInstanceError):
        Schedule((ONE,)).cells = ()  # type: ignore[misc]
