"""The loss of Medusa-1: each head's cross-entropy, weighted 0.8^h (arXiv:2401.10774, section 2.2.1).

The logits of all heads over all positions of a batch (H x P x V) would take most of the memory. torch's chunked
`linear_cross_entropy` computes loss and gradients a few rows at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import LinearCrossEntropyOptions
from torch.nn import functional as F

from treeopt.models.heads import MedusaHeads
from treeopt.models.logits import rows_at_once
from treeopt.models.placement import weight_of
from treeopt.models.ranks import rank_of

IGNORED = -100  # no target; torch's value
LAMBDA = 0.8
TOPS = 5  # accuracies are top-1 .. top-5


def targets(ids: Tensor, answers: Tensor, num_heads: int) -> Tensor:
    """The targets of head h at each position: the token h + 1 positions later, inside one answer.

    Only positions of decoding are trained on: position t counts where token t+1, the root of a step, is part of an
    answer, and head h where token t+1+h is part of the same answer.

    Args:
        ids: int64 [B, T].
        answers: int64 [B, T], the number of the answer that the token is part of; 0 outside of answers.
        num_heads: H.

    Returns:
        int64 [B, T, H]; `IGNORED` where there is no target.
    """
    later_ids = F.pad(ids, (0, num_heads + 1)).unfold(1, num_heads + 2, 1)  # [B, T, H+2]: tokens t .. t+1+H
    later_answers = F.pad(answers, (0, num_heads + 1)).unfold(1, num_heads + 2, 1)
    root = later_answers[..., 1:2]
    inside = (later_answers[..., 2:] == root) & (root > 0)
    return later_ids[..., 2:].masked_fill(~inside, IGNORED)


def head_losses(heads: MedusaHeads, hidden: Tensor, true: Tensor, base_lm_head: nn.Linear) -> Tensor:
    """Mean cross-entropy of each head in nats, with gradients to the heads, and to hidden states that have any.

    Args:
        heads: the heads.
        hidden: [n, d], the base's last hidden states.
        true: int64 [n, H], from `targets`; a head without a target has loss 0.
        base_lm_head: read by heads without LM heads; it gets no gradients.

    Returns:
        [H].
    """
    losses = []
    weights, bias = _lm_heads(heads, base_lm_head)
    for x, weight, target in zip(heads.features(hidden), weights, true.T.contiguous(), strict=True):
        options = LinearCrossEntropyOptions(batch_chunk_size=rows_at_once(len(weight)))
        total = F.linear_cross_entropy(x, weight, target, linear_bias=bias, reduction="sum", options=options)
        losses.append(total / (target != IGNORED).sum().clamp(min=1))
    return torch.stack(losses)


def weighted(losses: Tensor) -> Tensor:
    """Sum over heads of 0.8^h times head h's loss, h from 1."""
    powers = torch.arange(1, len(losses) + 1, device=losses.device)
    return (LAMBDA**powers * losses).sum()


@torch.no_grad()
def hits(heads: MedusaHeads, hidden: Tensor, true: Tensor, base_lm_head: nn.Linear) -> Tensor:
    """Top-1 .. top-5 hits of each head, int64 [H, 5]; arguments as of `head_losses`."""
    counts = []
    weights, bias = _lm_heads(heads, base_lm_head)
    for x, weight, target in zip(heads.features(hidden), weights, true.T, strict=True):
        known = target != IGNORED
        rows = zip(
            x[known].split(rows_at_once(len(weight))), target[known].split(rows_at_once(len(weight))), strict=True
        )
        ranks = torch.cat([rank_of(F.linear(part, weight, bias), ids) for part, ids in rows])
        counts.append(torch.stack([(ranks <= top).sum() for top in range(TOPS)]))
    return torch.stack(counts)


def _lm_heads(heads: MedusaHeads, base_lm_head: nn.Linear) -> tuple[Sequence[Tensor], Tensor | None]:
    """The LM head [V, d] of each head, and the bias [V] of the base's LM head where they share it."""
    if heads.lm_head is not None:
        return heads.lm_head.unbind(0), None  # one unbind: a slice for each head would cost a full gradient each
    like = heads.bias  # float32 heads may have a base in half precision, whose LM head may be on another device
    weight = weight_of(base_lm_head, "weight").detach().to(like.device, like.dtype)
    bias = None if base_lm_head.bias is None else weight_of(base_lm_head, "bias").detach().to(like.device, like.dtype)
    return [weight] * heads.num_heads, bias
