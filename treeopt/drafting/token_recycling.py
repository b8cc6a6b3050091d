"""Token Recycling (arXiv:2408.08696): a token's successors are those that the model itself last found likely there.

A matrix holds K successors of every token. After each verification the row of every node's token, accepted or not, is
overwritten with the K likeliest tokens of the logits after that node. Nothing is trained.
"""

from __future__ import annotations

import torch
from torch import Tensor

from treeopt.defaults import LEVELS
from treeopt.drafting.interface import AcceptedPart, Drafts, ProposerSession, TokenLists, static_only
from treeopt.models.base import Base
from treeopt.models.logits import top_ids
from treeopt.tree import ROOT
from treeopt.verify.buffers import Buffers, once_a_tree

SUCCESSORS = 8  # K of the paper
NAME = "token recycling"


class TokenRecycling:
    """Token Recycling as a drafter of static trees: a node of rank r gets successor r of its parent's token.

    Logits of the prompt are not recycled, because the prefill computes those of the last token alone. All texts of one
    `TokenRecycling` share its `matrix` int64 [V, K], the successors of each token, the likeliest first, so later texts
    begin with what earlier ones left there. Before a token was verified they are the tokens 0 .. K-1, which differ from
    one another as siblings must.
    """

    window = 0
    rows_at_once = 1

    def __init__(self, base: Base, successors: int = SUCCESSORS, depth: int = LEVELS) -> None:
        self.base = base
        self.num_candidates = min(successors, base.vocab_size)
        self.depth = depth
        self.matrix = torch.arange(self.num_candidates, device=base.device).repeat(base.vocab_size, 1)

    def start(self, texts: TokenLists, depth: int, ends: TokenLists | None = None) -> TokenRecyclingSession:
        if ends is not None:
            raise static_only(NAME, "traced")
        return TokenRecyclingSession(self)

    def store(self, tokens: Tensor, successors: Tensor, accepted: Tensor) -> None:
        """Overwrite rows of the matrix. Of equal tokens an accepted one counts, and of several the last: the deepest.

        (The paper's code takes the last of all nodes, in the order of the device; they differ little:
        docs/develop/benchmarks.md.) Tokens are int64 [n], successors [n, K], accepted [n] is 1 for tokens of the text.
        """
        # A write with equal indices has no defined order, so all of them write the row that counts.
        order = torch.arange(len(tokens), device=tokens.device) + accepted * len(tokens)
        counts = torch.where(tokens[:, None] == tokens, order, -1).argmax(1)
        self.matrix[tokens] = successors[counts]


@once_a_tree
def _levels_of(tree: Buffers) -> list[tuple[Tensor, Tensor]]:
    """For each depth int64 [n], each draft's parent among all nodes, and its rank."""
    sizes = [1, *(len(level.ranks) for level in tree.levels)]
    ranks = torch.from_numpy(tree.ranks).to(tree.position_ids.device)
    return list(zip(torch.split(tree.parents, sizes), torch.split(ranks, sizes), strict=True))[1:]


class TokenRecyclingSession(ProposerSession):
    """Drafting for the rows of a batch; all state is the matrix of the drafter. Nothing is transferred to the host."""

    name = NAME

    def __init__(self, proposer: TokenRecycling) -> None:
        self._proposer = proposer

    def begin(self, roots: Tensor, states: Tensor) -> None:
        """Nothing to do: drafts depend on the tokens alone."""

    def fill(self, roots: Tensor, states: Tensor, tree: Buffers) -> Drafts:
        successors, width = self._proposer.matrix.flatten(), self._proposer.num_candidates
        tokens = roots[:, None]
        for parents, ranks in _levels_of(tree):
            tokens = torch.cat([tokens, successors[tokens.index_select(1, parents) * width + ranks]], dim=1)
        return Drafts(tokens, tree)

    def keep(self, kept: AcceptedPart) -> None:
        tokens, successors = kept.drafts.tokens, top_ids(kept.logits, self._proposer.num_candidates)
        # Beyond the end of a path the root is marked, which is always accepted.
        accepted = torch.zeros_like(tokens).scatter_(1, kept.paths.clamp(min=ROOT), 1)
        self._proposer.store(tokens.flatten(), successors.flatten(0, 1), accepted.flatten())

    def mark(self) -> Tensor:
        return self._proposer.matrix.clone()

    def rewind(self, mark: Tensor) -> None:
        self._proposer.matrix.copy_(mark)
