"""Growth: best first, the N nodes with the greatest values; and the best tree under a budget of path tokens.

Expected tokens per step is the sum of the nodes' values (the root's is 1). A child's value never exceeds its parent's,
so the N greatest, with ties broken by (depth, path), contain the parents of all their members: they are a tree, and no
tree of N nodes has a greater sum. Nothing is assumed about the order of ranks.

Best-first search with a heap adds one node at a time. Here a level is expanded a few hundred nodes at once, the best
first, and nodes below the N-th best value so far are dropped with their descendants. The result is the same set in the
same order, by O(N K D) array operations instead of N heap operations (measured in `bench/build.py`).

Models that take no tree mask verify a tree as its root-to-leaf paths in a batch (`treeopt.verify.paths`), at the price
of path tokens = leaves * (depth + 1). For a greatest depth D at most M = budget // (D + 1) leaves are allowed, and the
best tree is a union of M paths. Divide the candidates, the first nodes of best-first growth, into chains: a node
continues the chain of its parent if it has the greatest sum of values downwards among its siblings, else it begins one.
The M chains with the greatest sums are that tree (docs/develop/method.md): optimal among all nodes, else its sum is at
most M * D * (the least value of a candidate) below the optimum.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treeopt.optimize.trie import Children, Floats
from treeopt.optimize.values import Values
from treeopt.tree import Tree

PAD = -1  # beyond the end of a path; sorts before every rank
_ROOT = -1  # the root as a parent
_FEWEST_AT_ONCE = 64  # nodes expanded in one array operation, at least
_PARTS = 16  # one array operation expands this part of a large budget


@dataclass(frozen=True)
class Growth:
    """Nodes in the order of best-first growth; the first n of them are the best tree of n + 1 nodes."""

    paths: NDArray[np.int32]  # [M, D], padded with -1; without the root
    values: Floats  # [M], never increasing
    places: NDArray[np.int64]  # [M], keys that sort the nodes as the tree record: by (length, path)
    parents: NDArray[np.int64]  # [M], index of each node's parent, a smaller one; -1 for the root

    def tree(self, nodes: int | None = None) -> Tree:
        """The best tree of at most `nodes` nodes, root counted; of all nodes where None.

        Values are rounded to six significant digits, far below their statistical error.
        """
        assert nodes is None or nodes >= 1
        count = len(self.values) if nodes is None else min(nodes - 1, len(self.values))
        order = np.argsort(self.places[:count])
        paths = (tuple(rank for rank in row if rank != PAD) for row in self.paths[order].tolist())
        return Tree(tuple(paths), tuple(map(_six_digits, self.values[order].tolist())))

    def makes_the_tree_of(self, other: Growth) -> bool:
        """Whether `tree()` of both is equal; neither is made."""
        if len(self.values) != len(other.values):
            return False
        mine, theirs = np.argsort(self.places), np.argsort(other.places)
        if self.paths.shape != other.paths.shape or not np.array_equal(self.paths[mine], other.paths[theirs]):
            return False
        pairs = zip(self.values[mine].tolist(), other.values[theirs].tolist(), strict=True)
        return all(one == two or _six_digits(one) == _six_digits(two) for one, two in pairs)

    @functools.cached_property
    def children(self) -> Children:
        """The children of the nodes, which are numbered from 1 in the order of growth."""
        count = len(self.values)
        last = self.paths[np.arange(count), np.count_nonzero(self.paths != PAD, axis=1) - 1]
        return Children.of(self.parents + 1, last, self.paths.shape[1])


def grow(values: Values, nodes: int, *, max_depth: int | None = None) -> Growth:
    """The `nodes` - 1 best nodes below the root; fewer where no further node has a value above 0.

    Args:
        values: the estimator, whose shape gives H and K.
        nodes: the budget, root counted, at least 1.
        max_depth: the length of the longest path; H where None.
    """
    assert nodes >= 1
    heads, _ = values.shape
    depth = heads if max_depth is None else min(max_depth, heads)
    best = _Best(nodes - 1)
    levels: list[_Level] = []
    paths, scores = np.zeros((1, 0), np.int32), np.ones(1)
    for _ in range(depth):
        level = _next_level(values, paths, scores, best)
        if not len(level.scores):
            break
        levels.append(level)
        paths, scores = level.paths, level.scores
    return _in_order(levels, nodes - 1)


@dataclass(frozen=True)
class _Level:
    """Nodes of one depth in lexicographic order: paths, values, and rows of their parents in the level above."""

    paths: NDArray[np.int32]
    scores: Floats
    parents: NDArray[np.int64]


class _Best:
    """The greatest values found so far, at most as many as the budget."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._values: Floats = np.zeros(0)

    @property
    def least(self) -> float:
        """Nodes below this value are not among the best: infinite for a budget of 0, 0 while there are fewer values.

        A node of exactly this value may be among the best, because ties are broken by depth and path.
        """
        if not self.budget:
            return np.inf
        return 0.0 if len(self._values) < self.budget else float(self._values[0])

    def add(self, found: Floats) -> None:
        """Add values, and keep the greatest."""
        values = np.concatenate([self._values, found])
        if 0 < self.budget <= len(values):
            values = np.partition(values, len(values) - self.budget)[-self.budget :]  # the least is first
        self._values = values


