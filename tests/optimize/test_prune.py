"""Prune: the most used part of a tree is a tree, and yields no less than another part of its size."""

from __future__ import annotations

import itertools

import numpy as np
from helpers import make_calibration, random_calibration, random_tree
from looped import looped

from treeopt.optimize.replay import most_used, replay
from treeopt.tree import Tree


def test_most_used_hand_written() -> None:
    """Steps at rows 0, 2 and 3 accept (1,), nothing and (0,): what one step used stands before what none did."""
    calibration = make_calibration([np.array([[1, 5], [0, 0], [9, 0], [0, 3], [0, 0]])])
    tree = Tree(((0,), (1,), (2,), (0, 0)))
    assert replay(tree, calibration).steps == 3
    assert most_used(tree, calibration, 3) == Tree(((0,), (1,)))
    assert most_used(tree, calibration, 1) == Tree(())
    assert most_used(tree, calibration, 9) == tree


@looped("seed", range(8))
def test_most_used_is_nested_and_useful(seed: int) -> None:
    """Parts are trees of the size asked for, each in the next, and yield at least what some other part does."""
    calibration = random_calibration(seed)
    tree = random_tree(seed, nodes=30, depth=4, ranks=6)
    parts = [most_used(tree, calibration, nodes) for nodes in range(1, 31)]
    assert [part.nodes for part in parts] == list(range(1, 31))
    assert all(set(one.paths) < set(other.paths) for one, other in itertools.pairwise(parts))
    other = Tree.from_paths({path[:i] for path in tree.paths[-3:] for i in range(1, len(path) + 1)})
    same_size = most_used(tree, calibration, other.nodes)
    assert replay(same_size, calibration).tokens_per_step >= replay(other, calibration).tokens_per_step
