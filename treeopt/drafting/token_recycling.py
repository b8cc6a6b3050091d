"""Token Recycling (arXiv:2408.08696): each token's successors are those that the model itself last found likely there.

A matrix holds K successors of every token. After each verification the row of every node's token is overwritten with
the K likeliest tokens of the logits after that node, whether the node was accepted or not. A node of rank r gets
successor r of its parent's token. The tree is the same at every step. Nothing is trained.

Where a token is at several nodes of a step, an accepted node counts, and of several the last: the deepest. (The code
release takes the last of all nodes, in the order of the device. The two differ little: docs/benchmarks.md.)

All texts of one `TokenRecycling` share its matrix, so later texts begin with what earlier ones left there.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from treeopt.drafter import LEVELS
from treeopt.drafting.interface import (
    AcceptedPart,
    Drafts,
    Expansion,
    Features,
    Floats,
    Ints,
    ProposerSession,
    SizeLimits,
)
from treeopt.errors import Code, TreeoptError
from treeopt.models.base import Base
from treeopt.models.logits import top_ids
from treeopt.tree import ROOT
from treeopt.verify.buffers import Buffers

SUCCESSORS = 8  # K of the paper
NAME = "token recycling"


class TokenRecycling:
    """Token Recycling as a drafter of static trees.

    Logits of the prompt are not recycled, because the prefill computes those of the last token alone.

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
        self._shape: tuple[Buffers, list[tuple[Tensor, Tensor]]] | None = None

    def start(
        self, texts: Sequence[Sequence[int]], depth: int, ends: Sequence[Sequence[int]] | None = None
    ) -> TokenRecyclingSession:
        if ends is not None:
            raise _static_only("traced")
        return TokenRecyclingSession(self)

    def store(self, tokens: Tensor, successors: Tensor, accepted: Tensor) -> None:
        """Overwrite rows of the matrix. Of equal tokens an accepted one counts, and of several the last.

        Args:
            tokens: int64 [n].
            successors: int64 [n, K].
            accepted: int64 [n], 1 for tokens that are part of the text, 0 for rejected drafts.
        """
        # A write with equal indices has no defined order, so all of them write the row that counts.
        order = torch.arange(len(tokens), device=tokens.device) + accepted * len(tokens)
        counts = torch.where(tokens[:, None] == tokens, order, -1).argmax(1)
        self.matrix[tokens] = successors[counts]

    def shape(self, tree: Buffers) -> list[tuple[Tensor, Tensor]]:
        """For each depth int64 [n], the index of each draft's parent in the depth above, and each draft's rank.

        Those of the last tree are stored.
        """
        known = self._shape
        if known is None or known[0] is not tree:
            self._shape = known = tree, _shape_of(tree)
        return known[1]


def _shape_of(tree: Buffers) -> list[tuple[Tensor, Tensor]]:
    inner, found = np.zeros(1, np.int64), []
    for level in tree.levels:
        parents, ranks = (torch.from_numpy(array) for array in (inner[level.parents], level.ranks))
        found.append((parents.to(tree.position_ids.device), ranks.to(tree.position_ids.device)))
        inner = level.inner
    return found


class TokenRecyclingSession(ProposerSession):
    """Drafting for the rows of a batch; all state is the matrix of the drafter. Nothing is transferred to the host."""

    def __init__(self, proposer: TokenRecycling) -> None:
        self._proposer = proposer

    def begin(self, roots: Tensor, states: Tensor) -> None:
        """Nothing to do: drafts depend on the tokens alone."""

    def fill(self, roots: Tensor, states: Tensor, tree: Buffers) -> Drafts:
        successors, width = self._proposer.matrix.flatten(), self._proposer.num_candidates
        levels = [roots[:, None]]
        for parents, ranks in self._proposer.shape(tree):
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

    def grow(self, roots: Tensor, states: Tensor, limits: SizeLimits) -> Drafts:
        raise _static_only("chosen per step")

    def expand(self, nodes: int, depth: int) -> Expansion:
        raise _static_only("chosen per step")

    def trace(self, true: Ints, *, confidence: bool = False) -> tuple[Ints, Floats]:
        raise _static_only("traced")

    def candidates(self, true: Ints, count: int) -> Ints:
        raise _static_only("traced")

    def features(self, true: Ints) -> Features:
        raise _static_only("traced")


def _static_only(done: str) -> TreeoptError:
    """The error of calls that need probabilities, or the state before a position that is not the last one."""
    return TreeoptError(
        Code.DRAFTER_MISMATCH,
        f"trees of {NAME} cannot be {done}",
        why="its successors have ranks and no probabilities, and depend on all steps before",
        fix="a static tree, such as token_recycling of `treeopt list`",
    )
