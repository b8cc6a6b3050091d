"""Growth under a budget of path tokens: the tree with the greatest value whose root-to-leaf paths cost at most so much.

Models that take no tree mask verify a tree as its paths in a batch (`treeopt.verify.paths`). Its price is then path
tokens = leaves * (depth + 1), in which the shared part of paths is paid again by each.

For a greatest depth D at most M = budget // (D + 1) leaves are allowed, and the best tree is a union of M paths. Divide
the candidates into chains: a node continues the chain of its parent if it has the greatest sum of values downwards
among its siblings, else it begins one. The M chains with the greatest sums are that tree (docs/develop/method.md).

Candidates are the first nodes of best-first growth. With all nodes the tree is optimal; else its sum is at most
M * D * (the least value of a candidate) below the optimum.
"""

import numpy as np
from numpy.typing import NDArray

from treeopt.optimize.grow import PAD, Growth, grow
from treeopt.optimize.values import Values

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
