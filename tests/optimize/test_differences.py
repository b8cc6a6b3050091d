"""How two trees differ: the paths of each alone, and those of both."""

from __future__ import annotations

import pytest

from treeopt.errors import Code, TreeoptError
from treeopt.optimize.intervals import compare_trees
from treeopt.tree import Tree


def test_paths_of_one_tree_alone_are_listed() -> None:
    """Each tree's paths are in its order; equal paths are counted, and without traces there is no gain."""
    first, second = Tree(((0,), (1,), (0, 0))), Tree(((0,), (2,), (0, 1), (2, 0)))
    found = compare_trees(first, second)
    assert (found.first_only, found.second_only) == (((1,), (0, 0)), ((2,), (0, 1), (2, 0)))
    assert found.shared == 1
    assert found.gain is None


def test_trees_of_other_drafters_are_not_compared() -> None:
    """Equal ranks are then other drafts: E223."""
    with pytest.raises(TreeoptError) as caught:
        compare_trees(Tree(((0,),)), Tree(((0,),), drafter="d1"))
    assert caught.value.code is Code.DRAFTER_MISMATCH
