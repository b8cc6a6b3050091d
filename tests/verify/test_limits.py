"""Models whose texts have limits beyond the context: masks by cache index, and rotary frequencies that change."""

from __future__ import annotations

import pytest
import torch
from decoding import stock
from looped import looped
from random_trees import RandomTrees
from tiny import tiny_base

from treeopt.decode.decoder import TreeDecoder
from treeopt.errors import Code, TreeoptError
from treeopt.models.base import Base
from treeopt.verify.masks import frequency_switch, index_window, tree_context
from treeopt.verify.probe import check_trees
from treeopt.verify.session import TreeForward

SWITCH = 40
ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
    "original_max_position_embeddings": SWITCH,
}


@pytest.fixture(scope="module")
def longrope() -> Base:
    """A model with two sets of rotary frequencies."""
    return tiny_base("phi3", 1, rope_parameters=ROPE, original_max_position_embeddings=SWITCH, sliding_window=None)


def text_of(base: Base, prompts: list[list[int]], new: int) -> list[list[int]]:
    """The texts with random trees, in which the true continuation is at every other step."""
    return [one.tokens for one in TreeDecoder(base, None, RandomTrees(base, 12, 4, 3)).generate(prompts, new)]


def prompt_of(length: int) -> list[int]:
    return [(7 * i + 3) % 61 for i in range(length)]


def test_longrope_on_each_side_of_its_switch(longrope: Base) -> None:
    """Texts that end at the switch, and texts that begin beyond it, are those of stock generate."""
    for prompts, new in (([prompt_of(SWITCH - 11), prompt_of(3)], 12), ([prompt_of(SWITCH + 1), prompt_of(60)], 12)):
        assert text_of(longrope, prompts, new) == [stock(longrope, prompt, new) for prompt in prompts]


@looped(("lengths", "new"), [([SWITCH - 11], 13), ([SWITCH], 2), ([3, SWITCH - 1], 9), ([3, SWITCH + 1], 2)])
def test_longrope_across_its_switch_is_refused(longrope: Base, lengths: list[int], new: int) -> None:
    """A text that crosses the switch, or a batch of both sides, is refused: a tree would read it otherwise."""
    with pytest.raises(TreeoptError) as caught:
        text_of(longrope, [prompt_of(length) for length in lengths], new)
    assert caught.value.code is Code.CONTEXT_FULL
    assert f"after {SWITCH} tokens" in caught.value.what


def test_frequency_switch_of_configs(longrope: Base) -> None:
    """Only longrope has a switch, that of the model or of one kind of layer."""
    assert frequency_switch(longrope.model.config) == SWITCH
    assert frequency_switch(tiny_base("llama").model.config) is None
    mixed = tiny_base("gemma3").model.config
    mixed.rope_parameters["full_attention"] = ROPE
    assert frequency_switch(mixed) == SWITCH


@looped("window", [32, 256])
def test_gpt_neo_within_its_window(window: int) -> None:
    """GPT-Neo decodes losslessly up to the end of what its local layers see; one token more is refused."""
    base = tiny_base("gpt_neo", 2, window_size=window, max_position_embeddings=48)
    nodes = 12
    room = tree_context(base.context, base.model.config, nodes)
    assert room == min(window, 48) - nodes - 7
    check_trees(base)
    prompt = prompt_of(4)
    assert text_of(base, [prompt, [5]], room - 4) == [stock(base, prompt, room - 4), stock(base, [5], room - 4)]
    with pytest.raises(TreeoptError, match=f"the model with this tree holds {room}") as caught:
        text_of(base, [prompt], room - 3)
    assert caught.value.code is Code.CONTEXT_FULL


def test_index_window_of_configs() -> None:
    """The window of local layers counts only where there are any; other models have none."""
    local = tiny_base("gpt_neo").model.config
    assert index_window(local) == 8
    assert index_window(tiny_base("gpt_neo", attention_types=[[["global"], 2]]).model.config) == 256
    assert index_window(tiny_base("llama").model.config) is None


def test_prefill_has_the_positions_of_generate(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt's positions are given, from 0, as stock generate gives them: RoBERTa counts them otherwise."""
    base = tiny_base("llama")
    given: list[torch.Tensor] = []
    forward = Base.forward

    def noted(self: Base, ids: torch.Tensor, **inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        given.append(inputs["position_ids"])
        return forward(self, ids, **inputs)

    monkeypatch.setattr(Base, "forward", noted)
    TreeForward(base, 1, 0).begin([torch.tensor([1, 2, 3]), torch.tensor([4])], 2)
    assert given[0].tolist() == [[0, 1, 2]]
