"""Refinement: exchanges that replay proves, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import make_calibration, random_calibration, random_tree

from treeopt.calibration import Ranks
from treeopt.optimize.refine import Limits, refine
from treeopt.optimize.replay import accepted_drafts, visits
from treeopt.optimize.tree_builder import build_tree
from treeopt.optimize.trie import Floats
from treeopt.tree import Tree

LONG = 60.0  # seconds; refinement ends by itself long before


def cost(tree: Tree, ranks: Ranks, weights: Floats) -> float:
    """Weighted steps."""
    return float(weights[visits(accepted_drafts(tree, ranks))].sum())


@pytest.mark.parametrize("weighted", [False, True], ids=["uniform", "weighted"])
@pytest.mark.parametrize("seed", range(4))
def test_refined_tree_is_better_and_within_limits(seed: int, weighted: bool) -> None:
    """From a random tree: the same number of nodes, fewer steps, no forbidden rank or depth, and still a tree."""
    calibration = random_calibration(seed, sequences=10, length=40, heads=3, top_k=8)
    weights = np.ones(calibration.positions)
    if weighted:
        weights = np.random.default_rng(seed).random(calibration.positions)
    start = random_tree(seed, nodes=14, depth=2, ranks=5)
    refined = refine(start, calibration.ranks, weights, Limits(14, 5, 2), seconds=LONG)
    assert refined.nodes == 14
    assert refined.depth <= 2
    assert refined.max_rank < 5
    assert refined.values is None
    assert {path[:-1] for path in refined.paths} <= {(), *refined.paths}
    assert cost(refined, calibration.ranks, weights) < cost(start, calibration.ranks, weights)


@pytest.mark.parametrize("seed", range(3))
def test_refined_tree_is_never_worse_than_a_built_one(seed: int) -> None:
    """A tree that is good already takes at most as many steps on the same traces afterwards."""
    calibration = random_calibration(seed, sequences=10, length=40)
    weights = np.ones(calibration.positions)
    start = build_tree(calibration, 12)
    refined = refine(start, calibration.ranks, weights, Limits(12, 16), seconds=LONG)
    assert refined.nodes == start.nodes
    assert cost(refined, calibration.ranks, weights) <= cost(start, calibration.ranks, weights)
    again = refine(refined, calibration.ranks, weights, Limits(12, 16), seconds=LONG)
    assert again.paths == refined.paths  # it had come to its end


def test_useless_leaf_is_exchanged_for_the_useful_one() -> None:
    """Rank 3 never comes and rank 1 does where steps begin: the one goes, the other comes."""
    calibration = make_calibration([np.array([[0], [0], [1]] * 10)])
    refined = refine(Tree(((0,), (3,))), calibration.ranks, np.ones(30), Limits(3, 4), seconds=LONG)
    assert refined.paths == ((0,), (1,))


def test_exchange_that_helps_no_step_is_refused() -> None:
    """A rank that only comes where no step begins has uniform value, but replay knows better."""
    calibration = make_calibration([np.array([[0, 0], [1, 1], [0, 0], [1, 1], [0, 0], [1, 1]])])
    start = Tree(((0,), (2,)))  # steps begin at the rows of rank 0 alone
    refined = refine(start, calibration.ranks, np.ones(6), Limits(3, 3, 1), seconds=LONG)
    assert refined is start


@pytest.mark.parametrize("seconds", [0.0, LONG])
def test_tree_is_the_same_where_nothing_gains(seconds: float) -> None:
    """At the optimum the very same record comes back, values and all."""
    calibration = make_calibration([np.array([[0], [1], [0], [0]] * 5)])
    best = Tree(((0,), (1,)), (0.75, 0.25))
    assert refine(best, calibration.ranks, np.ones(20), Limits(3, 4), seconds=seconds) is best


def test_no_time_is_no_exchange() -> None:
    """With no seconds the tree stays, however bad it is."""
    calibration = make_calibration([np.array([[0], [1]] * 10)])
    bad = Tree(((2,), (3,)))
    assert refine(bad, calibration.ranks, np.ones(20), Limits(3, 4), seconds=0.0) is bad


def test_weights_decide_what_gains() -> None:
    """Two texts want different leaves: the one that weighs more has its way."""
    calibration = make_calibration([np.array([[1]] * 10), np.array([[2]] * 10)])
    for heavy, wanted in ((0, (1,)), (1, (2,))):
        weights = np.where(np.arange(20) // 10 == heavy, 3.0, 1.0)
        refined = refine(Tree(((0,),)), calibration.ranks, weights, Limits(2, 4), seconds=LONG)
        assert refined.paths == (wanted,)


def test_root_alone_is_left_alone() -> None:
    """One node has no leaf to exchange."""
    calibration = random_calibration(0)
    root = Tree(())
    assert refine(root, calibration.ranks, np.ones(calibration.positions), Limits(1, 16), seconds=LONG) is root


def test_refinement_is_deterministic() -> None:
    """Where time is no matter, the same start gives the same end."""
    calibration = random_calibration(3, sequences=10, length=40)
    start = random_tree(3, nodes=12, depth=3, ranks=6)
    weights = np.ones(calibration.positions)
    one, other = (refine(start, calibration.ranks, weights, Limits(12, 8), seconds=LONG) for _ in range(2))
    assert one.paths == other.paths


def test_progress_is_told_the_seconds_of_the_limit() -> None:
    """Each exchange that is tried reports the second that has begun, of one more than the limit's."""
    calibration = make_calibration([np.array([[0], [0], [1]] * 10)])
    seen: list[tuple[int, int]] = []
    report = {"seconds": LONG, "progress": lambda done, total, _note: seen.append((done, total))}
    refine(Tree(((0,), (3,))), calibration.ranks, np.ones(30), Limits(3, 4), **report)
    assert seen
    assert all(0 < done <= total == LONG + 1 for done, total in seen)
