"""Votes of the text so far: which tokens followed where the last tokens of a path stood before."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treeopt.drafter import CACHE_LENGTHS
from treeopt.drafting.interface import Floats, Ints

_LENGTHS = len(CACHE_LENGTHS)


@dataclass(frozen=True, eq=False)
class Votes:
    """M votes for the successors of P nodes.

    The estimate of the longest length found, P_last(y), is linear in the votes:

        P_last(y) = rest * P_0(y) + sum of the weights of the votes for y

    Args:
        node: int64 [M], ascending.
        token: int64 [M], the token that is voted for.
        weight: float64 [M].
        rest: float64 [P], the share of the estimate without votes.
        found: int64 [P], number of `CACHE_LENGTHS` that were found.
    """

    node: Ints
    token: Ints
    weight: NDArray[np.float64]
    rest: NDArray[np.float64]
    found: Ints

    @classmethod
    def of(cls, node: Ints, kind: Ints, token: Ints, nodes: int, prior: float) -> Votes:
        """Weigh votes.

        Args:
            node: int64 [M], ascending, the node of each vote.
            kind: int64 [M], number of `CACHE_LENGTHS` that match at the vote's place, at least 1.
            token: int64 [M], the token that is voted for.
            nodes: P.
            prior: weight of the next shorter length's estimate, in votes.
        """
        if not len(node):
            return cls.none(nodes)
        # Column n of `places`: places where at least the n-th length matches, from the longest to the shortest.
        index = node * _LENGTHS + (_LENGTHS - kind)
        places = np.bincount(index, minlength=nodes * _LENGTHS).reshape(nodes, _LENGTHS).cumsum(1)
        total = places + prior
        left = (prior / total).cumprod(1)  # what this and all longer lengths leave to the shorter ones
        alone = left / prior  # left[n] / prior = left[n - 1] / total[n]
        # A vote counts for all lengths that match at its place: those from its own column to the last.
        weights = alone[:, ::-1].cumsum(1)[:, ::-1]
        found = (places > 0).sum(1)
        return cls(node, token, weights.take(index), left[:, -1], found)

    @classmethod
    def none(cls, nodes: int) -> Votes:
        """No votes for P nodes."""
        nothing = np.zeros(0, np.int64)
        return cls(nothing, nothing, np.zeros(0), np.ones(nodes), np.zeros(nodes, np.int64))

    def log_ratio(self, tokens: Ints, log_prior: Floats) -> Floats:
        """log(P_last / P_0) of tokens [P, C] with log P_0 [P, C]: float32 [P, C]."""
        if not len(self.node):
            return np.zeros(tokens.shape, np.float32)
        vote, place = (tokens.take(self.node, 0) == self.token[:, None]).nonzero()
        index = self.node.take(vote) * tokens.shape[1] + place
        total = np.bincount(index, self.weight.take(vote), tokens.size).reshape(tokens.shape)
        ratio: Floats = np.log(total * np.exp(-log_prior) + self.rest[:, None]).astype(np.float32)
        return ratio

    def likeliest(self, filler: Ints, count: int) -> Ints:
        """The `count` tokens of each node with the largest weights, int64 [P, count]; then its `filler`, int64 [P]."""
        tokens = filler[:, None].repeat(count, 1)
        if len(self.node):
            most = int(self.token.max()) + 1
            pairs, inverse = np.unique(self.node * most + self.token, return_inverse=True)
            weight = np.bincount(inverse, self.weight)
            node, token = pairs // most, pairs % most
            order = np.lexsort((token, -weight, node))
            node, token = node[order], token[order]
            first = np.flatnonzero(np.diff(node, prepend=-1))
            place = np.arange(len(node)) - first.repeat(np.diff(first, append=len(node)))
            kept = place < count
            tokens[node[kept], place[kept]] = token[kept]
        return tokens
