"""Propose: a token for every node of the tree, from the heads' logits at one position."""

from __future__ import annotations

import torch
from torch import Tensor

from treeopt.models.ranks import top_ids
from treeopt.runtime.buffers import Buffers


def plain_drafts(root: Tensor, logits: Tensor, buffers: Buffers) -> Tensor:
    """Rank r of head h for every node that ends in rank r at depth h.

    Args:
        root: int64 [], the token that the base model chose.
        logits: float [D, V], the first D heads' logits at the position that chose the root.
        buffers: the compiled tree of depth D.

    Returns:
        int64 [N]: a token for every node, the root's first.
    """
    guesses = top_ids(logits, buffers.top_k)  # [D, top_k]
    candidates = torch.cat([root.view(1), guesses.flatten()])
    return candidates[buffers.tree_indices]
