"""Propose: which tokens are verified at each step, and how they hang together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treeopt.errors import Code, TreeoptError
from treeopt.models.base import Base, check_heads_fit, heads_like
from treeopt.models.heads import MedusaHeads
from treeopt.models.ranks import top_ids
from treeopt.tree import Tree, check_tree_fits
from treeopt.verify.buffers import Buffers, compile_tree
from treeopt.verify.shapes import Shape

NO_TOKEN = -1  # among a row's recent tokens, before the text's begin


@dataclass(frozen=True, eq=False)
class Drafts:
    """What one step verifies.

    Args:
        tokens: int64 [B, N], a token for every node of every row, the root's first; siblings that are not void hold
            different tokens.
        shape: which node hangs on which, N nodes no deeper than the proposer's depth; None is the proposer's tree.
        void: bool [B, N], nodes that hold no draft and must not be accepted; None where there are none.
    """

    tokens: Tensor
    shape: Shape | None = None
    void: Tensor | None = None


class Proposer(Protocol):
    """What a decoder asks of whoever drafts."""

    @property
    def nodes(self) -> int:
        """N of every tree, the root counted."""

    @property
    def depth(self) -> int:
        """The greatest depth of any node of any tree."""

    @property
    def tree(self) -> Tree | None:
        """The tree of all rows and steps; None where each step has its own."""

    @property
    def context(self) -> int:
        """R: how many of the last tokens of each text it looks at, the root counted; 0 where it looks at none."""

    def propose(self, root: Tensor, hidden: Tensor, recent: NDArray[np.int64] | None) -> Drafts:
        """The drafts of one step.

        Args:
            root: int64 [B], the token that was chosen for each row.
            hidden: float [B, d], the states that chose the roots.
            recent: int64 [B, R], the last tokens of each row's prompt and text, the root in the last column,
                `NO_TOKEN` before the begin; None where R is 0.
        """


class PlainProposer:
    """One tree for all steps, filled with the heads' guesses: rank r of head h, whatever its parent's token is.

    Args:
        base: the base model.
        heads: its draft heads; None only with the one-node tree.
        tree: at most as deep as there are heads.

    Raises:
        TreeoptError: E101, E102 where the tree asks for more than the heads give, E212 where the heads do not fit the
            base.
    """

    context = 0

    def __init__(self, base: Base, heads: MedusaHeads | None, tree: Tree) -> None:
        if heads is not None:
            check_heads_fit(base, heads, "given")
            heads = heads_like(base, heads)
        elif tree.depth:
            what = f"no heads were given, and the tree drafts {tree.depth} tokens ahead"
            raise TreeoptError(Code.TREE_TOO_DEEP, what, fix="heads=treeopt.load_heads(...).heads")
        num_heads = heads.num_heads if heads is not None else 0
        check_tree_fits(tree, heads=num_heads, ranks=base.vocab_size, holder="the model")
        self.nodes, self.depth, self.tree = tree.nodes, tree.depth, tree
        self.heads = heads
        self._base = base
        self._buffers = compile_tree(tree, base.device)

    def propose(self, root: Tensor, hidden: Tensor, recent: NDArray[np.int64] | None = None) -> Drafts:
        if not self.depth:
            return Drafts(root[:, None])
        assert self.heads is not None
        logits = self.heads(hidden, self._base.lm_head, self.depth)  # [D, B, V]
        return Drafts(plain_drafts(root, logits, self._buffers))


def plain_drafts(roots: Tensor, logits: Tensor, buffers: Buffers) -> Tensor:
    """Rank r of head h for every node that ends in rank r at depth h.

    Args:
        roots: int64 [B], the token that was chosen for each row.
        logits: float [D, B, V], the first D heads' logits at the positions that chose the roots.
        buffers: the compiled tree of depth D.

    Returns:
        int64 [B, N]: a token for every node, the root's first.
    """
    guesses = top_ids(logits, buffers.top_k).transpose(0, 1)  # [B, D, top_k]
    candidates = torch.cat([roots[:, None], guesses.flatten(1)], dim=1)
    return candidates.index_select(1, buffers.tree_indices)
