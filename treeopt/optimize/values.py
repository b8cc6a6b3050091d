"""Node values: the estimated probability that a path is right.

An estimator has a shape (H, K), the deepest level and the ranks of each level. Its `children` gives the values, float64
[n, K], of all children of n nodes of one depth, from their ranks, int32 [n, depth], in lexicographic order, and values.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treeopt.optimize.trie import Counts, Floats, PathTrie


def isotonic(values: Floats, weights: Floats | None = None, *, increasing: bool = True) -> Floats:
    """The sequence nearest to values [n] in least squares, under weights [n], that never falls, or never rises."""
    from scipy.optimize import isotonic_regression

    fitted: Floats = isotonic_regression(values, weights=weights, increasing=increasing).x
    return fitted


def falling_rows(table: Floats) -> Floats:
    """Each row of float64 [n, K] replaced by its nearest row that never rises; a row that never rises is unchanged."""
    fitted = table.copy()
    for row in np.flatnonzero((table[:, 1:] > table[:, :-1]).any(axis=1)).tolist():
        fitted[row] = isotonic(table[row], increasing=False)
    return fitted


@dataclass(frozen=True)
class IndependentValues:
    """Medusa's estimate: heads are independent, so a path's value is the product of its accuracies.

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


class JointValues:
    """How often this path was right, with back-off where counts are small.

    A node's value is its parent's times q(r | path), the share of the positions with the parent's ranks whose next rank
    is r. Counts of long paths are small, so q is a posterior mean in up to three stages. Each stage is the prior of the
    next, worth `strength` observations (an eighth of it for the first):
        1. all positions whose earlier ranks are below K (the independent estimate counts all positions);
        2. positions with exactly these earlier ranks;
        3. the same, counted only where steps begin (`visits`), because steps begin preferentially at hard positions.
           Its prior is stage 2, scaled for each rank by the ratio of the visits to all positions in stage 1.
    Finally q is made non-increasing in the rank by isotonic regression, which matters where a few hits decide between
    rank 12 and rank 13.

    Args:
        trie: the paths in the traces.
        uniform: their counts over all positions.
        strength: weight of the prior, in observations.
        visits: counts over positions where steps begin; stage 3 is left out where None.
    """

    def __init__(self, trie: PathTrie, uniform: list[Counts], strength: float, visits: list[Counts] | None = None):
        self._trie = trie
        self._uniform = uniform
        self._visits = visits
        self._strength = strength
        self._broad = [_by_rank(trie, level, counts) for level, counts in enumerate(uniform)]
        self._scale = [
            np.divide(_by_rank(trie, level, counts), broad, out=np.ones_like(broad), where=broad > 0)
            for level, (counts, broad) in enumerate(zip(visits or [], self._broad, strict=False))
        ]

    @property
    def shape(self) -> tuple[int, int]:
        return self._trie.depth, self._trie.top_k

    def children(self, paths: NDArray[np.int32], values: Floats) -> Floats:
        level = paths.shape[1]
        parents = self._trie.find(paths)
        nodes = self._trie.child(level, parents[:, None], np.arange(self._trie.top_k)[None, :])  # [n, K]
        share = _posterior(self._uniform[level], parents, nodes, self._broad[level][None, :], self._strength / 8)
        if self._visits is not None:
            prior = share * self._scale[level][None, :]
            share = _posterior(self._visits[level], parents, nodes, prior, self._strength)
        return values[:, None] * np.minimum(falling_rows(share), 1.0)


Values = IndependentValues | JointValues  # no child is worth more than its parent


def _posterior(
    counts: Counts, parents: NDArray[np.int64], nodes: NDArray[np.int64], prior: Floats, strength: float
) -> Floats:
    """Shares [n, K] of a parent's positions with each next rank, with a prior worth `strength` positions."""
    hits = counts.of_children(parents, nodes)
    trials = np.where(parents >= 0, counts.trials[parents], 0.0)[:, None] if len(counts.trials) else 0.0
    return (hits + strength * prior) / (trials + strength)


def _by_rank(trie: PathTrie, level: int, counts: Counts) -> Floats:
    """float64 [K]: share of the positions with a path in the level above that have each rank at this level."""
    if counts.hits.ndim == 2:
        hits = counts.hits.sum(axis=0)
    else:
        hits = np.bincount(trie.ranks[level], weights=counts.hits, minlength=trie.top_k)
    share: Floats = hits / max(counts.trials.sum(), 1e-300)
    return share
