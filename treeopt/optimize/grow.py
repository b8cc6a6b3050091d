"""Best-first growth: the N nodes with the greatest values, which are the best tree of N nodes.

Expected tokens per step is the sum of the nodes' values (the root's is 1). A child's value never exceeds its parent's,
so the N greatest, with ties broken by (depth, path), contain the parents of all their members: they are a tree, and no
tree of N nodes has a greater sum. Nothing is assumed about the order of ranks.

Best-first search with a heap adds one node at a time. Here a level is expanded a few hundred nodes at once, the best
first, and nodes below the N-th best value so far are dropped with their descendants. The result is the same set in the
same order, by O(N K D) array operations instead of N heap operations (measured in `bench/build.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treeopt.calibration import Ranks
from treeopt.errors import Code, TreeoptError
from treeopt.optimize.trie import Children, Floats
from treeopt.optimize.values import IndependentValues, Values
from treeopt.tree import Path, Tree

_PAD = -1  # beyond the end of a path; sorts before every rank
_ROOT = -1  # the root as a parent
_FEWEST_AT_ONCE = 64  # nodes expanded in one array operation, at least
_PARTS = 16  # one array operation expands this part of a large budget


@dataclass(frozen=True)
class Growth:
    """Nodes in the order of best-first growth; the first n of them are the best tree of n + 1 nodes.

    Args:
        paths: int32 [M, D], padded with -1; without the root.
        values: float64 [M], never increasing.
        places: int64 [M], keys that sort the nodes by (length, path), the order of the tree record.
        parents: int64 [M], index of each node's parent, which is smaller than the node's; -1 for the root.
    """

    paths: NDArray[np.int32]
    values: Floats
    places: NDArray[np.int64]
    parents: NDArray[np.int64]

    @classmethod
    def of(cls, nodes: Mapping[Path, float]) -> Growth:
        """The growth of a tree's paths, in any order, with their values; no value is above that of its parent."""
        levels: list[_Level] = []
        above: dict[Path, int] = {(): 0}
        for depth in range(1, max(map(len, nodes), default=0) + 1):
            paths = sorted(path for path in nodes if len(path) == depth)
            parents = np.array([above[path[:-1]] for path in paths], np.int64)
            levels.append(_Level(np.array(paths, np.int32), np.array([nodes[path] for path in paths]), parents))
            above = {path: row for row, path in enumerate(paths)}
        return _in_order(levels, len(nodes))

    def expected(self) -> Floats:
        """float64 [M+1]: expected tokens per step of the best tree with 1, 2, ... M+1 nodes."""
        return 1.0 + np.concatenate([[0.0], np.cumsum(self.values)])

    def tree(self, nodes: int | None = None) -> Tree:
        """The best tree of at most `nodes` nodes, root counted; of all nodes where None.

        Values are rounded to six significant digits, far below their statistical error.
        """
        assert nodes is None or nodes >= 1
        count = len(self.values) if nodes is None else min(nodes - 1, len(self.values))
        order = np.argsort(self.places[:count])
        return Tree(_tuples(self.paths[order]), tuple(map(_six_digits, self.values[order].tolist())))

    def makes_the_tree_of(self, other: Growth) -> bool:
        """Whether `tree()` of both is equal; neither is made."""
        if len(self.values) != len(other.values):
            return False
        mine, theirs = np.argsort(self.places), np.argsort(other.places)
        if self.paths.shape != other.paths.shape or not np.array_equal(self.paths[mine], other.paths[theirs]):
            return False
        pairs = zip(self.values[mine].tolist(), other.values[theirs].tolist(), strict=True)
        return all(one == two or _six_digits(one) == _six_digits(two) for one, two in pairs)

    def node_ranks(self, ranks: Ranks) -> NDArray[np.int32]:
        """int32 [P, D]: for each row of ranks and each depth, 1 + the index of the node with these first ranks.

        M + 1 where there is no such node. Parents precede children, so a row never falls, and the tree of n nodes
        accepts as many drafts as the row has entries below n.
        """
        return self.children.along(ranks)

    @functools.cached_property
    def children(self) -> Children:
        """The children of the nodes, which are numbered from 1 in the order of growth."""
        count = len(self.values)
        last = self.paths[np.arange(count), np.count_nonzero(self.paths != _PAD, axis=1) - 1]
        return Children.of(self.parents + 1, last, self.paths.shape[1])

    def accepted(self, ranks: Ranks) -> NDArray[np.int8]:
        """int8 [P]: drafts that the tree of all nodes accepts at each row of ranks."""
        accepted: NDArray[np.int8] = (self.node_ranks(ranks) <= len(self.values)).sum(axis=1, dtype=np.int8)
        return accepted


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
    paths = np.full((sum(len(level.scores) for level in levels), deepest), _PAD, np.int32)
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
    return Growth(paths[:, : _depth(paths)], scores[order], order, index[parents[order]])


def _depth(paths: NDArray[np.int32]) -> int:
    """Length of the longest path."""
    return int(np.count_nonzero((paths != _PAD).any(axis=0)))


def _tuples(paths: NDArray[np.int32]) -> tuple[Path, ...]:
    lengths = np.count_nonzero(paths != _PAD, axis=1).tolist()
    return tuple(tuple(row[:length]) for row, length in zip(paths.tolist(), lengths, strict=True))


def _six_digits(value: float) -> float:
    return float(f"{value:.6g}")


CONTIGUOUS_NODES = 2048  # of a tree by dynamic programming, whose time grows with the square of the nodes
_CELLS = 1 << 20  # sums computed in one array operation


