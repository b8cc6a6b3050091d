"""The trie of all rank paths in the traces, which counts them under any weights of the positions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treeopt.traces import NONE, Ranks, TargetTraces

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Counts:
    """Weighted counts of one level's paths."""

    # float64 [U], weight of the positions whose ranks begin with each path of this level. Where the target's
    # probabilities are known, float64 [U of the level above, K], the weight that they expect of each next rank
    hits: Floats
    trials: Floats  # float64 [U of the level above], weight of the positions with that path and a token at this depth

    def of_children(self, parents: Ints, children: Ints) -> Floats:
        """Hits [n, K] of the children (int64 [n, K]) of paths of the level above (int64 [n]); -1 does not occur."""
        if not len(self.hits):
            return np.zeros(children.shape)
        if self.hits.ndim == 2:
            return np.where(parents[:, None] >= 0, self.hits[parents], 0.0)
        return np.where(children >= 0, self.hits[children], 0.0)


class PathTrie:
    """The paths of ranks below K that occur at P positions; level d (from 0) holds those of length d + 1.

    Memory: 4 bytes for each position and head, and the paths. With the target's probabilities at these positions hits
    are sums of probabilities, which have the same mean and a smaller variance.
    """

    def __init__(self, ranks: Ranks, top_k: int, target: TargetTraces | None = None) -> None:
        self.top_k = top_k
        self._target = target
        self.depth = ranks.shape[1]
        self.keys: list[Ints] = []  # of each level [U], ascending: (index of the parent in the level above) * K + rank
        self.ranks: list[Ints] = []  # of each level [U], the last rank of each path
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
            parents, parent_count = above, size
            above, size = self._nodes[level], len(self.keys[level])
            hits = np.bincount(above, weights=weights, minlength=size + 1)[:size].astype(np.float64)
            if (target := self._target) is not None:
                from scipy.sparse import csr_array  # takes a tenth of a second

                counted, traced = self.ranks[level] >= target.ranks, min(target.ranks, self.top_k)
                expected = np.zeros((parent_count, self.top_k))  # hits of ranks that were not traced are counted
                expected[self.keys[level][counted] // self.top_k, self.ranks[level][counted]] = hits[counted]
                probability = target.probability[:, level, :traced].astype(np.float64)
                sums = csr_array((weights, (parents, np.arange(len(weights)))), shape=(parent_count + 1, len(weights)))
                expected[:, :traced] = (sums @ probability)[:parent_count]
                hits = expected
            counts.append(Counts(hits, trials.astype(np.float64)))
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


_CHUNK = 1 << 16  # positions walked at once, so that the arrays fit into the processor's cache


@dataclass(frozen=True, eq=False)
class Children:
    """The children of M nodes and of the root, which is node 0; parents precede their children.

    The table is [M+2, W+1]: the child of a node by rank, or M + 1 where there is none. Row M + 1 is of no node, and the
    last column of all larger ranks; both are M + 1.
    """

    table: NDArray[np.int32]
    depth: int  # of the deepest node

    @classmethod
    def of(cls, parents: NDArray[np.integer], ranks: NDArray[np.integer], depth: int) -> Children:
        """The table of nodes 1 .. M with these parents [M] and last ranks [M]."""
        count, width = len(parents), int(ranks.max(initial=-1)) + 1
        table = np.full((count + 2, width + 1), count + 1, np.int32)
        table[parents, ranks] = np.arange(1, count + 1)
        return cls(table, depth)

    @property
    def count(self) -> int:
        """M."""
        return len(self.table) - 2

    def accepted(self, ranks: Ranks) -> NDArray[np.int8]:
        """int8 [P]: length of the longest prefix of each row of ranks that is a path of the tree."""
        accepted: NDArray[np.int8] = (self.along(ranks) <= self.count).sum(axis=1, dtype=np.int8)
        return accepted

    def along(self, ranks: Ranks) -> NDArray[np.int32]:
        """int32 [P, D]: for each row of ranks and each depth the node with these first ranks; M + 1 where none has.

        Parents precede children, so a row never falls, and the tree of nodes 0 .. n accepts as many drafts as the row
        has entries up to n.
        """
        width = self.table.shape[1] - 1
        found = np.empty((self.depth, len(ranks)), np.int32)
        for start in range(0, len(ranks), _CHUNK):
            chunk = ranks[start : start + _CHUNK]
            node = np.zeros(len(chunk), np.int32)
            for level in range(self.depth):
                node = self.table[node, np.minimum(chunk[:, level], width)]
                found[level, start : start + _CHUNK] = node
        return found.T

    def expected_drafts(self, nodes: NDArray[np.int32], ranks: Ranks, target: TargetTraces, last: int) -> Floats:
        """float64 [n]: the target's expected number of accepted drafts at positions with these `along` nodes [n, D].

        The sum over the tree's nodes, where the parent's path is on the text, of the target's probability of the node's
        token. It has the mean of the number of accepted drafts, given the text before each of them. Candidates whose
        probability was not traced count where they are on the text. Only nodes up to `last` are in the tree.
        """
        width = min(target.ranks, self.table.shape[1] - 1)
        found = np.zeros(len(nodes))
        for start in range(0, len(nodes), _CHUNK):
            part = slice(start, start + _CHUNK)
            parent = np.zeros(len(nodes[part]), np.int32)
            for level in range(self.depth):
                inside = self.table[parent, :width] <= last
                probability = target.probability[part, level, :width]
                found[part] += np.where(inside, probability, 0).sum(axis=1, dtype=np.float64)
                parent = nodes[part, level]
                found[part] += (parent <= last) & (ranks[part, level] >= target.ranks)
        return found
