"""Per-step trees under a budget of path tokens, leaves * (depth + 1): chosen among the likeliest nodes of each row.

As `treeopt.optimize.grow` for static trees: for each greatest depth the nodes are divided into chains, and the
chains with the greatest sums are the tree. Each budget takes the depth with the greatest sum.
"""

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from treeopt.drafting.interface import Expansion, Floats, Ints, SizeLimits
from treeopt.drafting.kernel.compiled import compiled
from treeopt.drafting.kernel.data import Doubles
from treeopt.drafting.kernel.trees import NO_TOKEN


class PathTrees(NamedTuple):
    """The trees of B rows with n candidates, for S budgets and each greatest depth D up to L."""

    leaf: Ints  # [B, L, n], of each depth the number of the chain that has each node, the best chain first; else n
    depth: Ints  # [B, S], the best greatest depth of each budget
    leaves: Ints  # [B, S], chains in the tree of that depth
    expected: Floats  # [B, S], estimated tokens of a step, the root's included


@compiled
def chain_rows(grown: Expansion, sums: Doubles, first: Ints, heir: Ints) -> None:
    """Divide each row's nodes into chains, for each greatest depth.

    Writes `first` [B, L, n], the first node of each node's chain (-1 for deeper ones), and `sums` [B, L, n], the sum of
    the probabilities of a chain at its first node, else -inf. `heir` [n + 1] is working memory.
    """
    for row in range(sums.shape[0]):
        for deepest in range(1, sums.shape[1] + 1):
            total, chain = sums[row, deepest - 1], first[row, deepest - 1]
            heir[:] = -1
            total[:], chain[:] = -np.inf, -1
            for i in range(grown.drafts[row] - 1, -1, -1):  # children come after their parents
                if grown.depths[row, i] > deepest:
                    continue
                total[i] = math.exp(np.float64(grown.log_probability[row, i]))
                if heir[i + 1] >= 0:
                    total[i] += total[heir[i + 1]]
                parent = grown.parents[row, i]
                if parent and (heir[parent] < 0 or total[i] >= total[heir[parent]]):
                    heir[parent] = i
            for i in range(grown.drafts[row]):
                if grown.depths[row, i] > deepest:
                    continue
                parent = grown.parents[row, i]
                if parent and heir[parent] == i:
                    chain[i], total[i] = chain[parent - 1], -np.inf
                else:
                    chain[i] = i


def path_trees(grown: Expansion, path_tokens: Ints, depth: int) -> PathTrees:
    """The trees of each budget int64 [S] and of at most so many levels; the root alone below 2."""
    shape = len(grown.tokens), depth, grown.tokens.shape[1]
    sums, first = np.empty(shape), np.empty(shape, np.int64)
    chain_rows(grown, sums, first, np.empty(shape[2] + 1, np.int64))
    order = np.argsort(-sums, axis=2, kind="stable")
    number = np.empty_like(first)
    np.put_along_axis(number, order, np.broadcast_to(np.arange(shape[2]), shape), axis=2)
    leaf = np.where(first < 0, shape[2], np.take_along_axis(number, first.clip(0), axis=2))
    falling = np.take_along_axis(sums, order, axis=2)
    totals = np.zeros((*shape[:2], shape[2] + 1))
    np.cumsum(np.where(np.isneginf(falling), 0.0, falling), axis=2, out=totals[:, :, 1:])
    leaves = np.minimum(path_tokens // np.arange(2, depth + 2)[:, None], shape[2])  # [L, S]
    found = totals[:, np.arange(depth)[:, None], leaves]
    best = found.argmax(1)
    return PathTrees(leaf, best + 1, leaves[best, np.arange(len(path_tokens))], (1 + found.max(1)).astype(np.float32))


def accepted_paths(trees: PathTrees, nodes: Ints) -> NDArray[np.int8]:
    """int8 [B, S]: the drafts that each tree accepts, where the nodes of the true path are int64 [B, D], from 1.

    A node of a chain that is chosen has all nodes above it in chains that are chosen.
    """
    beyond = trees.leaf.shape[2]
    along = np.pad(trees.leaf, ((0, 0), (0, 0), (0, 1)), constant_values=beyond)
    place = np.minimum(nodes - 1, beyond)
    chains = np.take_along_axis(along, np.broadcast_to(place[:, None], (*along.shape[:2], place.shape[1])), axis=2)
    chains = np.take_along_axis(chains, trees.depth[:, :, None] - 1, axis=1)  # [B, S, D]
    found: NDArray[np.int8] = (chains < np.minimum(trees.leaves, beyond)[:, :, None]).sum(2).astype(np.int8)
    return found


def cut_to_paths(grown: Expansion, limits: SizeLimits) -> Expansion:
    """For each row the tree of the budget with the most estimated tokens - cost, likeliest nodes first."""
    trees = path_trees(grown, np.array(limits.sizes), limits.depth)
    each = np.arange(len(grown.tokens))
    budget = (trees.expected - np.array(limits.cost or (0.0,))).argmax(1)
    depth, leaves = trees.depth[each, budget], trees.leaves[each, budget]
    kept = trees.leaf[each, depth - 1] < leaves[:, None]
    order, count = np.argsort(~kept, axis=1, kind="stable"), kept.sum(1)
    numbers = np.pad(np.cumsum(kept, axis=1), ((0, 0), (1, 0)))  # of the nodes that are kept, from 1; the root's is 0
    parents = np.take_along_axis(numbers, grown.parents, axis=1)
    absent = np.arange(grown.tokens.shape[1]) >= count[:, None]

    def taken(values: NDArray[Any], padding: float) -> NDArray[Any]:
        return np.where(absent, padding, np.take_along_axis(values, order, axis=1)).astype(values.dtype)

    return Expansion(
        tokens=taken(grown.tokens, NO_TOKEN),
        parents=taken(parents, 0),
        depths=taken(grown.depths, 1),
        log_probability=taken(grown.log_probability, -np.inf),
        drafts=count,
        size=count + 1,
    )
