"""Estimated probability that a path is right: the numbers that growth ranks nodes by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class Values(Protocol):
    """What growth asks of an estimator. A child's value must never exceed its parent's."""

    @property
    def shape(self) -> tuple[int, int]:
        """(H, K): the deepest level, and the ranks of each level."""

    def children(self, paths: NDArray[np.int32], values: Floats) -> Floats:
        """Values of all children of nodes of one depth.

        Args:
            paths: int32 [n, depth], the nodes' ranks, in lexicographic order.
            values: float64 [n], the nodes' own values.

        Returns:
            float64 [n, K].
        """


@dataclass(frozen=True)
class IndependentValues:
    """The paper's estimate: heads err independently, so a path's value is the product of its accuracies.

    `accuracy` is float64 [H, K], the share of positions where head h's rank-r guess was right (not cumulative).
    Source: arXiv:2401.10774, section 2.3.3 and appendix C.
    """

    accuracy: Floats

    @property
    def shape(self) -> tuple[int, int]:
        heads, ranks = self.accuracy.shape
        return heads, ranks

    def children(self, paths: NDArray[np.int32], values: Floats) -> Floats:
        return values[:, None] * self.accuracy[paths.shape[1]][None, :]
