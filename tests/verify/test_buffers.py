"""Buffers: compiled tensors of a tree, and of trees for each row, against naive builders, and the original layout."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from helpers import random_tree
from looped import looped
from random_trees import compile_parents
from refusals import refusal_of

from treeopt.defaults import MAX_DEPTH
from treeopt.errors import Code
from treeopt.files.tensors import read_arrays, write_arrays
from treeopt.tree import Tree
from treeopt.verify.buffers import BUFFER_NAMES, PAD, SCHEMA, compile_tree, load_buffers, save_buffers

RankPath = tuple[int, ...]
PUBLISHED = (
    "mc_sim_7b_63",
    "vicuna_7b_stage2",
    "vicuna_7b_stage1_ablation",
    "vicuna_7b_stage1",
    "vicuna_13b_stage2",
    "vicuna_13b_stage1",
    "vicuna_33b_stage2",
    "vicuna_33b_stage1",
    "zephyr_stage2",
)


@pytest.fixture(scope="module")
def published(shared: Path) -> dict[str, list[RankPath]]:
    """The nine trees of the original code, in its own order."""
    trees = json.loads((shared / "data" / "published_trees.json").read_text())["trees"]
    return {name: [tuple(path) for path in paths] for name, paths in trees.items()}


def node_paths(paths: Sequence[RankPath]) -> list[RankPath]:
    """The nodes in runtime order: the root's empty path, then all paths by (length, path)."""
    return [(), *sorted(paths, key=lambda path: (len(path), path))]


def naive_mask(nodes: Sequence[RankPath]) -> list[list[bool]]:
    """A row sees the columns whose path begins its own."""
    return [[row[: len(column)] == column for column in nodes] for row in nodes]


def naive_rows(nodes: Sequence[RankPath]) -> list[list[int]]:
    """For each node that no other extends, in order: the nodes from the root to it, padded at the end."""
    leaves = [a for a in nodes if not any(len(b) > len(a) and b[: len(a)] == a for b in nodes)]
    width = max(map(len, nodes)) + 1
    rows = [[nodes.index(leaf[:length]) for length in range(len(leaf) + 1)] for leaf in leaves]
    return [row + [-1] * (width - len(row)) for row in rows]


def naive_indices(nodes: Sequence[RankPath], top_k: int) -> list[int]:
    """Where each node's token stands when the root is followed by `top_k` guesses of each head."""
    return [0 if not path else 1 + (len(path) - 1) * top_k + path[-1] for path in nodes]


def test_compile_tree_worked_example() -> None:
    """The example of the module's docstring, typed by hand."""
    buffers = compile_tree(Tree(((0,), (1,), (0, 0))))
    assert buffers.attention_mask.int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]
    assert buffers.position_ids.tolist() == [0, 1, 1, 2]
    assert buffers.tree_indices.tolist() == [0, 1, 2, 3]
    assert buffers.retrieve_indices.tolist() == [[0, 2, -1], [0, 1, 3]]
    assert buffers.top_k == 2


@looped("seed", range(12))
def test_compile_tree_naive_builder(seed: int) -> None:
    """All tensors of random trees, with gaps among their ranks, are those of the definition."""
    tree = random_tree(seed, nodes=(2, 5, 20, 64)[seed % 4], depth=1 + seed % 6, ranks=40)
    nodes, buffers = node_paths(tree.paths), compile_tree(tree)
    assert buffers.top_k == 1 + max(max(path) for path in tree.paths)
    assert buffers.attention_mask.tolist() == naive_mask(nodes)
    assert buffers.position_ids.tolist() == [len(path) for path in nodes]
    assert buffers.tree_indices.tolist() == naive_indices(nodes, buffers.top_k)
    assert buffers.retrieve_indices.tolist() == naive_rows(nodes)


def test_compile_tree_dtypes(small_tree: Tree) -> None:
    """The mask is bool, all else int64."""
    buffers = compile_tree(small_tree)
    kinds = [getattr(buffers, field.name).dtype for field in dataclasses.fields(buffers)[:4]]
    assert kinds == [torch.bool, torch.int64, torch.int64, torch.int64]


def test_compile_tree_one_node() -> None:
    """The root alone sees itself and is its own leaf."""
    buffers = compile_tree(Tree(()))
    assert buffers.attention_mask.tolist() == [[True]]
    assert buffers.position_ids.tolist() == [0]
    assert buffers.tree_indices.tolist() == [0]
    assert buffers.retrieve_indices.tolist() == [[0]]
    assert buffers.top_k == 0
    assert buffers.as_medusa()["tree_indices"].tolist() == [0]


