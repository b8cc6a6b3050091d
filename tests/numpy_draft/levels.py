"""Nodes level by level, and a session that drafts so: the same calls for all rows and nodes of a level."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treeopt.drafting.interface import NO_CANDIDATE, Bools, Drafts, Floats, Ints
from treeopt.verify.buffers import Buffers


@dataclass(frozen=True, eq=False)
class Nodes:
    """P nodes of one depth.

    Args:
        depth: of the nodes; 0 for roots.
        row: int64 [P], each node's row of the batch.
        state: arrays [P, ...] that the drafter defines, such as the last tokens on the path.
    """

    depth: int
    row: Ints
    state: tuple[NDArray[Any], ...] = ()

    @classmethod
    def joined(cls, parts: Sequence[Nodes], rows: int) -> Nodes:
        """The nodes of all parts of one level, sorted by row; in a part, each of the `rows` rows has as many nodes."""
        if len(parts) == 1:
            return parts[0]

        def join(arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
            by_row = [array.reshape(rows, len(array) // rows, *array.shape[1:]) for array in arrays]
            whole = np.concatenate(by_row, axis=1)
            return whole.reshape(-1, *whole.shape[2:])

        states = zip(*(part.state for part in parts), strict=True)
        return cls(parts[0].depth, join([part.row for part in parts]), tuple(join(arrays) for arrays in states))


@dataclass(frozen=True, eq=False)
class Candidates:
    """C candidates of each of P nodes, best first.

    Args:
        tokens: int64 [P, C], different tokens where the score is finite.
        scores: float32 [P, C], descending; -inf where a node has fewer candidates.
        estimate: the function from the scores to `log_probability`.
    """

    tokens: Ints
    scores: Floats
    estimate: Callable[[Floats], Floats]

    @functools.cached_property
    def log_probability(self) -> Floats:
        """float32 [P, C]: log of the estimated probability that each candidate is the next token."""
        return self.estimate(self.scores)


class LevelSession:
    """The drafting of a batch, level by level."""

    def rank(self, nodes: Nodes, tokens: Ints) -> Ints:
        """The rank of one token, int64 [P], among the candidates of each node; `NO_CANDIDATE` if it is not one."""
        found = self.candidates(nodes)
        hit = (found.tokens == tokens[:, None]) & np.isfinite(found.scores)
        return np.where(hit.any(1), hit.argmax(1), NO_CANDIDATE)

    def fill(self, roots: Tensor, states: Tensor, tree: Buffers) -> Drafts:
        """Begin a step, and fill one tree: a node of rank r gets candidate r of its parent.

        Where a node has fewer candidates than the tree has ranks, its children of larger ranks are void.
        """
        nodes, rows = self.begin(roots, states), len(roots)
        tokens, scores = [], []
        for level in tree.levels:
            found = self.candidates(nodes)
            width = found.tokens.shape[1]
            slots = level.parents * width + np.minimum(level.ranks, width - 1)  # of each row's candidates
            tokens.append(found.tokens.reshape(rows, -1).take(slots, 1))  # [B, n]
            scores.append(found.scores.reshape(rows, -1).take(slots, 1))
            if tree.top_k > width:  # levels may have fewer candidates than others
                scores[-1][:, level.ranks >= width] = -np.inf
            if len(level.inner):
                first = np.arange(rows)[:, None] * (len(nodes.row) // rows)
                parents = (first + level.parents.take(level.inner)).ravel()
                nodes = self.follow(nodes, parents, tokens[-1].take(level.inner, 1).ravel())
        if not tokens:
            return Drafts(roots[:, None], tree)
        drafts = torch.from_numpy(np.concatenate(tokens, axis=1)).to(roots.device)
        void = ~np.isfinite(np.concatenate(scores, axis=1))
        return Drafts(torch.cat([roots[:, None], drafts], dim=1), tree, _with_root(void, roots) if void.any() else None)


def _with_root(void: Bools, roots: Tensor) -> Tensor:
    """bool [B, N] on the roots' device from the drafts' [B, N-1]."""
    return torch.from_numpy(np.pad(void, ((0, 0), (1, 0)))).to(roots.device)
