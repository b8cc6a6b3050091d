"""Stock `generate` on a model that gives NaN: E504, and masked tokens with -inf are no fault."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import tiny_base
from transformers import LogitsProcessorList, SuppressTokensLogitsProcessor

from treeopt.decode.decoder import TreeDecoder
from treeopt.drafter import Drafter
from treeopt.errors import Code, TreeoptError
from treeopt.policy import TreePolicy

IDS = torch.tensor([[9, 10, 11], [12, 13, 14]])
SAMPLED = pytest.mark.parametrize("temperature", [0.0, 1.0])


@SAMPLED
def test_generate_nan(temperature: float) -> None:
    """One NaN in one row, three forwards behind the prompt, is an error, and the model keeps no hook."""
    base, forwards = tiny_base("llama"), []

    def spoil(_model: Any, _inputs: Any, out: Any) -> None:
        forwards.append(out.logits[1, -1])
        if len(forwards) == 4:
            out.logits[1, -1, 7] = float("nan")

    base.model.register_forward_hook(spoil)
    with pytest.raises(TreeoptError, match="the model tiny-llama gives logits that are not finite") as caught:
        base.generate(IDS, torch.ones_like(IDS), 8, temperature=temperature)
    assert caught.value.code is Code.NOT_FINITE
    assert len(base.model._forward_hooks) == 1


def test_prompt_of_nan_is_named_whatever_drafts() -> None:
    """The drafter does not get the token that was not chosen."""
    base = tiny_base("llama")
    drafter = Drafter.untrained(base.vocab_size)
    decoder = TreeDecoder(base, None, TreePolicy(4, 3, drafter.id), drafter=drafter)

    def spoil(_model: Any, _inputs: Any, out: Any) -> None:
        out.logits[-1] = torch.nan

    base.model.register_forward_hook(spoil)
    with pytest.raises(TreeoptError, match="logits that are not finite") as caught:
        decoder.generate([[5, 6], [7, 8, 9]], 8)
    assert (caught.value.code, caught.value.at) == (Code.NOT_FINITE, "prompt 1, after 3 tokens of prompt and text")


@SAMPLED
def test_generate_masked_tokens(temperature: float) -> None:
    """Tokens with -inf, by the model or by a processor, are left out and are no fault."""
    base = tiny_base("llama")

    def mask(_model: Any, _inputs: Any, out: Any) -> None:
        out.logits[..., 20:] = -torch.inf

    base.model.register_forward_hook(mask)
    processors = LogitsProcessorList([SuppressTokensLogitsProcessor(list(range(5)))])
    out = base.generate(IDS, torch.ones_like(IDS), 8, temperature=temperature, logits_processor=processors)
    assert out.shape == (2, 11)
    assert ((out[:, 3:] >= 5) & (out[:, 3:] < 20)).all()
