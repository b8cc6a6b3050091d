"""The tree record: what is derived from its paths, and what is not a tree."""

from __future__ import annotations

import random

import numpy as np
import pytest
from helpers import random_tree
from hypothesis import given, settings
from hypothesis import strategies as st
from looped import looped
from refusals import refusal_of

from treeopt.errors import Code, TreeoptError
from treeopt.files.trees import as_tree
from treeopt.tree import MAX_FAULTS, Tree, check_tree_fits


def refusal(paths: object, values: object = None) -> TreeoptError:
    """The error with which the record refuses these paths and values."""
    with pytest.raises(TreeoptError) as caught:
        Tree(paths, values)  # type: ignore[arg-type]
    return caught.value


def test_parents_and_leaves_of_the_worked_example(small_tree: Tree) -> None:
    """Each node names its parent, the root itself; leaves are the nodes that no other names."""
    assert small_tree.parents == (0, 0, 0, 1, 1, 3)
    assert small_tree.leaves == (2, 4, 5)


def test_root_alone() -> None:
    """The root is a tree, a leaf of depth 0 without ranks; no values and an empty list of values are the same."""
    tree = Tree(())
    assert (tree.nodes, tree.depth, tree.max_rank) == (1, 0, -1)
    assert (tree.parents, tree.depths, tree.leaves) == ((0,), (0,), (0,))
    assert tree.ancestors.tolist() == [[True]]
    assert Tree((), ()) == Tree(())


def test_chain_of_three() -> None:
    """A chain is each head's best guess, one below the other."""
    tree = Tree.chain(3)
    assert tree.paths == ((0,), (0, 0), (0, 0, 0))
    assert (tree.nodes, tree.parents, tree.leaves) == (4, (0, 0, 1, 2), (3,))
    assert tree.ancestors.tolist() == np.tril(np.ones((4, 4), bool)).tolist()


@looped("seed", range(10))
def test_ancestors_equal_prefixes(seed: int) -> None:
    """A node is an ancestor of another exactly where its path is a prefix of the other's."""
    tree = random_tree(seed, nodes=30, depth=5, ranks=6)
    paths = [(), *tree.paths]
    prefixes = [[row[: len(column)] == column for column in paths] for row in paths]
    assert tree.ancestors.tolist() == prefixes


def test_ancestors_are_read_only(small_tree: Tree) -> None:
    """What a record hands out cannot be written to."""
    with pytest.raises(ValueError, match="read-only"):
        small_tree.ancestors[0, 0] = False


@pytest.mark.parametrize(
    ("paths", "word"),
    [
        pytest.param(((0,), (1, 0)), "[1, 0]: its parent [1] is missing", id="orphan"),
        pytest.param(((0,), (0, 0, 0)), "[0, 0, 0]: its parent [0, 0] is missing", id="orphan of the second level"),
        pytest.param(((0,), (0,)), "twice", id="duplicate"),
        pytest.param(((), (0,)), "root", id="empty path"),
        pytest.param(((-1,),), "whole number", id="negative rank"),
        pytest.param(((0,), (0, -1)), "whole number", id="negative rank below"),
        pytest.param(((True,),), "whole number", id="bool rank"),
        pytest.param(((0.0,),), "whole number", id="float rank"),
        pytest.param((("0",),), "whole number", id="text as rank"),
        pytest.param(((np.bool_(True),),), "whole number", id="numpy bool as rank"),
        pytest.param([[0], [1.5]], "[1.5] is not a path", id="float in a list"),
        pytest.param([[0], ["1"]], "['1'] is not a path", id="text in a list"),
        pytest.param([[0], [[1]]], "[[1]] is not a path", id="list in a path"),
        pytest.param([[0], None], "None is not a path", id="None for a path"),
        pytest.param([0, 0], "0 is not a path", id="one path, not a list of them"),
        pytest.param([[0], "0"], "'0' is not a path", id="text for a path"),
        pytest.param([[0], {0}], "is not a path", id="set for a path"),
        pytest.param([[0], [10**5000]], "a number of 16610 bits", id="number of 5000 digits"),
        pytest.param([[0], [2**31]], "from 0 to 2147483647", id="rank beyond any vocabulary"),
        pytest.param([[0] * n for n in range(1, 129)], "has 128 ranks; a tree is at most 127 deep", id="too deep"),
        pytest.param([[0] * 10_000], "[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, ...]", id="long orphan, cut"),
        pytest.param("mc_sim_7b_63", "'mc_sim_7b_63' is not a list of paths", id="a name"),
        pytest.param(None, "None is not a list of paths", id="None"),
        pytest.param(63, "63 is not a list of paths", id="a number"),
        pytest.param({(0,): 0.5}, "an object of type dict", id="a dict"),
        pytest.param(((1,), (0,)), "not sorted", id="unsorted ranks"),
        pytest.param(((0,), (0, 0), (1,)), "not sorted", id="unsorted lengths"),
    ],
)
def test_paths_that_are_no_tree(paths: object, word: str) -> None:
    """A fault of the paths is E103 and is named."""
    error = refusal(paths)
    assert error.code is Code.TREE_INVALID
    assert word in error.what


