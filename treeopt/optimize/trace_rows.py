"""The traces of some texts of a calibration, and the tokens and steps of trees on each of these texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treeopt.calibration import Calibration
from treeopt.optimize.grow import Growth
from treeopt.optimize.replay import accepted_drafts, expected_drafts, text_sums, visits
from treeopt.optimize.sums import TextSums
from treeopt.traces import Ranks, TargetTraces
from treeopt.tree import Tree


@dataclass(frozen=True, eq=False)
class TraceRows:
    """The traces of S texts.

    Args:
        ranks: uint8 [P, H].
        offsets: int64 [S+1], of the texts among them.
        target: the target's probabilities; None where the texts were not sampled.
    """

    ranks: Ranks
    offsets: NDArray[np.int64]
    target: TargetTraces | None

    @classmethod
    def of(cls, calibration: Calibration, texts: NDArray[np.bool_] | None = None) -> TraceRows:
        """Those of some texts of a calibration (bool [S]); of all where None."""
        ranks, offsets, target = calibration.ranks, calibration.offsets, calibration.target
        if texts is None:
            return cls(ranks, offsets, target)
        lengths = np.diff(offsets)
        chosen = np.flatnonzero(np.repeat(texts, lengths))
        target = None if target is None else target.rows(chosen)
        return cls(ranks[chosen], np.concatenate([[0], np.cumsum(lengths[texts])]), target)

    def sums(self, tree: Tree | Growth) -> TextSums:
        """Tokens and steps of each text with a tree; of a growth, with all of its nodes."""
        if isinstance(tree, Growth):
            return self.sums_by_size(tree, [len(tree.values) + 1])[0]
        visited = visits(accepted_drafts(tree, self.ranks))
        return text_sums(visited, self.offsets, expected_drafts(tree, self.ranks, self.target, visited))

    def sums_by_size(self, growth: Growth, sizes: Sequence[int]) -> list[TextSums]:
        """Tokens and steps of each text with the tree of each size; of all nodes where the growth has fewer."""
        node_ranks, found = growth.node_ranks(self.ranks), []
        most = len(growth.values) + 1  # the node rank of paths off the tree, which a larger size would accept
        for nodes in (min(size, most) for size in sizes):
            visited = visits((node_ranks < nodes).sum(axis=1, dtype=np.int8))
            expected = None
            if self.target is not None:
                rows, expected = np.flatnonzero(visited), np.zeros(len(visited))
                part = node_ranks[rows], self.ranks[rows], self.target.rows(rows)
                expected[rows] = growth.children.expected_drafts(*part, nodes - 1)
            found.append(text_sums(visited, self.offsets, expected))
        return found
