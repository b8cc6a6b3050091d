"""The loss of Medusa-1: each head's cross-entropy, weighted 0.8^h (arXiv:2401.10774, section 2.2.1).

The logits of all heads over all positions of a batch (H x P x V) would take most of the memory. torch's chunked
`linear_cross_entropy` computes loss and gradients a few rows at a time.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import LinearCrossEntropyOptions
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from treeopt.models.devices import weight_of
from treeopt.models.heads import MedusaHeads
from treeopt.models.logits import rank_of, rows_at_once

IGNORED = -100  # no target; torch's value
LAMBDA = 0.8
TOPS = 5  # accuracies are top-1 .. top-5


def targets(ids: Tensor, answers: Tensor, num_heads: int) -> Tensor:
    """The targets of head h at each position: the token h + 1 positions later, inside one answer; else `IGNORED`.

    Only positions of decoding are trained on: position t counts where token t+1, the root of a step, is part of an
    answer, and head h where token t+1+h is part of the same answer. `ids` int64 [B, T], `answers` int64 [B, T] with the
    number of the answer that a token is part of, 0 outside of answers -> int64 [B, T, H].
    """
    later_ids = F.pad(ids, (0, num_heads + 1)).unfold(1, num_heads + 2, 1)  # [B, T, H+2]: tokens t .. t+1+H
    later_answers = F.pad(answers, (0, num_heads + 1)).unfold(1, num_heads + 2, 1)
    root = later_answers[..., 1:2]
    inside = (later_answers[..., 2:] == root) & (root > 0)
    return later_ids[..., 2:].masked_fill(~inside, IGNORED)


def head_losses(heads: MedusaHeads, hidden: Tensor, true: Tensor, base_lm_head: nn.Linear) -> Tensor:
    """Mean cross-entropy of each head in nats, with gradients to the heads, and to hidden states that have any.

    `hidden` [n, d] are the base's last hidden states, `true` int64 [n, H] is from `targets` -> [H]. A head without a
    target has loss 0. The base's LM head is read by heads without LM heads, and gets no gradients.
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


def next_tokens(ids: Tensor, answers: Tensor) -> Tensor:
    """The next token at each position of decoding, where it is part of an answer; else `IGNORED`: int64 [B, T]."""
    later, inside = F.pad(ids, (0, 1))[:, 1:], F.pad(answers, (0, 1))[:, 1:] > 0
    return later.masked_fill(~inside, IGNORED)


def lm_loss(lm_head: nn.Linear, hidden: Tensor, true: Tensor) -> Tensor:
    """Mean cross-entropy of the next tokens `true` int64 [n] in nats, with gradients to hidden [n, d] and LM head."""

    def part(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(lm_head(x).float(), y, reduction="sum")

    return _in_parts(part, lm_head, hidden, true) / max(len(true), 1)


def kl_loss(lm_head: nn.Linear, original: nn.Linear, hidden: Tensor, original_hidden: Tensor) -> Tensor:
    """Mean divergence KL(p_original || p) in nats, with gradients to p alone.

    The logits of p are of `lm_head` and `hidden` [n, d], those of p_original of the base without adapter.
    """

    def part(x: Tensor, z: Tensor) -> Tensor:
        with torch.no_grad():
            known = original(z).float().log_softmax(-1)
        return F.kl_div(lm_head(x).float().log_softmax(-1), known, log_target=True, reduction="sum")

    return _in_parts(part, lm_head, hidden, original_hidden) / max(len(hidden), 1)


def joint_head_losses(heads: MedusaHeads, hidden: Tensor, true: Tensor, lm_head: nn.Linear) -> Tensor:
    """As `head_losses`, with gradients to hidden states and to the base's LM head with its adapter, too."""
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
