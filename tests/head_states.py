"""State dictionaries of small Medusa heads."""

from __future__ import annotations

import torch
from torch import Tensor

HEADS, HIDDEN, VOCAB = 3, 4, 7


def make_state(*, blocks: int = 1, own: bool = True, heads: int = HEADS) -> dict[str, Tensor]:
    """A state dictionary in the original layout, every value different from all others."""
    state: dict[str, Tensor] = {}
    for h in range(heads):
        for layer in range(blocks):
            state[f"{h}.{layer}.linear.weight"] = torch.randn(HIDDEN, HIDDEN)
            state[f"{h}.{layer}.linear.bias"] = torch.randn(HIDDEN)
        if own:
            state[f"{h}.{blocks}.weight"] = torch.randn(VOCAB, HIDDEN)
    return state
