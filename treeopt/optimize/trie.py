"""The trie of all rank paths in the traces, which counts them under any weights of the positions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treeopt.calibration import NONE, Ranks

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Counts:
    """Weighted counts of one level's paths.

    Args:
        hits: float64 [U], weight of the positions whose ranks begin with each path of this level.
        trials: float64 [U of the level above], weight of the positions with each path of the level above and a token at
            this depth.
    """

    hits: Floats
    trials: Floats


class PathTrie:
    """The paths of ranks below K that occur at P positions; level d (from 0) holds those of length d + 1.

    Memory: 4 bytes for each position and head, and the paths.

    Attributes:
        keys: for each level int64 [U], ascending: (index of the parent in the level above) * K + rank.
        ranks: for each level int64 [U], the last rank of each path.
    """

    def __init__(self, ranks: Ranks, top_k: int) -> None:
        self.top_k = top_k
        self.depth = ranks.shape[1]
        self.keys: list[Ints] = []
        self.ranks: list[Ints] = []
        self._nodes: list[NDArray[np.int32]] = []  # [P] each: index of its path; U where it has none
        self._ranks = ranks
        alive = np.arange(len(ranks))
        parent: Ints = np.zeros(len(ranks), np.int64)
        for level in range(self.depth):
            column = ranks[alive, level]
            inside = column < top_k
            alive = alive[inside]
            keys, parent = np.unique(parent[inside] * top_k + column[inside], return_inverse=True)
            node = np.full(len(ranks), len(keys), np.int32)
            node[alive] = parent
            self.keys.append(keys)
            self.ranks.append(keys % top_k)
            self._nodes.append(node)

    def count(self, weights: Floats) -> list[Counts]:
        """Counts of every level under weights (float64 [P]) of the positions."""
        counts = []
        above: NDArray[np.int32] = np.zeros(len(weights), np.int32)
        size = 1
        for level in range(self.depth):
            present = np.where(self._ranks[:, level] == NONE, 0.0, weights)
            trials = np.bincount(above, weights=present, minlength=size + 1)[:size]
            above, size = self._nodes[level], len(self.keys[level])
            hits = np.bincount(above, weights=weights, minlength=size + 1)[:size]
            counts.append(Counts(hits.astype(np.float64), trials.astype(np.float64)))
        return counts

    def find(self, paths: NDArray[np.int32]) -> Ints:
        """int64 [n]: the index of each path (int32 [n, length]) in its level; -1 where it does not occur."""
        index = np.zeros(len(paths), np.int64)
        for level in range(paths.shape[1]):
            index = self.child(level, index, paths[:, level])
        return index

    def child(self, level: int, parents: Ints, ranks: NDArray[np.integer]) -> Ints:
        """Index in `level` of the children of these rank (broadcast with the parents); -1 where there is none."""
        keys = self.keys[level]
        if not len(keys):
            return np.full(np.broadcast(parents, ranks).shape, -1, np.int64)
        sought = parents * self.top_k + ranks
        at = np.minimum(np.searchsorted(keys, sought), len(keys) - 1)
        return np.where(keys[at] == sought, at, -1)  # a parent of -1 gives a key below 0
