"""States: E504 names the model that gave what is not a number."""

from __future__ import annotations

import pytest
import torch
from head_ranks import head_ranks
from tiny import random_heads, tiny_base

from treeopt.errors import Code, TreeoptError
from treeopt.texts.encode import Text
from treeopt.texts.hidden_states import hidden_states

TEXT = Text("set:0", [3, 8, 5], [9, 2, 7])


@pytest.mark.parametrize("layer", ["norm", "lm_head"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_base_that_gives_no_numbers_is_blamed(layer: str, value: float) -> None:
    """Where the base's states are no numbers, or one row of the LM head that its heads share, it is the base."""
    base = tiny_base("llama")
    heads = random_heads(base, 2, shared=True)
    with torch.no_grad():
        (base.model.model.norm if layer == "norm" else base.lm_head).weight[5] = value
    with pytest.raises(TreeoptError, match="the base model tiny-llama gives") as caught:
        head_ranks(base, heads, [TEXT], 4)
    assert caught.value.code is Code.NOT_FINITE


def test_heads_with_logits_that_are_not_finite_are_named() -> None:
    """Where the base is sound it is the heads."""
    base = tiny_base("llama")
    heads = random_heads(base, 2)
    assert heads.lm_head is not None
    with torch.no_grad():
        heads.lm_head[1, 5] = float("nan")
    with pytest.raises(TreeoptError, match="the heads' logits") as caught:
        head_ranks(base, heads, [TEXT], 4)
    assert caught.value.code is Code.NOT_FINITE


def test_logits_of_minus_infinity_are_no_fault() -> None:
    """Some models give -inf for tokens that they never write."""
    base = tiny_base("llama")
    forward = base.model.forward

    def masked(*given: object, **more: object) -> object:
        out = forward(*given, **more)
        out.logits[..., 4] = -torch.inf
        return out

    base.model.forward = masked
    (states,) = hidden_states(base, [TEXT])
    assert states.isfinite().all()