@pytest.mark.parametrize(
    "paths",
    [
        pytest.param([[0], [1], [0, 0]], id="lists"),
        pytest.param([(0,), (1,), (0, 0)], id="tuples in a list"),
        pytest.param(([0], [1], [0, 0]), id="lists in a tuple"),
        pytest.param(((np.int64(0),), (np.uint8(1),), (0, np.int32(0))), id="integers of numpy"),
        pytest.param([np.array([0]), np.array([1]), np.array([0, 0])], id="arrays"),
        pytest.param(iter([[0], [1], [0, 0]]), id="an iterator"),
    ],
)
def test_lists_become_tuples_of_plain_integers(paths: object) -> None:
    """Whatever holds the paths, the record holds tuples of plain integers, and can be hashed."""
    tree = Tree(paths, [np.float64(0.5), 1, 0.25])  # type: ignore[arg-type]
    assert tree == Tree(((0,), (1,), (0, 0)), (0.5, 1.0, 0.25))
    assert {type(path) for path in tree.paths} == {tuple}
    assert {type(rank) for path in tree.paths for rank in path} == {int}
    assert {type(value) for value in tree.values or ()} == {float}
    assert hash(tree) == hash(Tree(((0,), (1,), (0, 0)), (0.5, 1.0, 0.25)))
    assert as_tree(tree) is tree


def test_a_list_in_any_order_is_a_tree() -> None:
    """`as_tree` sorts; the record itself says what to write."""
    assert as_tree([[1], [0, 0], [0]]) == Tree(((0,), (1,), (0, 0)))
    assert as_tree([]) == Tree(()) == Tree([])  # type: ignore[arg-type]
    assert "Tree.from_paths sorts them" in refusal([[1], [0]]).what


@looped("values", [("a", "b"), "ab", 0.5, [True, 0.5], [None, 0.5], {0.5: 1}])
def test_values_of_wrong_types(values: object) -> None:
    """What is no list of numbers is E103 and not a failure of Python's own."""
    assert refusal(((0,), (1,)), values).code is Code.TREE_INVALID


@pytest.mark.parametrize(
    ("values", "word"),
    [
        pytest.param((0.5,), "1 values for 2 paths", id="too few"),
        pytest.param((0.5, 0.2, 0.1), "3 values for 2 paths", id="too many"),
        pytest.param((), "0 values for 2 paths", id="none"),
        pytest.param((0.5, -0.1), "[1] has value -0.1", id="negative"),
        pytest.param((1.5, 0.1), "[0] has value 1.5", id="above one"),
        pytest.param((0.5, float("nan")), "[1] has value nan", id="not a number"),
        pytest.param((float("inf"), 0.5), "[0] has value inf", id="infinite"),
    ],
)
def test_values_that_are_no_probabilities(values: tuple[float, ...], word: str) -> None:
    """Each path has a probability or none has; anything else is E103."""
    error = refusal(((0,), (1,)), values)
    assert error.code is Code.TREE_INVALID
    assert word in error.what