@looped("name", PUBLISHED)
def test_as_medusa_original_semantics(published: dict[str, list[RankPath]], name: str) -> None:
    """The nine published trees get the names, shapes, values and row order of the original code."""
    nodes = node_paths(published[name])
    medusa = compile_tree(Tree.from_paths(published[name])).as_medusa()
    assert list(medusa) == ["medusa_attn_mask", "tree_indices", "medusa_position_ids", "retrieve_indices"]
    assert medusa["medusa_attn_mask"].shape == (1, 1, 64, 64)
    assert medusa["medusa_attn_mask"].dtype == torch.float32
    assert medusa["medusa_attn_mask"][0, 0].bool().tolist() == naive_mask(nodes)
    assert set(medusa["medusa_attn_mask"].unique().tolist()) == {0.0, 1.0}
    assert medusa["tree_indices"].tolist() == naive_indices(nodes, 10)
    assert medusa["medusa_position_ids"].tolist() == [len(path) for path in nodes]
    assert medusa["retrieve_indices"].tolist() == naive_rows(nodes)[::-1]


@looped("seed", range(4))
def test_as_medusa_narrow_trees(seed: int) -> None:
    """Trees that use fewer ranks than ten are spread to ten guesses a head."""
    tree = random_tree(seed, nodes=20, depth=4, ranks=(3, 5, 7, 10)[seed])
    assert compile_tree(tree).as_medusa()["tree_indices"].tolist() == naive_indices(node_paths(tree.paths), 10)


def test_as_medusa_rank_ten() -> None:
    """Rank 9 is exported; rank 10, which the original would read from the next head, is refused."""
    assert compile_tree(Tree(((9,),))).as_medusa()["tree_indices"].tolist() == [0, 10]
    error = refusal_of(compile_tree(Tree(((10,),))).as_medusa)
    assert error.code is Code.TREE_NOT_EXPORTABLE
    assert "rank 10" in error.what


@looped("nodes", [1, 30])
def test_save_buffers_round_trip(tmp_path: Path, nodes: int) -> None:
    """What is written is read back, dtypes and top_k included, and equal trees give equal bytes."""
    tree = random_tree(7, nodes=nodes, depth=4, ranks=8)
    buffers = compile_tree(tree)
    save_buffers(buffers, tree, tmp_path / "one.safetensors")
    save_buffers(compile_tree(Tree.from_paths(tree.paths[::-1])), tree, tmp_path / "two.safetensors")
    again = load_buffers(tmp_path / "one.safetensors")
    assert again.top_k == buffers.top_k
    for name in BUFFER_NAMES:
        before, after = getattr(buffers, name), getattr(again, name)
        assert before.dtype == after.dtype
        assert torch.equal(before, after)
    assert (tmp_path / "one.safetensors").read_bytes() == (tmp_path / "two.safetensors").read_bytes()


def test_save_buffers_replaced(tmp_path: Path, small_tree: Tree) -> None:
    """Buffers are cheap to make again, so a file of an earlier tree is replaced."""
    file = tmp_path / "buffers.safetensors"
    save_buffers(compile_tree(Tree.chain(3)), Tree.chain(3), file)
    save_buffers(compile_tree(small_tree), small_tree, file)
    assert load_buffers(file).position_ids.tolist() == [0, 1, 1, 2, 2, 3]


def test_load_buffers_other_files(tmp_path: Path, small_tree: Tree) -> None:
    """A missing file, a damaged one, one of another kind, and one without a tensor are told apart from buffers."""
    file = tmp_path / "buffers.safetensors"
    save_buffers(compile_tree(small_tree), small_tree, file)
    (tmp_path / "half.safetensors").write_bytes(file.read_bytes()[:100])
    (tmp_path / "other.safetensors").write_bytes(b"\x02\x00\x00\x00\x00\x00\x00\x00{}")
    arrays, header = read_arrays(file, SCHEMA)
    del arrays["tree_indices"]
    write_arrays(tmp_path / "part.safetensors", arrays, header, overwrite=True)
    names = ("absent", "half", "other", "part")
    codes = [refusal_of(load_buffers, tmp_path / f"{name}.safetensors").code for name in names]
    assert codes == [Code.FILE_MISSING, *[Code.FILE_INVALID] * 3]


@looped("seed", range(4))
def test_levels_spell_the_paths(seed: int) -> None:
    """Each draft of a level follows its parent, one of the inner nodes above, so the levels give all paths in order."""
    tree = random_tree(seed, nodes=(2, 9, 20, 40)[seed], depth=4, ranks=5)
    above: list[tuple[int, ...]] = [()]
    spelt = []
    for level in compile_tree(tree).levels:
        drafts = [(*above[parent], rank) for parent, rank in zip(level.parents, level.ranks, strict=True)]
        above = [drafts[i] for i in level.inner]
        assert above == [path for path in drafts if any(other[:-1] == path for other in tree.paths)]
        spelt += drafts
    assert spelt == list(tree.paths)


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
