"""Propose: a token for every node of the tree, from the heads' logits at one position of each row."""

from __future__ import annotations

import torch
from torch import Tensor

from treeopt.models.ranks import top_ids
from treeopt.runtime.buffers import Buffers


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
