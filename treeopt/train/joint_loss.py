"""The losses of Medusa-2: of the base's next tokens, and of heads through an LM head that is trained too.

The loss is L_LM + lambda_0 * L_heads (arXiv:2401.10774, section 2.2.2). L_LM is the cross-entropy of the next token, or
in self-distillation the divergence KL(p_original || p) from the base without its adapter (section 2.3.2). Logits of
all rows would take most of the memory, so they are computed a few rows at a time, and again in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from treeopt.models.heads import MedusaHeads
from treeopt.models.logits import rows_at_once
from treeopt.train.loss import IGNORED, head_losses


def next_tokens(ids: Tensor, answers: Tensor) -> Tensor:
    """The next token at each position of decoding: where it is part of an answer.

    Args:
        ids: int64 [B, T].
        answers: int64 [B, T], the number of the answer that the token is part of; 0 outside of answers.

    Returns:
        int64 [B, T]; `IGNORED` at other positions, the last among them.
    """
    later, inside = F.pad(ids, (0, 1))[:, 1:], F.pad(answers, (0, 1))[:, 1:] > 0
    return later.masked_fill(~inside, IGNORED)


def lm_loss(lm_head: nn.Linear, hidden: Tensor, true: Tensor) -> Tensor:
    """Mean cross-entropy of the next token in nats, with gradients to the hidden states and the LM head.

    Args:
        lm_head: from hidden states to logits.
        hidden: [n, d], last hidden states.
        true: int64 [n], from `next_tokens`, without `IGNORED`.

    Returns:
        [].
    """

    def part(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(lm_head(x).float(), y, reduction="sum")

    return _in_parts(part, lm_head, hidden, true) / max(len(true), 1)


def kl_loss(lm_head: nn.Linear, original: nn.Linear, hidden: Tensor, original_hidden: Tensor) -> Tensor:
    """Mean divergence KL(p_original || p) in nats, with gradients to p alone.

    Args:
        lm_head: gives the logits of p.
        original: gives those of p_original.
        hidden: [n, d], last hidden states, for `lm_head`.
        original_hidden: [n, d], last hidden states of the base without adapter, for `original`.

    Returns:
        []; 0 where both give the same logits.
    """

    def part(x: Tensor, z: Tensor) -> Tensor:
        with torch.no_grad():
            known = original(z).float().log_softmax(-1)
        return F.kl_div(lm_head(x).float().log_softmax(-1), known, log_target=True, reduction="sum")

    return _in_parts(part, lm_head, hidden, original_hidden) / max(len(hidden), 1)


def joint_head_losses(heads: MedusaHeads, hidden: Tensor, true: Tensor, lm_head: nn.Linear) -> Tensor:
    """Mean cross-entropy of each head in nats, as `head_losses`, with gradients to hidden states and LM head, too.

    Args:
        heads: the heads; those without LM heads read `lm_head`.
        hidden: [n, d], the base's last hidden states.
        true: int64 [n, H], from `targets`; a head without a target has loss 0.
        lm_head: the base's LM head with its adapter.

    Returns:
        [H].
    """
    if heads.lm_head is not None:
        return head_losses(heads, hidden, true, lm_head)
    losses = []
    for x, target in zip(heads.features(hidden), true.T, strict=True):
        known = target != IGNORED
        losses.append(lm_loss(lm_head, x[known].to(lm_head.weight.dtype), target[known]))
    return torch.stack(losses)


def _in_parts(part: Callable[[Tensor, Tensor], Tensor], lm_head: nn.Linear, one: Tensor, other: Tensor) -> Tensor:
    """The sum of a loss over parts of the rows, each with its logits in memory only while it is computed."""
    size = rows_at_once(len(lm_head.weight))
    parts = zip(torch.split(one, size), torch.split(other, size), strict=True)
    return torch.stack([checkpoint(part, *rows, use_reentrant=False) for rows in parts]).sum()
