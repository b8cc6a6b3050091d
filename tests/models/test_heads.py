"""Heads: the batched products, against one head and one state at a time."""

from __future__ import annotations

import torch
from looped import looped
from torch import Tensor, nn

from treeopt.models.heads import MedusaHeads

HEADS, HIDDEN, VOCAB, STATES = 3, 8, 11, 5


def made(blocks: int, *, own: bool, seed: int = 0) -> MedusaHeads:
    """Random heads of the sizes above."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(blocks, HEADS, HIDDEN, HIDDEN, generator=generator)
    bias = torch.randn(blocks, HEADS, HIDDEN, generator=generator)
    lm_head = torch.randn(HEADS, VOCAB, HIDDEN, generator=generator)
    return MedusaHeads.from_tensors(weight, bias, lm_head if own else None)


def one_head(heads: MedusaHeads, h: int, state: Tensor, lm_head: Tensor) -> Tensor:
    """Logits [V] of head `h` (from 0) for one state [d], as the paper writes it."""
    x = state
    for weight, bias in zip(heads.weight, heads.bias, strict=True):
        inner = weight[h] @ x + bias[h]
        x = x + inner * torch.sigmoid(inner)
    return lm_head @ x


@looped("blocks", [0, 1, 2])
@looped("own", [True, False])
@looped("first", [None, 1, 2])
def test_forward_naive_loop(blocks: int, own: bool, first: int | None) -> None:
    """Every head's logits are those of its own blocks and LM head, or the base's, applied to each state alone."""
    heads, hidden = made(blocks, own=own), torch.randn(STATES, HIDDEN, generator=torch.Generator().manual_seed(9))
    shared = nn.Linear(HIDDEN, VOCAB, bias=False)
    with torch.no_grad():
        logits = heads(hidden, None if own else shared, first)
        assert logits.shape == (first or HEADS, STATES, VOCAB)
        for h in range(first or HEADS):
            lm_head = shared.weight if heads.lm_head is None else heads.lm_head[h]
            naive = torch.stack([one_head(heads, h, state, lm_head) for state in hidden])
            torch.testing.assert_close(logits[h], naive, rtol=1e-5, atol=1e-5)


def test_forward_shared_head_with_bias() -> None:
    """A shared LM head is called as the module it is: its bias counts."""
    heads, hidden = made(1, own=False), torch.randn(STATES, HIDDEN)
    biased = nn.Linear(HIDDEN, VOCAB, bias=True)
    with torch.no_grad():
        without = nn.functional.linear(heads.features(hidden), biased.weight)
        torch.testing.assert_close(heads(hidden, biased), without + biased.bias)


def test_constructor_zero_heads() -> None:
    """Fresh heads have zero blocks and LM heads, so their blocks change nothing and all logits are 0."""
    heads = MedusaHeads(HEADS, 2, HIDDEN, VOCAB)
    hidden = torch.randn(STATES, HIDDEN)
    assert torch.equal(heads.features(hidden), hidden.expand(HEADS, STATES, HIDDEN))
    assert torch.equal(heads(hidden), torch.zeros(HEADS, STATES, VOCAB))
