"""Contiguous siblings: trees in which the children of a node have the ranks 0, 1, .. k-1.

Where no value rises with the rank, best-first growth is contiguous by itself, because ties go to the smaller rank. That
holds for joint values. Measured accuracies may rise: by chance rank 5 hits once and rank 4 never. Then a rank can be
worth including for the sake of the next one, and the trees of different sizes are not nested. So the best tree of each
size is found by dynamic programming.

For independent values the best forest below a node depends on its level alone, up to the node's value as a factor. Let
F_h(m) be the greatest sum of values of at most m nodes below a node above level h, in units of its value, with F = 0
below the last level. With the children 0 .. r the sum is

    G_r(m) = max over j of  G_{r-1}(m - j) + accuracy[h, r] * (1 + F_{h+1}(j - 1)),    G_{-1} = 0

and F_h(m) is the greatest of 0 and G_r(m) over r. Levels that may have gaps have the F of best-first growth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treeopt.errors import Code, TreeoptError
from treeopt.optimize.grow import Growth, grow
from treeopt.optimize.trie import Floats
from treeopt.optimize.values import IndependentValues, Values
from treeopt.tree import Path

MAX_NODES = 2048  # of a tree by dynamic programming, whose time grows with the square of the nodes
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
        TreeoptError: E105 where values rise with the rank and the budget is above `MAX_NODES`.
    """
    growth = grow(values, nodes, max_depth=max_depth)
    if not gaps(growth.tree().paths, levels):
        return growth  # the best of all trees
    assert isinstance(values, IndependentValues), "values of all other estimators do not rise with the rank"
    if nodes > MAX_NODES:
        what = f"a tree of {nodes:,} nodes without gaps is too large; at most {MAX_NODES:,} are searched"
        raise TreeoptError(Code.TREE_NOT_EXPORTABLE, what, at=f"--nodes {nodes}", fix=f"--nodes {MAX_NODES}")
    heads, _ = values.shape
    depth = heads if max_depth is None else min(max_depth, heads)
    return _Search(values.accuracy[:depth], nodes - 1, levels).growth()


@dataclass(frozen=True)
class _Level:
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
        self._levels: list[_Level] = []
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

    def _solve(self, head: int, below: Floats) -> _Level:
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
        return _Level(best, children, taken)

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
