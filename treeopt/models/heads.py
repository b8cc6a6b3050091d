"""Medusa heads: from one hidden state, logits for each of the next H positions (arXiv:2401.10774, section 2.1.1)."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class MedusaHeads(nn.Module):
    """H heads, each `blocks` residual SiLU blocks x + SiLU(W x + b) and a linear layer to the vocabulary.

    All heads are computed together in batched matrix products. Head h (1..H) has index h-1. From the hidden state at
    position t (after the base's final norm) it predicts token t+1+h.

    Attributes:
        weight: [blocks, H, d, d], W of each block, applied as x @ W.T.
        bias: [blocks, H, d].
        lm_head: [H, V, d], or None where the heads share the base's LM head.
    """

    def __init__(self, num_heads: int, blocks: int, hidden_size: int, vocab_size: int | None) -> None:
        """Heads whose weights are 0; with `vocab_size` None they share the base's LM head."""
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(blocks, num_heads, hidden_size, hidden_size))
        self.bias = nn.Parameter(torch.zeros(blocks, num_heads, hidden_size))
        lm_head = None if vocab_size is None else nn.Parameter(torch.zeros(num_heads, vocab_size, hidden_size))
        self.lm_head: nn.Parameter | None = lm_head

    @classmethod
    def from_tensors(cls, weight: Tensor, bias: Tensor, lm_head: Tensor | None) -> Self:
        """Heads from existing tensors, with the shapes of the attributes."""
        blocks, heads, hidden, _ = weight.shape
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        assert bias.shape == (blocks, heads, hidden)
        assert lm_head is None or (lm_head.shape[0], lm_head.shape[2]) == (heads, hidden)
        made.weight, made.bias = nn.Parameter(weight), nn.Parameter(bias)
        made.lm_head = None if lm_head is None else nn.Parameter(lm_head)
        return made

    @property
    def num_heads(self) -> int:
        """H."""
        return self.weight.shape[1]

    @property
    def hidden_size(self) -> int:
        """d."""
        return self.weight.shape[-1]

    @property
    def vocab_size(self) -> int | None:
        """V, or None where the base's LM head is shared."""
        return None if self.lm_head is None else self.lm_head.shape[1]

    def features(self, hidden: Tensor, first: int | None = None) -> Tensor:
        """Inputs of the LM heads, for the first `first` heads (None: all): [n, d] -> [H, n, d]."""
        weights, biases = self.weight[:, :first], self.bias[:, :first]
        x = hidden.expand(weights.shape[1], *hidden.shape)
        for weight, bias in zip(weights, biases, strict=True):
            x = x + F.silu(torch.baddbmm(bias[:, None, :], x, weight.transpose(1, 2)))
        return x

    def forward(self, hidden: Tensor, base_lm_head: nn.Module | None = None, first: int | None = None) -> Tensor:
        """Logits of the heads.

        Args:
            hidden: [n, d], last hidden states of the base after its final norm.
            base_lm_head: the base's LM head, used where the heads share it.
            first: compute this many heads, from the first; None computes all.

        Returns:
            [H, n, V].
        """
        x = self.features(hidden, first)
        if self.lm_head is not None:
            return torch.bmm(x, self.lm_head[:first].transpose(1, 2))
        assert base_lm_head is not None, "these heads share the base's LM head, which must be given"
        logits: Tensor = base_lm_head(x)
        return logits
