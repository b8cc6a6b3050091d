"""Votes of the text so far: which tokens followed where the last tokens of a path stood before."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from treeopt.drafter import CACHE_LENGTHS
from treeopt.drafting.interface import Floats, Ints


@dataclass(frozen=True, eq=False)
class Votes:
    """M votes for the successors of P nodes.

    The estimate of the longest length found, P_last(y), is linear in the votes:

        P_last(y) = rest * P_0(y) + sum of the weights of the votes for y

    Args:
        node: int64 [M], ascending.
        token: int64 [M], the token that is voted for.
        weight: float32 [M].
        rest: float32 [P], the share of the estimate without votes.
        found: int64 [P], number of `CACHE_LENGTHS` that were found.
    """

    node: Ints
    token: Ints
    weight: Floats
    rest: Floats
    found: Ints

    @classmethod
    def of(cls, node: Ints, kind: Ints, token: Ints, nodes: int, prior: np.float32) -> Votes:
        """Weigh votes.

        Args:
            node: int64 [M], ascending, the node of each vote.
            kind: int64 [M], number of `CACHE_LENGTHS` that match at the vote's place, at least 1.
            token: int64 [M], the token that is voted for.
            nodes: P.
            prior: weight of the next shorter length's estimate, in votes.
        """
        lengths = len(CACHE_LENGTHS)
        exactly = np.bincount(node * lengths + (kind - 1), minlength=nodes * lengths).reshape(nodes, lengths)
        places = exactly[:, ::-1].cumsum(1)[:, ::-1].astype(np.float32)  # of at least that length
        total = places + prior
        # share[:, n]: what lengths n and longer leave to shorter ones
        share = np.ones((nodes, lengths + 1), np.float32)
        share[:, :-1] = (prior / total)[:, ::-1].cumprod(1)[:, ::-1]
        # A vote at a place of kind k counts for the first k lengths.
        weights = (share[:, 1:] / total).cumsum(1)
        return cls(node, token, weights[node, kind - 1], share[:, 0], (places > 0).sum(1))

    def log_ratio(self, tokens: Ints, log_prior: Floats) -> Floats:
        """log(P_last / P_0) of tokens [P, C] with log P_0 [P, C]: float32 [P, C]."""
        total = np.zeros(tokens.shape, np.float32)
        if len(self.node):
            votes = (tokens.take(self.node, 0) == self.token[:, None]) * self.weight[:, None]
            first = np.flatnonzero(np.diff(self.node, prepend=-1))
            total[self.node[first]] = np.add.reduceat(votes, first)
        ratio: Floats = np.log(self.rest[:, None] + total * np.exp(-log_prior))
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
