"""The texts before the steps that a profile times.

The time of the model's forward does not depend on the tokens before it, that of drafting does: a drafter that reads the
text takes longer where more of its last tokens occurred before. Random tokens never repeat, and one text of many copies
repeats everywhere, so drafters are timed after the model's own text.
"""

from __future__ import annotations

import torch
from torch import Tensor

from treeopt.decode.decoder import TreeDecoder, advance
from treeopt.decode.rules import Sample
from treeopt.models.base import Base
from treeopt.tree import Tree

_SEED = 0
_MOST_SAMPLES = 8  # texts that are sampled, in one batch
_SAMPLE_TOKENS = 256  # of each; they fill `treeopt.drafter.WINDOW` together
_TEMPERATURE = 0.7  # of text that drafters are learned from


def random_prompts(base: Base, batch: int, context: int) -> Tensor:
    """Random tokens as int64 [B, T], the same at every call."""
    check_memory(base, batch, context)
    return torch.randint(base.vocab_size, (batch, context), generator=_generator()).to(base.device)


def model_texts(base: Base, batch: int, context: int) -> Tensor:
    """Text of the model as int64 [B, T], the same at every call.

    A row is a sequence of sampled texts that ends at the end of one, and each row of up to `_MOST_SAMPLES` ends with
    another one. The samples begin with a random token, after the token that begins a text where the model has one;
    tokens that end a text are tokens like others.
    """
    check_memory(base, batch, context)
    length = min(_SAMPLE_TOKENS, context, base.context - 2)
    if length < 1:
        return random_prompts(base, batch, context)
    count = min(_MOST_SAMPLES, max(batch, -(-context // length)))
    samples = _samples(base, count, length)
    repeats = -(-context // length)
    rows = [torch.cat([samples[(row + 1 + i) % count] for i in range(repeats)])[-context:] for row in range(batch)]
    return torch.stack(rows).to(base.device)


def check_memory(base: Base, batch: int, context: int) -> None:
    """Raise at once where not even the hidden states of these texts fit; texts are made as lists, which takes long."""
    torch.empty(batch, context, base.hidden_size, dtype=base.dtype, device=base.device)


def _samples(base: Base, count: int, length: int) -> Tensor:
    """int64 [count, length], sampled by autoregressive decoding."""
    first = torch.randint(base.vocab_size, (count,), generator=_generator()).tolist()
    begin = base.model.generation_config.bos_token_id
    starts = [[token] if begin is None else [int(begin), token] for token in first]
    rule = Sample(_TEMPERATURE, seed=_SEED)
    decoder = TreeDecoder(base, None, Tree(()), acceptance=rule, probe=False)
    rows = decoder.prefill(starts, length)
    texts: list[list[int]] = [[] for _ in starts]
    for step in advance(decoder, rows, dict.fromkeys(rows.indices, length), frozenset()):
        for row, tokens in step.items():
            texts[row] += tokens
    return torch.tensor(texts)


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(_SEED)