def test_value_limits_are_probabilities() -> None:
    """0 and 1 are probabilities."""
    assert Tree(((0,), (1,)), (1.0, 0.0)).values == (1.0, 0.0)


@looped("paths", [[(0.5,)], [("a",)], [(None,)], [0]])
def test_from_paths_what_is_no_path(paths: list[object]) -> None:
    """From outside, too, only whole numbers are ranks."""
    with pytest.raises(TreeoptError) as caught:
        Tree.from_paths(paths)  # type: ignore[arg-type]
    assert caught.value.code is Code.TREE_INVALID


def test_from_paths_of_numpy_and_with_wrong_values() -> None:
    """Integers of numpy become plain ones; too few and too many values are E103, whatever the order of the paths."""
    tree = Tree.from_paths(np.array([[1], [0]]))
    assert tree.paths == ((0,), (1,))
    assert type(tree.paths[0][0]) is int
    for values in ([0.5], [0.5, 0.4, 0.3]):
        assert refusal_of(Tree.from_paths, [(1,), (0,)], values).code is Code.TREE_INVALID


def test_faults_are_listed_together_up_to_ten() -> None:
    """Three faults come in one error, in the order of the paths; at most ten are listed."""
    error = refusal(((0,), (0,), (-1,), (3, 1)))
    listed = [error.what, *error.at.splitlines()]
    assert len(listed) == 3
    assert "[0] occurs twice" in listed[0]
    assert "[-1] has a rank" in listed[1]
    assert "[3, 1]: its parent [3] is missing" in listed[2]
    error = refusal(tuple((rank, 0) for rank in range(25)))
    assert MAX_FAULTS == 10
    assert 1 + len(error.at.splitlines()) == 10


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6), nodes=st.integers(1, 25), order=st.randoms(use_true_random=False), valued=st.booleans()
)
def test_from_paths_sorts_any_order(seed: int, nodes: int, order: random.Random, valued: bool) -> None:
    """Paths in any order give the same tree, and each value stays with its path."""
    tree = random_tree(seed, nodes=nodes, depth=4, ranks=7)
    pairs = [(path, node / 100) for node, path in enumerate(tree.paths)]
    order.shuffle(pairs)
    built = Tree.from_paths([path for path, _ in pairs], [value for _, value in pairs] if valued else None)
    assert built.paths == tuple(sorted(tree.paths, key=lambda path: (len(path), path)))
    assert built.values == (tuple(node / 100 for node in range(len(tree.paths))) if valued and pairs else None)


def test_equality_source_does_not_count(small_tree: Tree) -> None:
    """Trees are equal by paths and values, wherever they come from."""
    assert small_tree == Tree(small_tree.paths, small_tree.values, source={"made_by": "hand"})
    assert small_tree != Tree(small_tree.paths)


def test_every_rank_is_checked() -> None:
    """A bool in the middle of a path is found although it equals its parent's rank."""
    with pytest.raises(TreeoptError, match="whole number"):
        Tree(((1,), (True, 0)))


def test_tree_fits_with_as_many_levels_and_ranks_as_there_are(small_tree: Tree) -> None:
    """Depth 3 needs three levels (E101), and rank 1 two ranks (E102)."""
    check_tree_fits(small_tree, heads=3, ranks=2, holder="it")
    for size, code in (({"heads": 2, "ranks": 2}, Code.TREE_TOO_DEEP), ({"heads": 3, "ranks": 1}, Code.RANK_TOO_LARGE)):
        assert refusal_of(check_tree_fits, small_tree, **size, holder="it").code is code
