"""Token Recycling (arXiv:2408.08696): a token's successors are those that the model itself last found likely there.

A matrix holds K successors of every token. After each verification the row of every node's token, accepted or not, is
overwritten with the K likeliest tokens of the logits after that node. Nothing is trained.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from treeopt.defaults import LEVELS
from treeopt.drafting.interface import AcceptedPart, Drafts, ProposerSession, static_only
from treeopt.models.base import Base
from treeopt.models.logits import top_ids
from treeopt.tree import ROOT
from treeopt.verify.buffers import Buffers, once_a_tree

SUCCESSORS = 8  # K of the paper
NAME = "token recycling"


class TokenRecycling:
    """Token Recycling as a drafter of static trees: a node of rank r gets successor r of its parent's token.

    Logits of the prompt are not recycled, because the prefill computes those of the last token alone. All texts of one
    `TokenRecycling` share its matrix, so later texts begin with what earlier ones left there.

    Args:
        base: the base model.
        successors: K, at most the size of the vocabulary.
        depth: the number of levels that a tree may have.

    Attributes:
        matrix: int64 [V, K] on the model's device, the successors of each token, the likeliest first. Before a token
            was verified they are the tokens 0 .. K-1, which differ from one another as siblings must.
    """

    window = 0
    rows_at_once = 1

    def __init__(self, base: Base, successors: int = SUCCESSORS, depth: int = LEVELS) -> None:
        self.base = base
        self.num_candidates = min(successors, base.vocab_size)
        self.depth = depth
        self.matrix = torch.arange(self.num_candidates, device=base.device).repeat(base.vocab_size, 1)

    def start(
        self, texts: Sequence[Sequence[int]], depth: int, ends: Sequence[Sequence[int]] | None = None
    ) -> TokenRecyclingSession:
        if ends is not None:
            raise static_only(NAME, "traced")
        return TokenRecyclingSession(self)

    def store(self, tokens: Tensor, successors: Tensor, accepted: Tensor) -> None:
        """Overwrite rows of the matrix. Of equal tokens an accepted one counts, and of several the last: the deepest.

        (The paper's code takes the last of all nodes, in the order of the device; they differ little:
        docs/benchmarks.md.)

        Args:
            tokens: int64 [n].
            successors: int64 [n, K].
            accepted: int64 [n], 1 for tokens that are part of the text, 0 for rejected drafts.
        """
        # A write with equal indices has no defined order, so all of them write the row that counts.
        order = torch.arange(len(tokens), device=tokens.device) + accepted * len(tokens)
        counts = torch.where(tokens[:, None] == tokens, order, -1).argmax(1)
        self.matrix[tokens] = successors[counts]


@once_a_tree
def _levels_of(tree: Buffers) -> list[tuple[Tensor, Tensor]]:
    """For each depth int64 [n], the index of each draft's parent in the depth above, and each draft's rank."""
    inner, found = np.zeros(1, np.int64), []
    for level in tree.levels:
        parents, ranks = (torch.from_numpy(array) for array in (inner[level.parents], level.ranks))
        found.append((parents.to(tree.position_ids.device), ranks.to(tree.position_ids.device)))
        inner = level.inner
    return found


class TokenRecyclingSession(ProposerSession):
    """Drafting for the rows of a batch; all state is the matrix of the drafter. Nothing is transferred to the host."""

    name = NAME

    def __init__(self, proposer: TokenRecycling) -> None:
        self._proposer = proposer

    def begin(self, roots: Tensor, states: Tensor) -> None:
        """Nothing to do: drafts depend on the tokens alone."""

    def fill(self, roots: Tensor, states: Tensor, tree: Buffers) -> Drafts:
        successors, width = self._proposer.matrix.flatten(), self._proposer.num_candidates
        levels = [roots[:, None]]
        for parents, ranks in _levels_of(tree):
            levels.append(successors[levels[-1].index_select(1, parents) * width + ranks])
        return Drafts(torch.cat(levels, dim=1), tree)

    def keep(self, kept: AcceptedPart) -> None:
        tokens, successors = kept.drafts.tokens, top_ids(kept.logits, self._proposer.num_candidates)
        # Beyond the end of a path the root is marked, which is always accepted.
        accepted = torch.zeros_like(tokens).scatter_(1, kept.paths.clamp(min=ROOT), 1)
        self._proposer.store(tokens.flatten(), successors.flatten(0, 1), accepted.flatten())

    def mark(self) -> Tensor:
        return self._proposer.matrix.clone()

    def rewind(self, mark: Tensor) -> None:
        self._proposer.matrix.copy_(mark)
