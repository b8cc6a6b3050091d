"""What is said of trees: why a path is in one, how two differ, which part is used most, how estimates came true."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from helpers import make_calibration, random_calibration
from looped import looped
from refusals import refusal_of

from treeopt.defaults import STEP_SIZES
from treeopt.errors import Code, TreeoptError
from treeopt.optimize.explain import explain_path
from treeopt.optimize.intervals import compare_trees
from treeopt.optimize.per_step import calibration_error
from treeopt.optimize.replay import replay
from treeopt.traces import NONE, StepTraces
from treeopt.tree import Tree


def test_path_of_the_file_has_its_value_and_place() -> None:
    """Values are ordered, the greatest first; a path without a value is E106."""
    tree = Tree(((0,), (1,), (0, 0)), (0.5, 0.125, 0.25))
    found = explain_path(tree, (0, 0))
    assert (found.last.value, found.last.place, found.cut_off, found.margin) == (0.25, 2, 0.125, 0.125)
    assert found.made_it
    last = explain_path(tree, (1,))
    assert (last.last.place, last.paths, last.margin) == (3, 3, 0.0)
    assert last.made_it
    with pytest.raises(TreeoptError, match="not in the tree") as caught:
        explain_path(tree, (2,))
    assert caught.value.code is Code.PATH_UNKNOWN


def test_place_beyond_the_first_growth_is_found() -> None:
    """Growth is followed with more nodes until it holds the path: the last of 81 pairs has a place after the others."""
    ranks = [[first, 0] for first in range(9)] + [[0, second] for second in range(9)]
    calibration = make_calibration([np.array([[*row], [0, 0], [0, 0]]) for row in ranks for _ in range(4)])
    accuracy = calibration.accuracy
    paths = [((rank,), accuracy[0, rank]) for rank in range(9)]
    paths += [((*one, rank), value * accuracy[1, rank]) for one, value in paths for rank in range(9)]
    order = [path for path, value in sorted(paths, key=lambda each: (-each[1], len(each[0]), each[0])) if value > 0]
    assert len(order) > 70
    found = explain_path(Tree(((0,), (0, 0))), order[-1], calibration)
    assert found.last.place == len(order)
    assert not found.made_it


@looped("method", [{"values": "joint", "weights": "uniform"}, {"values": "mine", "weights": "uniform"}])
def test_method_that_was_edited_is_the_simplest(method: dict[str, str]) -> None:
    """A strength that is missing or no number, and names that are not known, are neither a fault nor NaN."""
    calibration = random_calibration(1)
    tree = Tree(((0,), (0, 0)))
    plain = explain_path(tree, (0, 0), calibration)
    for more in ({}, {"strength": "abc"}):
        edited = dataclasses.replace(tree, source={"method": {**method, **more}})
        assert explain_path(edited, (0, 0), calibration) == plain
    whole = dataclasses.replace(tree, source={"method": {"values": "joint", "weights": "visits", "strength": 8}})
    assert explain_path(whole, (0, 0), calibration).last.value != plain.last.value


def test_share_of_a_value_of_zero_is_zero() -> None:
    """Where the node above is never right, nothing is divided by its value."""
    found = explain_path(Tree(((0,), (1,), (1, 0)), (0.5, 0.0, 0.0)), (1, 0))
    assert [prefix.share for prefix in found.prefixes] == [0.0, 0.0]


def test_paths_of_one_tree_alone_are_listed() -> None:
    """Each tree's paths are in its order; equal paths are counted; the gain is that of replay, if any."""
    first, second = Tree(((0,), (1,), (0, 0))), Tree(((0,), (2,), (0, 1), (2, 0)))
    found = compare_trees(first, second)
    assert (found.first_only, found.second_only) == (((1,), (0, 0)), ((2,), (0, 1), (2, 0)))
    assert found.shared == 1
    assert found.gain is None
    traces = random_calibration(3)
    gain = compare_trees(first, second, traces).gain
    assert gain is not None
    assert (gain.first, gain.second) == tuple(replay(tree, traces).tokens_per_step for tree in (first, second))


def test_trees_of_other_drafters_are_not_compared() -> None:
    """Equal ranks are then other drafts: E223."""
    assert refusal_of(compare_trees, Tree(((0,),)), Tree(((0,),), drafter="d1")).code is Code.DRAFTER_MISMATCH


def test_calibration_error_by_hand() -> None:
    """Bins: 0.5 twice, one of them right, and 0.25 and 1.0 that were wrong; the last row has nothing to guess."""
    made = make_calibration([np.array([[0], [3], [1], [2], [0]])])
    confidence = np.array([[0.5], [0.5], [1.0], [0.25], [0.9]], np.float16)
    node_rank = np.where(made.ranks == NONE, NONE, 1).astype(np.uint8)
    expected_tokens = np.ones((5, len(STEP_SIZES)), np.float32)
    found = calibration_error(dataclasses.replace(made, steps=StepTraces(node_rank, expected_tokens, confidence)))
    assert made.ranks[:, 0].tolist()[-1] == NONE
    assert found.tolist() == [pytest.approx((0 + 1.0 + 0.25) / 4)]
    unreached = make_calibration([np.zeros((1, 2), int)])
    steps = StepTraces(unreached.ranks, np.ones((1, len(STEP_SIZES)), np.float32), np.ones((1, 2), np.float16))
    assert calibration_error(dataclasses.replace(unreached, steps=steps)).tolist() == [0, 0]
