"""Medusa heads: from one hidden state, logits for each of the next H positions (arXiv:2401.10774, section 2.1.1)."""

from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

UNMAPPED = -1e4  # logit of a token that the heads cannot draft: its probability is 0 in every floating-point type


class MedusaHeads(nn.Module):
    """H Medusa heads: each `blocks` residual SiLU blocks x + SiLU(W x + b) and a linear layer to the vocabulary.

    All heads are computed together in batched matrix products. Head h (1..H) has index h-1. From the hidden state at
    position t (after the base's final norm) it predicts token t+1+h.

    Attributes:
        weight: [blocks, H, d, d], W of each block, applied as x @ W.T.
        bias: [blocks, H, d].
        lm_head: [H, V, d], or None where the heads share the base's LM head; with a token map [H, T, d].
        token_map: int64 [T], the token of each row of `lm_head`; other tokens are never drafted. None: row v is of
            token v.
        mapped_vocab_size: V with a token map, else None.
    """

    token_map: Tensor | None
    residual = True  # whether a block adds to its input

    def __init__(self, num_heads: int, blocks: int, hidden_size: int, vocab_size: int | None) -> None:
        """Heads whose weights are 0; with `vocab_size` None they share the base's LM head."""
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(blocks, num_heads, hidden_size, hidden_size))
        self.bias = nn.Parameter(torch.zeros(blocks, num_heads, hidden_size))
        lm_head = None if vocab_size is None else nn.Parameter(torch.zeros(num_heads, vocab_size, hidden_size))
        self.lm_head: nn.Parameter | None = lm_head
        self.register_buffer("token_map", None)
        self.mapped_vocab_size: int | None = None

    @classmethod
    def from_tensors(
        cls,
        weight: Tensor,
        bias: Tensor,
        lm_head: Tensor | None,
        token_map: Tensor | None = None,
        vocab_size: int | None = None,
    ) -> Self:
        """Heads from existing tensors, with the shapes of the attributes; a token map needs V."""
        blocks, heads, hidden, _ = weight.shape
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        assert bias.shape == (blocks, heads, hidden)
        assert lm_head is None or (lm_head.shape[0], lm_head.shape[2]) == (heads, hidden)
        made.weight, made.bias = nn.Parameter(weight), nn.Parameter(bias)
        made.lm_head = None if lm_head is None else nn.Parameter(lm_head)
        assert (token_map is None) == (vocab_size is None)
        assert token_map is None or (lm_head is not None and token_map.shape == lm_head.shape[1:2])
        made.register_buffer("token_map", token_map)
        made.mapped_vocab_size = vocab_size
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
        if self.lm_head is None or self.token_map is not None:
            return self.mapped_vocab_size
        return self.lm_head.shape[1]

    def features(self, hidden: Tensor, first: int | None = None) -> Tensor:
        """Inputs of the LM heads, for the first `first` heads (None: all): [n, d] -> [H, n, d]."""
        weights, biases = self.weight[:, :first], self.bias[:, :first]
        x = hidden.expand(weights.shape[1], *hidden.shape)
        for weight, bias in zip(weights, biases, strict=True):
            added = F.silu(torch.baddbmm(bias[:, None, :], x, weight.transpose(1, 2)))
            x = x + added if self.residual else added
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
            logits: Tensor = torch.bmm(x, self.lm_head[:first].transpose(1, 2))
            if self.token_map is None:
                return logits
            full = logits.new_full((*logits.shape[:2], self.vocab_size or 0), UNMAPPED)
            return full.index_copy(2, self.token_map, logits)
        assert base_lm_head is not None, "these heads share the base's LM head, which must be given"
        shared: Tensor = base_lm_head(x)
        return shared.to(x.device)  # the LM head may be on another device
