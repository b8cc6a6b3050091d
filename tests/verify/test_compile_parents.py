"""Trees compiled for each row of a batch, from parents alone, against the records of the same trees."""

from __future__ import annotations

import torch
from helpers import random_tree
from looped import looped
from random_trees import compile_parents

from treeopt.defaults import MAX_DEPTH
from treeopt.tree import Tree
from treeopt.verify.buffers import PAD, compile_tree

SIZES = [(1, 1), (2, 1), (9, 3), (24, 5), (64, 4)]


def trees_of(nodes: int, depth: int) -> list[Tree]:
    """Six random trees of one size."""
    if nodes == 1:
        return [Tree(())] * 6
    return [random_tree(seed, nodes=nodes, depth=depth, ranks=nodes) for seed in range(6)]


@looped(("nodes", "depth"), SIZES)
@looped("spare", [0, 3])
def test_from_parents_equals_the_records(nodes: int, depth: int, spare: int) -> None:
    """Rows with a tree each have the depths and ancestors of their own records, however deep they might have been."""
    trees = trees_of(nodes, depth)
    compiled = compile_parents(torch.tensor([tree.parents for tree in trees]), depth + spare)
    found = compiled.parents, compiled.position_ids, compiled.attention_mask
    assert [one.dtype for one in found] == [torch.int64, torch.int64, torch.bool]
    assert compiled.parents.tolist() == [list(tree.parents) for tree in trees]
    assert compiled.position_ids.tolist() == [list(tree.depths) for tree in trees]
    assert compiled.attention_mask.tolist() == [tree.ancestors.tolist() for tree in trees]


@looped(("nodes", "depth"), SIZES)
def test_one_tree_is_each_rows(nodes: int, depth: int) -> None:
    """Whatever is derived from one compiled tree equals what is derived from it compiled for a row."""
    for tree in trees_of(nodes, depth):
        one, row = compile_tree(tree), compile_parents(torch.tensor([tree.parents]), tree.depth)
        for name in ("attention_mask", "position_ids", "parents", "paths"):
            assert torch.equal(getattr(one, name), getattr(row, name)[0])
        node = torch.tensor([nodes - 1])
        assert torch.equal(one.paths_to(node), row.paths_to(node))
        assert one.tree() == Tree(tree.paths)


@looped("shared", [False, True])
def test_sums_and_parents_node_by_node(shared: bool) -> None:
    """Sums along paths leave the root out; values at parents are looked up; in one tree and in one for each row."""
    trees = [trees_of(24, 5)[0]] * 6 if shared else trees_of(24, 5)
    compiled = compile_tree(trees[0]) if shared else compile_parents(torch.tensor([tree.parents for tree in trees]), 5)
    values = torch.randint(9, (6, 24), generator=torch.Generator().manual_seed(1)).float()
    rows = values.tolist(), compiled.at_parents(values).tolist(), compiled.along_paths(values).tolist()
    for tree, row, at_parents, sums in zip(trees, *rows, strict=True):
        assert at_parents == [row[parent] for parent in tree.parents]
        assert sums == [sum(row[i] for i in range(1, 24) if tree.ancestors[node, i]) for node in range(24)]


@looped("shared", [False, True])
@looped("share", [0.0, 0.2, 0.6, 1.0])
def test_last_without_a_mark(shared: bool, share: float) -> None:
    """The last node with no marked draft above or at it, node by node; a mark at the root does not count."""
    trees = [trees_of(24, 5)[0]] * 6 if shared else trees_of(24, 5)
    compiled = compile_tree(trees[0]) if shared else compile_parents(torch.tensor([tree.parents for tree in trees]), 5)
    marked = torch.rand(6, 24, generator=torch.Generator().manual_seed(2)) < share
    for tree, row, last in zip(trees, marked.tolist(), compiled.last_without(marked).tolist(), strict=True):
        free = [n for n in range(24) if not any(row[i] for i in range(1, 24) if tree.ancestors[n, i])]
        assert last == max(free)


def test_last_without_a_mark_in_the_largest_tree() -> None:
    """A chain as deep as any tree may be, with every draft marked but the last of the first level."""
    tree = Tree.from_paths([*((0,) * depth for depth in range(1, MAX_DEPTH + 1)), (1,)])
    compiled = compile_tree(tree)
    marked = torch.ones(1, tree.nodes, dtype=torch.bool)
    marked[0, 2] = False
    assert compiled.last_without(marked).tolist() == [2]


def test_paths_node_by_node() -> None:
    """Each node's path is its ancestors in order, padded to the depth."""
    trees = trees_of(24, 5)
    compiled = compile_parents(torch.tensor([tree.parents for tree in trees]), 5)
    for row, tree in enumerate(trees):
        paths = [[i for i in range(24) if tree.ancestors[node, i]] for node in range(24)]
        assert compiled.paths[row].tolist() == [path + [PAD] * (6 - len(path)) for path in paths]


def test_levels_by_depth() -> None:
    """The drafts of each depth with their ranks, and their parents among the inner nodes above."""
    for tree in trees_of(24, 5):
        above = [()]
        for depth, level in enumerate(compile_tree(tree).levels, start=1):
            paths = [path for path in tree.paths if len(path) == depth]
            assert [path[-1] for path in paths] == level.ranks.tolist()
            assert [path[:-1] for path in paths] == [above[parent] for parent in level.parents]
            above = [path for path in paths if any(other[:-1] == path for other in tree.paths)]
            assert above == [paths[inner] for inner in level.inner]
