"""Why a path is in a tree: places by the values of a file, and by the growth that traces give."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import make_calibration

from treeopt.errors import Code, TreeoptError
from treeopt.optimize.explain import explain_path
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


def test_share_of_a_value_of_zero_is_zero() -> None:
    """Where the node above is never right, nothing is divided by its value."""
    found = explain_path(Tree(((0,), (1,), (1, 0)), (0.5, 0.0, 0.0)), (1, 0))
    assert [prefix.share for prefix in found.prefixes] == [0.0, 0.0]
