"""Shapes: tensors made from parents alone say what the tree records say."""

from __future__ import annotations

import pytest
import torch
from helpers import random_tree

from treeopt.tree import Tree
from treeopt.verify.shapes import Shape

SIZES = [(1, 1), (2, 1), (9, 3), (24, 5), (64, 4)]


def trees_of(nodes: int, depth: int) -> list[Tree]:
    """Six random trees of one size."""
    if nodes == 1:
        return [Tree(())] * 6
    return [random_tree(seed, nodes=nodes, depth=depth, ranks=nodes) for seed in range(6)]


@pytest.mark.parametrize(("nodes", "depth"), SIZES)
@pytest.mark.parametrize("spare", [0, 3])
def test_from_parents_equals_the_records(nodes: int, depth: int, spare: int) -> None:
    """Rows with a tree each have the depths and ancestors of their own records, however deep they might have been."""
    trees = trees_of(nodes, depth)
    shape = Shape.from_parents(torch.tensor([tree.parents for tree in trees]), depth + spare)
    assert (shape.parents.dtype, shape.depths.dtype, shape.ancestors.dtype) == (torch.int64, torch.int64, torch.bool)
    assert shape.parents.tolist() == [list(tree.parents) for tree in trees]
    assert shape.depths.tolist() == [list(tree.depths) for tree in trees]
    assert shape.ancestors.tolist() == [tree.ancestors.tolist() for tree in trees]


@pytest.mark.parametrize(("nodes", "depth"), SIZES)
def test_of_tree_is_the_shape_of_its_parents(nodes: int, depth: int) -> None:
    """One tree for all rows is what its parents give for one row."""
    for tree in trees_of(nodes, depth):
        shape = Shape.of_tree(tree, torch.device("cpu"))
        made = Shape.from_parents(torch.tensor([tree.parents]), tree.depth)
        assert shape.void is None
        assert made.void is None
        known = [[value for value in vars(one).values() if value is not None] for one in (shape, made)]
        for one, other in zip(*known, strict=True):
            assert one.dtype == other.dtype
            assert torch.equal(one, other)


def test_from_parents_hand_written(small_tree: Tree) -> None:
    """Nodes (0,) (1,) (0,0) (0,1) (0,0,0) hang on 0 0 1 1 3."""
    shape = Shape.from_parents(torch.tensor([[0, 0, 0, 1, 1, 3]]), 3)
    assert shape.parents[0].tolist() == list(small_tree.parents)
    assert shape.depths.tolist() == [[0, 1, 1, 2, 2, 3]]
    assert shape.ancestors[0].int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 0, 1, 0, 0, 0],
        [1, 1, 0, 1, 0, 0],
        [1, 1, 0, 0, 1, 0],
        [1, 1, 0, 1, 0, 1],
    ]


@pytest.mark.parametrize("shared", [False, True])
def test_sums_and_parents_node_by_node(shared: bool) -> None:
    """Sums along paths leave the root out; values at parents are looked up; in rows of one tree and of their own."""
    trees = [trees_of(24, 5)[0]] * 6 if shared else trees_of(24, 5)
    rows = torch.tensor([tree.parents for tree in trees])
    shape = Shape.from_parents(rows[:1] if shared else rows, 5)
    values = torch.randint(9, (6, 24), generator=torch.Generator().manual_seed(1)).float()
    for tree, row, at_parents, sums in zip(
        trees, values.tolist(), shape.at_parents(values).tolist(), shape.along(values).tolist(), strict=True
    ):
        assert at_parents == [row[parent] for parent in tree.parents]
        assert sums == [sum(row[i] for i in range(1, 24) if tree.ancestors[node, i]) for node in range(24)]


def test_levels_node_by_node() -> None:
    """Every node stands once, with those of its depth, beside its path."""
    trees = trees_of(24, 5)
    shape = Shape.from_parents(torch.tensor([tree.parents for tree in trees]), 5)
    for tree, levels in zip(trees, shape.levels, strict=True):
        assert [node for nodes, _ in levels for node in nodes] == list(range(24))
        for depth, (nodes, paths) in enumerate(levels):
            assert {tree.depths[node] for node in nodes} == {depth}
            assert paths.tolist() == [[i for i in range(24) if tree.ancestors[node, i]] for node in nodes]
