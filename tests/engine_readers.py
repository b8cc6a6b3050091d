"""Readers of engines, written from docs/develop/formats.md and the engines' algorithms; they import nothing of treeopt.

Each returns the paths of ranks, sorted by (length, path), of the drafts that the engine would verify.
"""

from __future__ import annotations

import ast
import io
import json
from typing import Any

import torch

Paths = list[tuple[int, ...]]
TOPK = 10


def medusa(text: str) -> Paths:
    """Medusa's buffers: sorted choices, ancestors by list.index, and one index into 10 candidates a head."""
    choices = ast.literal_eval(text)
    choices = sorted(choices, key=lambda path: (len(path), path))
    indices = [path[-1] + TOPK * (len(path) - 1) + 1 for path in choices]
    drafted: Paths = []
    for path in choices:
        above = [choices.index(path[: length + 1]) for length in range(len(path) - 1)]  # ValueError if one is missing
        columns = [indices[i] - 1 for i in [*above, choices.index(path)]]
        if any(column // TOPK != depth for depth, column in enumerate(columns)):
            raise ValueError("a rank of the next head")
        drafted.append(tuple(column % TOPK for column in columns))
    assert max(map(len, drafted)) > 0
    return drafted


def nxdi(text: str, speculation_length: int) -> Paths:
    """NxD Inference's medusa_tree: JSON lists, the buffers of Medusa, and as many rows as nodes with the root."""
    choices = json.loads(text)
    assert all(type(path) is list for path in choices)
    assert speculation_length == len(choices) + 1
    return medusa(text)


def hydra(text: str) -> Paths:
    """Hydra's grounded heads: k children of each parent, ranks 0 .. k-1, and of these the first e are expanded.

    k and e are counts of the choices, by parent in sorted order; drafts are laid out head by head.
    """
    choices = [tuple(path) for path in ast.literal_eval(text)]
    parents = {path[:-1] for path in choices}
    nodes: Paths = [()]  # as drafted, that are expanded by the next head
    drafted: Paths = []
    for level in range(1, max(map(len, choices)) + 1):
        following: Paths = []
        prefixes = sorted({path[:-1] for path in choices if len(path) == level})
        if len(prefixes) != len(nodes):
            raise ValueError("as many nodes are expanded as there are parents")
        for prefix, node in zip(prefixes, nodes, strict=True):
            count = sum(path[:-1] == prefix for path in choices)
            expanded = sum((*prefix, rank) in parents for rank in range(count))
            drafted += [(*node, rank) for rank in range(count)]
            following += [(*node, rank) for rank in range(expanded)]
        nodes = following
    return drafted


def nxdi_eagle(text: str) -> Paths:
    """NxD Inference's token tree: children in the order of their ranks, ids level by level, the root 0."""
    children = json.loads(text)
    paths: list[tuple[int, ...]] = [()]
    for node in range(10**6):
        if node == len(paths):
            break
        for rank, child in enumerate(children.get(str(node), [])):
            assert child == str(len(paths)), "ids are not breadth first"
            paths.append((*paths[node], rank))
    assert len(paths) == 1 + sum(map(len, children.values()))
    return paths[1:]


def trtllm_python(text: str) -> Paths:
    """TensorRT-LLM's Python runtime: the ranks of level 1 are taken as arange(k)."""
    choices = sorted(map(tuple, ast.literal_eval(text)), key=lambda path: (len(path), path))
    first = sorted({path[0] for path in choices})
    assert all(path[:-1] in {(), *choices} for path in choices)
    return [(first.index(path[0]), *path[1:]) for path in choices]


def trtllm_cpp(choices: Paths) -> Paths:
    """TensorRT-LLM's C++ runtime: prefixes packed 4 bits a rank into int32; a missing parent is the root."""

    def packed(prefix: tuple[int, ...]) -> int:
        bits = 0
        for rank in prefix:
            bits = (bits << 4 | rank) & 0xFFFFFFFF
        return bits

    ordered = sorted(choices, key=lambda path: (len(path), packed(path[:-1]), path[-1]))
    node_of: dict[tuple[int, int], tuple[int, ...]] = {}
    drafted: Paths = []
    for path in ordered:
        parent = node_of.get((len(path) - 1, packed(path[:-1])), ())
        drafted.append((*parent, path[-1]))
        node_of[len(path), packed(path)] = drafted[-1]
    return sorted(drafted, key=lambda path: (len(path), path))


def triton(text: str) -> Paths:
    """The value of medusa_choices in a config.pbtxt, read by the C++ runtime."""
    assert text[0] == "{"
    assert text[-1] == "}"
    return trtllm_cpp([tuple(int(rank) for rank in part.split(",")) for part in text[1:-1].split("}, {")])


def sequoia(growmap: dict[str, Any]) -> Paths:
    """Sequoia's growmap with lists or tensors; mask, depth, roots and branches are those of the Successors."""
    assert set(growmap) == {"roots", "branches", "Successors", "mask", "depth", "size"}
    mask, depth = (torch.as_tensor(growmap[name]) for name in ("mask", "depth"))
    size = growmap["size"]
    assert mask.dtype == depth.dtype == torch.int64
    assert mask.shape == (size, size)
    paths: dict[int, tuple[int, ...]] = {0: ()}
    lines: dict[int, set[int]] = {0: {0}}
    for level, branches in zip(growmap["roots"], growmap["branches"], strict=True):
        for node, fan_out in zip(level, branches, strict=True):
            successors = growmap["Successors"][node]
            assert len(successors) == fan_out
            for rank, child in enumerate(successors):
                assert child == len(paths)
                paths[child] = (*paths[node], rank)
                lines[child] = lines[node] | {child}
    assert [node for level in growmap["roots"] for node in level] == list(range(size))
    assert set(growmap["branches"][-1]) == {0}
    assert depth.tolist() == [len(paths[node]) for node in range(size)]
    assert mask.tolist() == [[int(column in lines[node]) for column in range(size)] for node in range(size)]
    return [paths[node] for node in range(1, size)]


def sequoia_pt(raw: bytes) -> Paths:
    """A growmap as the program loads it."""
    growmap = torch.load(io.BytesIO(raw), weights_only=True)
    assert isinstance(growmap["mask"], torch.Tensor)
    assert isinstance(growmap["depth"], torch.Tensor)
    return sequoia(growmap)


def eagle(text: str) -> Paths:
    """EAGLE-1: the assignment in choices.py, drafted as its drafter and its candidates index the rows of top-10."""
    [line] = ast.parse(text).body
    assert isinstance(line, ast.Assign)
    assert ast.unparse(line.targets[0]) == "mc_sim_7b_63"
    return eagle_drafts(ast.literal_eval(line.value))


def eagle_drafts(choices: Any) -> Paths:
    """The drafts of EAGLE-1 for a list of paths.

    A row of ten candidates comes from the root, then from each node with children, level by level. The nodes with
    children of a level are numbered by their parents, counting only parents that have such nodes; that number selects
    the row (hidden state and candidates) of the level above.
    """
    ordered = sorted(map(tuple, choices), key=lambda path: (len(path), path))
    assert all(path[:-1] in {(), *ordered} for path in ordered)
    if any(rank >= TOPK for path in ordered for rank in path):
        raise ValueError("a rank of the next row")
    inner = [path for path in ordered if any(other[:-1] == path for other in ordered)]
    depth = max(map(len, ordered))
    levels = [[path for path in inner if len(path) == level] for level in range(1, depth)]
    _ = levels[0]  # IndexError where there is one level
    rows: list[tuple[int, ...]] = [()]  # the path that each row really follows
    above = [()]
    for level in levels:
        made: list[tuple[int, ...]] = []
        number, parent = 0, level[0][:-1]
        for path in level:
            if path[:-1] != parent:
                number, parent = number + 1, path[:-1]
            made.append((*above[number], path[-1]))
        rows += made
        above = made
    row_of = {path: row for row, path in enumerate([(), *inner])}
    return sorted(((*rows[row_of[path[:-1]]], path[-1]) for path in ordered), key=lambda path: (len(path), path))
