"""The loss of Medusa-1: each head's cross-entropy, weighted 0.8^h (arXiv:2401.10774, section 2.2.1).

The logits of all heads over all positions of a batch would be the largest thing in memory by far (H x P x V). torch's
chunked `linear_cross_entropy` computes loss and gradients a few rows at a time, so they never exist together.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import LinearCrossEntropyOptions
from torch.nn import functional as F

from treeopt.models.heads import MedusaHeads
from treeopt.models.ranks import rank_of

IGNORED = -100  # a target that is none, as torch counts it
LAMBDA = 0.8
TOPS = 5  # accuracies are counted for the first 1 .. 5 guesses
LOGITS_BYTES = 64 * 1024 * 1024  # logits of one head alive at once


def targets(ids: Tensor, answers: Tensor, num_heads: int) -> Tensor:
    """What head h should guess at each position: the token h + 1 places on, inside one answer.

    Only decode states are trained on, as only they are calibrated and decoded: position t counts where token t+1 is
    the model's own (the root of a step), and head h where token t+1+h belongs to that same answer.

    Args:
        ids: int64 [B, T].
        answers: int64 [B, T], 0 outside of answers, else the number of the answer that the token belongs to.
        num_heads: H.

    Returns:
        int64 [B, T, H]; `IGNORED` where there is nothing to guess.
    """
    later_ids = F.pad(ids, (0, num_heads + 1)).unfold(1, num_heads + 2, 1)  # [B, T, H+2]: tokens t .. t+1+H
    later_answers = F.pad(answers, (0, num_heads + 1)).unfold(1, num_heads + 2, 1)
    root = later_answers[..., 1:2]
    wanted = (later_answers[..., 2:] == root) & (root > 0)
    return later_ids[..., 2:].masked_fill(~wanted, IGNORED)


def head_losses(heads: MedusaHeads, hidden: Tensor, true: Tensor, base_lm_head: nn.Linear) -> Tensor:
    """Mean cross-entropy of each head in nats, with gradients to the heads alone.

    Args:
        heads: what is trained.
        hidden: [n, d], the base's last hidden states.
        true: int64 [n, H], as `targets` gives them; a head without a target has loss 0.
        base_lm_head: used, frozen, where the heads have none of their own.

    Returns:
        [H].
    """
    losses = []
    weights, bias = _lm_heads(heads, base_lm_head)
    for x, weight, target in zip(heads.features(hidden), weights, true.T.contiguous(), strict=True):
        options = LinearCrossEntropyOptions(batch_chunk_size=_rows(weight))
        total = F.linear_cross_entropy(x, weight, target, linear_bias=bias, reduction="sum", options=options)
        losses.append(total / (target != IGNORED).sum().clamp(min=1))
    return torch.stack(losses)


def weighted(losses: Tensor) -> Tensor:
    """Sum over heads of 0.8^h times head h's loss, h from 1."""
    powers = torch.arange(1, len(losses) + 1, device=losses.device)
    return (LAMBDA**powers * losses).sum()


@torch.no_grad()
def hits(heads: MedusaHeads, hidden: Tensor, true: Tensor, base_lm_head: nn.Linear) -> Tensor:
    """How often the true token was among each head's first 1, 2, ... 5 guesses: int64 [H, 5]; arguments as above."""
    counts = []
    weights, bias = _lm_heads(heads, base_lm_head)
    for x, weight, target in zip(heads.features(hidden), weights, true.T, strict=True):
        known = target != IGNORED
        rows = zip(x[known].split(_rows(weight)), target[known].split(_rows(weight)), strict=True)
        ranks = torch.cat([rank_of(F.linear(part, weight, bias), ids) for part, ids in rows])
        counts.append(torch.stack([(ranks <= top).sum() for top in range(TOPS)]))
    return torch.stack(counts)


def _lm_heads(heads: MedusaHeads, base_lm_head: nn.Linear) -> tuple[Sequence[Tensor], Tensor | None]:
    """[V, d] of each head, and the bias [V] that they share with the base where they share its LM head."""
    if heads.lm_head is not None:
        return heads.lm_head.unbind(0), None  # taken apart at once: a slice a head would cost a full gradient each
    dtype = heads.bias.dtype  # of float32 heads on a base in half precision
    bias = None if base_lm_head.bias is None else base_lm_head.bias.detach().to(dtype)
    return [base_lm_head.weight.detach().to(dtype)] * heads.num_heads, bias


def _rows(weight: Tensor) -> int:
    """Rows whose logits are alive at once."""
    return max(1, LOGITS_BYTES // (weight.shape[0] * torch.float32.itemsize))