def _next_level(values: Values, paths: NDArray[np.int32], scores: Floats, best: _Best) -> _Level:
    """The children of one level's nodes that can be among the best, in lexicographic order, with values above 0."""
    at_once = max(_FEWEST_AT_ONCE, best.budget // _PARTS)
    order = np.argsort(-scores, kind="stable")
    keys, found = [np.zeros(0, np.int64)], [np.zeros(0)]
    _, ranks = values.shape
    for start in range(0, len(order), at_once):
        if scores[order[start]] < best.least:
            break  # no child has a greater value than its parent
        rows = np.sort(order[start : start + at_once])
        table = values.children(paths[rows], scores[rows])  # [n, K]
        flat = table.ravel()
        alive = np.flatnonzero((flat > 0.0) & (flat >= best.least))
        best.add(flat[alive])
        keys.append(rows[alive // ranks] * ranks + alive % ranks)  # ascending in the paths' order
        found.append(flat[alive])
    key, score = np.concatenate(keys), np.concatenate(found)
    chosen = np.flatnonzero(score >= best.least)
    chosen = chosen[np.argsort(key[chosen])]
    if len(chosen) > best.budget:
        # A stable sort keeps equal values in the order of their paths: ties are broken by path.
        chosen = chosen[np.sort(np.argsort(-score[chosen], kind="stable")[: best.budget])]
    parents, rank = np.divmod(key[chosen], ranks)
    return _Level(np.column_stack([paths[parents], rank]).astype(np.int32), score[chosen], parents)


def _in_order(levels: list[_Level], budget: int) -> Growth:
    """All levels as one list, by (value down, depth, path), cut to the budget."""
    if not levels:
        return Growth(np.zeros((0, 0), np.int32), np.zeros(0), np.zeros(0, np.int64), np.zeros(0, np.int64))
    deepest = len(levels)
    paths = np.full((sum(len(level.scores) for level in levels), deepest), PAD, np.int32)
    parents = np.full(len(paths), _ROOT)
    above = begin = 0  # first rows of the level above and of this one
    for depth, level in enumerate(levels, start=1):
        rows = slice(begin, begin + len(level.scores))
        paths[rows, :depth] = level.paths
        if depth > 1:
            parents[rows] = above + level.parents
        above, begin = begin, rows.stop
    scores = np.concatenate([level.scores for level in levels])
    # Rows are sorted by (depth, path), so a stable sort by value breaks ties by depth and path.
    order = np.argsort(-scores, kind="stable")[:budget]
    index = np.full(len(scores) + 1, _ROOT)  # the last entry is that of the root, -1
    index[order] = np.arange(len(order))
    paths = paths[order]
    deepest = int(np.count_nonzero((paths != PAD).any(axis=0)))
    return Growth(paths[:, :deepest], scores[order], order, index[parents[order]])


def _six_digits(value: float) -> float:
    return float(f"{value:.6g}")


_EACH = 16  # nodes that paths are chosen from, for each path token of the budget


def grow_paths(
    values: Values, path_tokens: int, candidates: int | None = None, *, max_depth: int | None = None
) -> Growth:
    """The nodes of the best tree of at most `path_tokens` path tokens, best first; none below 2.

    Args:
        values: the estimator, whose shape gives H and K.
        path_tokens: the greatest number of leaves * (depth + 1).
        candidates: nodes that are considered, root counted; 16 for each path token where None.
        max_depth: the length of the longest path; H where None.
    """
    grown = grow(values, candidates or _EACH * path_tokens, max_depth=max_depth)
    depths = np.count_nonzero(grown.paths != PAD, axis=1)
    kept = np.zeros(len(depths), np.bool_)
    for deepest in range(1, int(depths.max(initial=0)) + 1):
        found = _best_paths(grown, depths, deepest, path_tokens // (deepest + 1))
        if grown.values[found].sum() > grown.values[kept].sum():
            kept = found
    index = np.cumsum(kept) - 1
    parents = np.where(grown.parents[kept] < 0, grown.parents[kept], index[grown.parents[kept]])
    deepest = int(depths[kept].max(initial=0))
    return Growth(grown.paths[kept, :deepest], grown.values[kept], grown.places[kept], parents)


def _best_paths(grown: Growth, depths: NDArray[np.int64], deepest: int, leaves: int) -> NDArray[np.bool_]:
    """bool [M]: the nodes of the best tree of at most so many leaves and levels."""
    sums = np.where(depths <= deepest, grown.values, 0.0)
    chain = np.arange(len(sums))  # the first node of each node's chain
    heirs = []
    for depth in range(deepest, 1, -1):
        rows = np.flatnonzero(depths == depth)
        order = rows[np.lexsort((rows, -sums[rows], grown.parents[rows]))]
        parents, first = np.unique(grown.parents[order], return_index=True)
        sums[parents] += sums[order[first]]
        heirs.append((order[first], parents))
    for rows, parents in reversed(heirs):
        chain[rows] = chain[parents]
    heads = np.flatnonzero((chain == np.arange(len(sums))) & (depths <= deepest))
    chosen = heads[np.argsort(-sums[heads], kind="stable")[:leaves]]
    return np.isin(chain, chosen) & (depths <= deepest)