def gaps(paths: Sequence[Path], levels: int) -> list[Path]:
    """The paths of at most `levels` ranks whose sibling of the next smaller rank is missing, in their order.

    For example `(0, 2)` where `(0, 1)` is missing. A path that ends in rank 0 needs no sibling.
    """
    known = set(paths)
    return [path for path in paths if len(path) <= levels and path[-1] and (*path[:-1], path[-1] - 1) not in known]


def grow_contiguous(values: Values, nodes: int, levels: int, *, max_depth: int | None = None) -> Growth:
    """The best tree of at most `nodes` nodes whose siblings on the first `levels` levels are contiguous.

    Its first nodes need not be the best tree of their number, unlike those of `grow`.

    Args:
        values: the estimator. Only independent values may rise with the rank.
        nodes: the budget, root counted, at least 1.
        levels: number of levels, from the first; larger numbers mean all levels.
        max_depth: the length of the longest path; H where None.

    Raises:
        TreeoptError: E105 where values rise with the rank and the budget is above `CONTIGUOUS_NODES`.
    """
    growth = grow(values, nodes, max_depth=max_depth)
    if not gaps(growth.tree().paths, levels):
        return growth  # the best of all trees
    assert isinstance(values, IndependentValues), "values of all other estimators do not rise with the rank"
    if nodes > CONTIGUOUS_NODES:
        what = f"a tree of {nodes:,} nodes without gaps is too large; at most {CONTIGUOUS_NODES:,} are searched"
        raise TreeoptError(Code.TREE_NOT_EXPORTABLE, what, at=f"--nodes {nodes}", fix=f"--nodes {CONTIGUOUS_NODES}")
    heads, _ = values.shape
    depth = heads if max_depth is None else min(max_depth, heads)
    return _Search(values.accuracy[:depth], nodes - 1, levels).growth()


@dataclass(frozen=True)
class _Forests:
    """The solutions of one level: F(m) for m = 0 .. M, and the choices that attain them.

    Args:
        best: float64 [M+1], F.
        children: int32 [M+1], the number of children of the best forest of at most m nodes.
        taken: for each rank int32 [M+1], nodes of the subtree of that child in G_r(m), the child included.
    """

    best: Floats
    children: NDArray[np.int32]
    taken: list[NDArray[np.int32]]


class _Search:
    """The dynamic programme for accuracies float64 [D, K], M drafts, and the first `levels` levels without gaps."""

    def __init__(self, accuracy: Floats, drafts: int, levels: int) -> None:
        self.accuracy = accuracy
        self.drafts = drafts
        self.closed = min(levels, len(accuracy))
        self._levels: list[_Forests] = []
        below = self._open(self.closed)
        for head in reversed(range(self.closed)):
            self._levels.insert(0, self._solve(head, below))
            below = self._levels[0].best

    def growth(self) -> Growth:
        """The best tree."""
        found: dict[Path, float] = {}
        self._collect((), 1.0, self.drafts, found)
        return Growth.of(found)

    def _open(self, head: int) -> Floats:
        """F of the levels that may have gaps, from this one on."""
        best = np.zeros(self.drafts + 1)
        if head < len(self.accuracy):
            sums = grow(IndependentValues(self.accuracy[head:]), self.drafts + 1).expected() - 1.0
            best[: len(sums)] = sums
            best[len(sums) :] = sums[-1]
        return best

    def _solve(self, head: int, below: Floats) -> _Forests:
        """The solutions of a level from the F of the level below."""
        size = self.drafts + 1
        best, children, taken = np.zeros(size), np.zeros(size, np.int32), []
        sums = np.zeros(size)
        for rank, accuracy in enumerate(self.accuracy[head].tolist()):
            if not self.accuracy[head, rank:].any():
                break  # further children bring nothing
            gain = np.concatenate([[-np.inf], accuracy * (1.0 + below[:-1])])  # [M+1], by the nodes of the subtree
            sums, nodes = _combine(sums, gain)
            taken.append(nodes)
            better = sums > best
            best[better], children[better] = sums[better], rank + 1
        return _Forests(best, children, taken)

    def _collect(self, path: Path, value: float, drafts: int, found: dict[Path, float]) -> None:
        """Add the best forest of at most `drafts` nodes below a node to `found`."""
        head = len(path)
        if head == len(self.accuracy):
            return
        if head >= self.closed:
            for below, share in _listed(grow(IndependentValues(self.accuracy[head:]), drafts + 1)):
                found[*path, *below] = value * share
            return
        level = self._levels[head]
        for rank in reversed(range(int(level.children[drafts]))):
            nodes = int(level.taken[rank][drafts])
            child = value * float(self.accuracy[head, rank])
            found[*path, rank] = child
            self._collect((*path, rank), child, nodes - 1, found)
            drafts -= nodes


def _combine(sums: Floats, gain: Floats) -> tuple[Floats, NDArray[np.int32]]:
    """For each m the maximum over j of sums[m - j] + gain[j], and the smallest j that attains it."""
    size = len(sums)
    total, chosen = np.empty(size), np.empty(size, np.int32)
    padded = np.concatenate([np.full(size, -np.inf), sums])
    rows = max(1, _CELLS // size)
    for start in range(0, size, rows):
        at = np.arange(start, min(start + rows, size))
        table = padded[size + at[:, None] - np.arange(size)[None, :]] + gain[None, :]
        chosen[at] = table.argmax(axis=1)
        total[at] = table[np.arange(len(at)), chosen[at]]
    return total, chosen


def _listed(growth: Growth) -> list[tuple[Path, float]]:
    """Paths and values of all nodes, not rounded."""
    paths = [tuple(rank for rank in row if rank >= 0) for row in growth.paths.tolist()]
    return list(zip(paths, growth.values.tolist(), strict=True))
