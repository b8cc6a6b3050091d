"""The children of a tree's nodes by rank: walks of rank traces down the tree, and expected drafts under sampling."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treeopt.traces import Ranks, TargetTraces

_CHUNK = 1 << 16  # positions walked at once, so that the arrays fit into the processor's cache

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Children:
    """The children of M nodes and of the root, which is node 0; parents precede their children.

    Args:
        table: int32 [M+2, W+1]; the child of a node by rank, or M + 1 where there is none. Row M + 1 and the last
            column, for all larger ranks, are M + 1.
        depth: of the deepest node.
    """

    table: NDArray[np.int32]
    depth: int

    @classmethod
    def of(cls, parents: NDArray[np.integer], ranks: NDArray[np.integer], depth: int) -> Children:
        """The table of nodes 1 .. M with these parents [M] and last ranks [M]."""
        count, width = len(parents), int(ranks.max(initial=-1)) + 1
        table = np.full((count + 2, width + 1), count + 1, np.int32)
        table[parents, ranks] = np.arange(1, count + 1)
        return cls(table, depth)

    def along(self, ranks: Ranks) -> NDArray[np.int32]:
        """int32 [P, D]: for each row of ranks and each depth the node with these first ranks; M + 1 where none has."""
        width = self.table.shape[1] - 1
        found = np.empty((self.depth, len(ranks)), np.int32)
        for start in range(0, len(ranks), _CHUNK):
            chunk = ranks[start : start + _CHUNK]
            node = np.zeros(len(chunk), np.int32)
            for level in range(self.depth):
                node = self.table[node, np.minimum(chunk[:, level], width)]
                found[level, start : start + _CHUNK] = node
        return found.T

    def expected_drafts(
        self, nodes: NDArray[np.int32], ranks: Ranks, target: TargetTraces, last: int | None = None
    ) -> Floats:
        """float64 [n]: the target's expected number of accepted drafts at each position.

        The sum over the tree's nodes, where the parent's path is on the text, of the target's probability of the node's
        token. It has the mean of the number of accepted drafts, given the text before each of them. Candidates whose
        probability was not traced count where they are on the text.

        Args:
            nodes: int32 [n, D], `along` of the positions' ranks.
            ranks: uint8 [n, H].
            target: of the same positions.
            last: only nodes up to this one are in the tree; all where None.
        """
        last = len(self.table) - 2 if last is None else last
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
