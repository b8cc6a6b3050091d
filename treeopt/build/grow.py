"""Growth: the N nodes with the greatest values, which are the best tree of N nodes.

Expected tokens per step is the sum of the nodes' values (the root's is 1). A child's value never exceeds its parent's,
so the N greatest, with ties broken by (depth, path), contain the parents of all their members: they are a tree, and no
tree of N nodes has a greater sum. Nothing is assumed about the order of ranks.

Best-first search with a heap finds them one by one. Here whole levels are expanded at once and cut to the N best: the
same set in the same order, O(N K D) array operations instead of N heap operations (measured in `bench/build.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treeopt.build.trie import Floats
from treeopt.build.values import Values
from treeopt.tree import Path, Tree

_PAD = -1  # beyond the end of a path; sorts before every rank


@dataclass(frozen=True)
class Growth:
    """Nodes in the order in which best-first growth adds them; the first n are the best tree of n + 1 nodes.

    Args:
        paths: int32 [M, D], padded with -1; without the root.
        values: float64 [M], never increasing.
        places: int64 [M], where each node stands in (length, path) order: the record's order without sorting tuples.
    """

    paths: NDArray[np.int32]
    values: Floats
    places: NDArray[np.int64]

    def expected(self) -> Floats:
        """float64 [M+1]: expected tokens per step of the best tree with 1, 2, ... M+1 nodes."""
        return 1.0 + np.concatenate([[0.0], np.cumsum(self.values)])

    def tree(self, nodes: int | None = None) -> Tree:
        """The best tree of at most `nodes` nodes, root counted; of all nodes where None.

        Values carry six significant digits: far more than a calibration can know.
        """
        assert nodes is None or nodes >= 1
        count = len(self.values) if nodes is None else min(nodes - 1, len(self.values))
        order = np.argsort(self.places[:count])
        return Tree(_tuples(self.paths[order]), tuple(map(_six_digits, self.values[order].tolist())))


def grow(values: Values, nodes: int, *, max_depth: int | None = None) -> Growth:
    """The `nodes` - 1 best nodes below the root, fewer where no further node has any value.

    Args:
        values: the estimator; decides depth H and ranks K.
        nodes: the budget, root counted, at least 1.
        max_depth: no path is longer; H where None.
    """
    assert nodes >= 1
    heads, _ = values.shape
    depth = heads if max_depth is None else min(max_depth, heads)
    levels: list[tuple[NDArray[np.int32], Floats]] = []
    paths, scores = np.zeros((1, 0), np.int32), np.ones(1)
    for _ in range(depth):
        paths, scores = _next_level(values, paths, scores, nodes - 1)
        if not len(scores):
            break
        levels.append((paths, scores))
    return _in_order(levels, nodes - 1)


def _next_level(
    values: Values, paths: NDArray[np.int32], scores: Floats, budget: int
) -> tuple[NDArray[np.int32], Floats]:
    """The `budget` best children of nodes of one level, in lexicographic order; children without value are dropped."""
    table = values.children(paths, scores)  # [n, K]
    flat = table.ravel()
    alive = np.flatnonzero(flat > 0.0)
    if len(alive) > budget:
        # A stable sort leaves equal values in lexicographic order of their paths: ties by path.
        best = np.argsort(-flat[alive], kind="stable")[:budget]
        alive = np.sort(alive[best])
    parent, rank = np.divmod(alive, table.shape[1])
    return np.column_stack([paths[parent], rank]).astype(np.int32), flat[alive]


def _in_order(levels: list[tuple[NDArray[np.int32], Floats]], budget: int) -> Growth:
    """All levels as one list, by (value down, depth, path), cut to the budget."""
    if not levels:
        return Growth(np.zeros((0, 0), np.int32), np.zeros(0), np.zeros(0, np.int64))
    deepest = levels[-1][0].shape[1]
    padded = [np.pad(paths, ((0, 0), (0, deepest - paths.shape[1])), constant_values=_PAD) for paths, _ in levels]
    paths = np.concatenate(padded)
    scores = np.concatenate([scores for _, scores in levels])
    # Levels follow each other by depth and are lexicographic inside, so a stable sort by value is enough.
    order = np.argsort(-scores, kind="stable")[:budget]
    return Growth(paths[order], scores[order], order)


def _tuples(paths: NDArray[np.int32]) -> tuple[Path, ...]:
    lengths = np.count_nonzero(paths != _PAD, axis=1).tolist()
    return tuple(tuple(row[:length]) for row, length in zip(paths.tolist(), lengths, strict=True))


def _six_digits(value: float) -> float:
    return float(f"{value:.6g}")
