"""The trees of a step's likeliest nodes, as in EAGLE-2 (arXiv:2406.16858), against the text that follows.

The probability of a node's path is that of its parent's path times that of its token, so the N likeliest nodes are a
tree, and the smaller trees of a step are parts of the larger ones.
"""

from __future__ import annotations

import numpy as np

from treeopt.drafting.interface import Expansion, Floats, Ints
from treeopt.policy import STEP_SIZES


def node_ranks(expansion: Expansion, true: Ints) -> Ints:
    """The index of each prefix of a true continuation among the nodes of its row's tree, the likeliest first.

    Args:
        expansion: n nodes for each row.
        true: int64 [B, D], the tokens that followed the root; negative beyond the end of the text.

    Returns:
        int64 [B, D]: 1 .. n; n + 1 where it is not in the tree.
    """
    missing = expansion.tokens.shape[1] + 1
    numbers = np.arange(1, missing)
    places = np.full(true.shape, missing)
    node = np.zeros(len(true), np.int64)
    for level in range(true.shape[1]):
        here = (expansion.parents == node[:, None]) & (expansion.tokens == true[:, level, None])
        node = np.where(here, numbers, missing).min(1, initial=missing)  # no node's parent is the missing one
        places[:, level] = node
    return places


def child_ranks(expansion: Expansion, nodes: Ints, count: int) -> Ints:
    """The index of the candidates of each level after the true tokens among the nodes of their row's tree.

    The children of a node are its best candidates, in their order.

    Args:
        expansion: n nodes for each row.
        nodes: int64 [B, D], `node_ranks` of the true tokens.
        count: R, candidates of each level.

    Returns:
        int64 [B, D, R]: 1 .. n; n + 1 where the candidate is not in the tree.
    """
    missing = expansion.tokens.shape[1] + 1
    found = np.full((*nodes.shape, count), missing)
    parent = np.zeros(len(nodes), np.int64)
    for level in range(nodes.shape[1]):
        row, at = np.nonzero(expansion.parents == parent[:, None])
        rank = np.arange(len(row)) - np.searchsorted(row, row)
        inside = rank < count
        found[row[inside], level, rank[inside]] = at[inside] + 1
        parent = nodes[:, level]
    return found


def expected_tokens(log_probability: Floats) -> Floats:
    """Estimated tokens of a step by the size of its tree: descending [B, n] -> float32 [B, len(STEP_SIZES)]."""
    total = np.cumsum(np.exp(log_probability.astype(np.float64)), axis=1)
    total = np.concatenate([np.zeros((len(total), 1)), total], axis=1)
    return (1 + total[:, [min(size, total.shape[1]) - 1 for size in STEP_SIZES]]).astype(np.float32)
