"""States: E504 names the model that gave what is not a number."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from head_ranks import head_ranks
from looped import looped
from naive_draft import random_drafter
from tiny import random_heads, tiny_base
from transformers import ElectraConfig, ElectraForCausalLM, RobertaConfig, RobertaForCausalLM

from treeopt.decode.decoder import TreeDecoder
from treeopt.errors import Code, TreeoptError
from treeopt.models.base import Base
from treeopt.policy import TreePolicy
from treeopt.texts.answers import answer_logits, hidden_states
from treeopt.texts.encode import Text
from treeopt.train.medusa2 import adapted
from treeopt.train.settings import JointSettings
from treeopt.tree import Tree

TEXT = Text("set:0", [3, 8, 5], [9, 2, 7])


@looped("layer", ["norm", "lm_head"])
@looped("value", [float("nan"), float("inf")])
def test_base_that_gives_no_numbers_is_blamed(layer: str, value: float) -> None:
    """Where the base's states are no numbers, or one row of the LM head that its heads share, it is the base."""
    base = tiny_base("llama")
    heads = random_heads(base, 2, shared=True)
    with torch.no_grad():
        (base.model.model.norm if layer == "norm" else base.lm_head).weight[5] = value
    with pytest.raises(TreeoptError, match="the model tiny-llama gives") as caught:
        head_ranks(base, heads, [TEXT], 4)
    assert caught.value.code is Code.NOT_FINITE


def test_heads_with_logits_that_are_not_finite_are_named() -> None:
    """Where the base is sound it is the heads."""
    base = tiny_base("llama")
    heads = random_heads(base, 2)
    assert heads.lm_head is not None
    with torch.no_grad():
        heads.lm_head[1, 5] = float("nan")
    with pytest.raises(TreeoptError, match="head 2 on tiny-llama gives logits") as caught:
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


def test_states_that_the_lm_head_does_not_read_are_refused() -> None:
    """Electra projects its states to another width before the LM head: no choice is computed from them."""
    config = ElectraConfig(
        vocab_size=61, embedding_size=24, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=64, is_decoder=True, pad_token_id=0,
    )  # fmt: skip
    base = Base(ElectraForCausalLM(config).eval(), None, "electra")
    with pytest.raises(TreeoptError, match=r"hidden states \(width 16\) and its LM head \(24\)") as caught:
        hidden_states(base, [TEXT])
    assert caught.value.code is Code.NO_TREES
    learned = random_drafter(np.random.default_rng(0), 61, "lm head", 8)[1]
    for heads, drafter in ((random_heads(base, 2), None), (None, learned)):
        plan = Tree.chain(1) if drafter is None else TreePolicy(3, 1, drafter.id)
        decoder = TreeDecoder(base, heads, plan, drafter=drafter)
        with pytest.raises(TreeoptError, match="hidden states"):
            decoder.generate([3, 8, 5], 4)
    with pytest.raises(TreeoptError, match="a layer before it") as caught:  # stage 2 of training
        adapted(base, JointSettings())
    assert caught.value.code is Code.MODEL_INVALID
    assert len(TreeDecoder(base, None, Tree(())).generate([3, 8, 5], 4).tokens) == 4


def test_positions_are_those_of_generate() -> None:
    """RoBERTa alone skips padding tokens, `generate` counts them: one pass over a text gives the tokens of generate."""
    torch.manual_seed(2)
    config = RobertaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, is_decoder=True, pad_token_id=1, initializer_range=0.4,
    )  # fmt: skip
    base = Base(RobertaForCausalLM(config).eval(), None, "roberta")
    with torch.no_grad():
        base.model.roberta.embeddings.position_embeddings.weight.mul_(9)  # texts depend on positions
    prompt = torch.tensor([[3, 1, 5, 1, 9]])
    answer = base.generate(prompt, torch.ones_like(prompt), 12)[0, 5:].tolist()
    text = Text("set:0", prompt[0].tolist(), answer)
    assert answer_logits(base, text).argmax(-1).tolist() == answer
    assert len(set(answer)) > 3
