"""Refinement: exchange leaves of a tree for other nodes where that takes fewer steps in replay.

Node values are estimates for the positions where steps begin, and every change of the tree changes these positions. So
nodes near the edge of the tree are exchanged one at a time, and the whole tree is replayed after each exchange.
"""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treeopt.calibration import Ranks
from treeopt.optimize.grow import gaps
from treeopt.optimize.replay import accepted_drafts, deepest_nodes, expected_drafts, visits
from treeopt.optimize.trie import Floats
from treeopt.progress import Progress, silent
from treeopt.traces import TargetTraces
from treeopt.tree import Path, Tree

_NEAR = 24  # leaves and frontier nodes that are considered at a time


@dataclass(frozen=True)
class Limits:
    """Limits of a tree.

    Nodes (root counted), ranks K of each head, the length of the longest path, and the number of first levels whose
    siblings have the ranks 0, 1, .. without a gap.
    """

    nodes: int
    top_k: int
    max_depth: int | None = None
    contiguous: int = 0


def refine(
    tree: Tree,
    ranks: Ranks,
    weights: Floats,
    limits: Limits,
    *,
    seconds: float,
    target: TargetTraces | None = None,
    progress: Progress = silent,
) -> Tree:
    """A tree of the same size with fewer weighted steps on these traces, or the same tree.

    Stops where no exchange of a rarely used leaf for a promising frontier node takes fewer steps, or after `seconds`.
    A refined tree has no values, because an exchanged node has none.

    Args:
        tree: the tree to refine.
        ranks: uint8 [P, H].
        weights: float64 [P], the cost of a step that begins at each position.
        limits: of ranks and depth.
        seconds: time limit.
        target: the target's probabilities at these positions. Then trees with more expected tokens per step are sought.
        progress: called with the elapsed time in whole seconds.
    """
    end = time.monotonic() + seconds
    current, cost = tree, _cost(tree, ranks, weights, target)
    while True:
        for better in _exchanges(current, ranks, weights, limits):
            left = end - time.monotonic()
            if left < 0:
                return current
            progress(math.floor(seconds - left) + 1, math.floor(seconds) + 1, f"refining: {cost:.0f} steps")
            found = _cost(better, ranks, weights, target)
            if found < cost:
                current, cost = better, found
                break
        else:
            return current


def _cost(tree: Tree, ranks: Ranks, weights: Floats, target: TargetTraces | None) -> float:
    """Weighted steps; under sampling those that the tokens of the texts take at the expected tokens per step."""
    visited = visits(accepted_drafts(tree, ranks))
    steps = float(weights[visited].sum())
    expected = expected_drafts(tree, ranks, target, visited)
    return steps if expected is None else float(weights.sum() * steps / (steps + weights @ expected))


def _exchanges(tree: Tree, ranks: Ranks, weights: Floats, limits: Limits) -> list[Tree]:
    """Trees with one leaf exchanged, the most promising first, by the weight of the steps that use each node."""
    reached = deepest_nodes(tree, ranks)
    begun = np.flatnonzero(visits(np.array(tree.depths, np.int8)[reached]))
    used = np.bincount(reached[begun], weights=weights[begun], minlength=tree.nodes)
    leaves = sorted((float(used[leaf]), tree.paths[leaf - 1]) for leaf in tree.leaves if leaf)[:_NEAR]
    frontier = _frontier(tree, ranks, weights, reached, begun, limits)[:_NEAR]
    pairs = [
        (gain - loss, new, old)
        for (gain, new), (loss, old) in itertools.product(frontier, leaves)
        if gain > loss * 0.8 and new[:-1] != old  # a leaf cannot be exchanged for its own child
    ]
    pairs.sort(key=lambda pair: (-pair[0], pair[1], pair[2]))
    trees = (Tree.from_paths({*tree.paths, new} - {old}) for _, new, old in pairs[: 2 * _NEAR])
    return [exchanged for exchanged in trees if not gaps(exchanged.paths, limits.contiguous)]


def _frontier(
    tree: Tree, ranks: Ranks, weights: Floats, reached: NDArray[np.int32], begun: NDArray[np.int64], limits: Limits
) -> list[tuple[float, Path]]:
    """Children that are not in the tree, with the weight of the steps that would accept them, the greatest first."""
    depths = np.array(tree.depths)[reached[begun]]
    deepest = min(ranks.shape[1], ranks.shape[1] if limits.max_depth is None else limits.max_depth)
    open_ended = depths < deepest
    rows, depths = begun[open_ended], depths[open_ended]
    following = ranks[rows, depths]
    inside = following < limits.top_k
    keys = reached[rows[inside]].astype(np.int64) * limits.top_k + following[inside]
    gains = np.bincount(keys, weights=weights[rows[inside]], minlength=tree.nodes * limits.top_k)
    best = np.argsort(-gains, kind="stable")[: 4 * _NEAR]
    paths = [(), *tree.paths]
    return [
        (float(gains[key]), (*paths[key // limits.top_k], int(key % limits.top_k))) for key in best if gains[key] > 0
    ]
