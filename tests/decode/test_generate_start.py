"""tree_generate: caches, soft prompts, positions and assistants are stock generate's text, or one clear error."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from tiny import VOCAB, cycle_base, family, tiny_base, walk
from transformers import DynamicCache, PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from treeopt import Memory, tree_generate
from treeopt.decode.decoder import TreeDecoder
from treeopt.errors import Code, TreeoptError
from treeopt.models.base import CACHE, cache_name
from treeopt.models.heads import MedusaHeads
from treeopt.tree import Tree

NEW = 12
PROMPT = [3, 8, 5, 21]
ALONE = torch.tensor([PROMPT])
PADDED = {
    "input_ids": torch.tensor([[3, 8, 5, 21], [0, 0, 7, 2]]),
    "attention_mask": torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]]),
}
OPTIONS: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}
TREES: dict[str, Any] = {"custom_generate": tree_generate}  # per-step trees of the text so far
SOFT: dict[str, Callable[[], Any]] = {
    "PREFIX_TUNING": lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=6),
    "PROMPT_TUNING": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=6),
    "P_TUNING": lambda: peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=6, encoder_hidden_size=8),
}


def refused(match: str, run: Callable[[], Any], code: Code = Code.GENERATE_UNSUPPORTED) -> None:
    """A call raises this error, with a text that says why."""
    with pytest.raises(TreeoptError, match=match) as caught:
        run()
    assert caught.value.code is code


def tuned(model: PreTrainedModel, config: Any) -> Any:
    """The model with an adapter of peft whose weights change its texts."""
    made = peft.get_peft_model(model, config).eval()
    torch.manual_seed(1)
    for parameter in made.parameters():
        if parameter.requires_grad:
            parameter.data += 2 * torch.randn(parameter.shape)
    return made


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing|Position ids are not supported")
@pytest.mark.parametrize("kind", SOFT)
def test_soft_prompts_are_refused(kind: str) -> None:
    """peft puts virtual tokens before every text: no tree writes the text of the base without them."""
    base = tiny_base("llama", 2).model
    plain = base.generate(ALONE, **OPTIONS)
    before = TreeDecoder(base)
    model = tuned(base, SOFT[kind]())
    if kind != "PREFIX_TUNING":  # under transformers 5.24 peft 0.21 leaves it out
        assert not model.generate(input_ids=ALONE, **OPTIONS).equal(plain)
    refused(f"kind {kind}", lambda: model.generate(input_ids=ALONE, **OPTIONS, **TREES))
    for probe in (True, False):
        with_prompt = functools.partial(TreeDecoder, model, probe=probe)
        refused(f"kind {kind}", lambda made=with_prompt: made().generate(PROMPT, NEW), Code.NO_TREES)
    with model.disable_adapter():
        assert model.generate(input_ids=ALONE, **OPTIONS, **TREES).equal(plain)
    assert base.generate(ALONE, **OPTIONS, **TREES).equal(plain)
    assert before.generate(PROMPT, NEW).tokens == plain[0, len(PROMPT) :].tolist()


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")
def test_adapters_in_the_weights_give_their_text() -> None:
    """A LoRA adapter is part of every forward."""
    base = tiny_base("llama", 2).model
    plain = base.generate(ALONE, **OPTIONS)
    lora = peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, target_modules=["q_proj", "v_proj"])
    model = tuned(base, lora)
    stock = model.generate(input_ids=ALONE, **OPTIONS)
    assert not stock.equal(plain)
    assert model.generate(input_ids=ALONE, **OPTIONS, **TREES).equal(stock)
    assert TreeDecoder(model).generate(PROMPT, NEW).tokens == stock[0, len(PROMPT) :].tolist()


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")
def test_adapters_of_places_and_of_rows_are_refused() -> None:
    """aLoRA acts from its invocation on, and `adapter_names` on rows: the text would be that of another model."""
    lora = functools.partial(peft.LoraConfig, task_type="CAUSAL_LM", init_lora_weights=False, target_modules=["q_proj"])
    base = tiny_base("llama", 2).model
    base.generate(ALONE, **OPTIONS, **TREES)  # probed
    model = tuned(base, lora())
    model.add_adapter("other", lora())
    names = {"adapter_names": ["default", "other"]}
    refused("kind adapter_names", lambda: model.generate(input_ids=ALONE.repeat(2, 1), **names, **OPTIONS, **TREES))
    model = tuned(tiny_base("llama", 2).model, lora(alora_invocation_tokens=PROMPT[-2:]))
    refused("kind aLoRA", lambda: model.generate(input_ids=ALONE, **OPTIONS, **TREES))
    refused("kind aLoRA", lambda: TreeDecoder(model), Code.NO_TREES)


def test_head_without_a_weight_is_refused() -> None:
    """torch's dynamic quantisation packs the LM head's weight."""
    packed = tiny_base("llama", 2).model
    packed.lm_head.weight = None
    refused("no LM head with a weight", lambda: packed.generate(ALONE, **OPTIONS, **TREES), Code.MODEL_INVALID)


def test_state_that_holds_tokens_is_refused() -> None:
    """Mamba 2 names its cache otherwise: stock's text with an empty one, an error with one that has read a text."""
    model = family("mamba2").model
    stock = model.generate(ALONE, **OPTIONS)
    assert model.generate(ALONE, **OPTIONS, **TREES).equal(stock)
    name = cache_name(model)
    read = model(ALONE, use_cache=True)[name]
    refused("holds the state", lambda: model.generate(ALONE, **{name: read}, **OPTIONS, **TREES))


def test_cache_that_holds_tokens_is_refused(model: PreTrainedModel) -> None:
    """The cache of the turn before is refused; without it, or with an empty one, the text is that of stock by cache."""
    turn = model.generate(ALONE, **OPTIONS, return_dict_in_generate=True)
    again = torch.cat([turn.sequences, torch.tensor([[7, 9]])], dim=1)
    held, cache = turn.sequences.shape[1] - 1, turn[CACHE]
    given = {CACHE: cache, **OPTIONS}
    refused(f"the cache holds {held} tokens", lambda: model.generate(again, **given, **TREES))
    assert cache.get_seq_length() == held
    stock = model.generate(again, **given)
    empty = DynamicCache()
    for one in (None, empty):
        out = model.generate(again, return_dict_in_generate=True, **OPTIONS, **TREES, **{CACHE: one})
        assert out.sequences.equal(stock)
        assert getattr(out, CACHE) is None
    assert empty.get_seq_length() == 0


def test_cache_with_an_empty_first_layer_is_refused(model: PreTrainedModel) -> None:
    """All layers of a cache are looked at."""
    cache = DynamicCache()
    for layer, length in enumerate((0, 3)):
        cache.update(torch.zeros(1, 2, length, 8), torch.zeros(1, 2, length, 8), layer)
    assert cache.get_seq_length() == 0
    refused("holds 3 tokens", lambda: model.generate(ALONE, **{CACHE: cache}, **OPTIONS, **TREES))


@pytest.mark.parametrize("family", ["gpt2", "opt", "llama"])
def test_positions(family: str) -> None:
    """Standard positions give stock's text, alone and padded, and others are refused; those of padding are not read."""
    model = tiny_base(family, 3).model
    model.generation_config.pad_token_id = 0
    padded = torch.tensor([[0, 1, 2, 3], [1, 1, 0, 1]])
    for given, positions in (({"input_ids": ALONE}, torch.arange(4)[None]), (PADDED, padded)):
        stock = model.generate(**given, **OPTIONS)
        assert model.generate(**given, position_ids=positions, **OPTIONS, **TREES).equal(stock)
        assert model.generate(**given, **OPTIONS, **TREES).equal(stock)
        longer = torch.cat([positions, positions[..., -1:] + 1], dim=-1)
        wrong = (positions + 1, positions.flip(-1), positions[..., 1:], longer, torch.arange(4)[None] * 2)
        for others in wrong:
            refused(
                "position_ids",
                lambda given=given, others=others: model.generate(**given, position_ids=others, **OPTIONS, **TREES),
            )
    padded_as_one = torch.arange(4)[None]  # the second row's tokens would begin at position 2
    refused("position_ids", lambda: model.generate(**PADDED, position_ids=padded_as_one, **OPTIONS, **TREES))


@pytest.mark.parametrize("given", [tree_generate, functools.partial(tree_generate)], ids=["function", "partial"])
def test_assistant_model_is_refused(model: PreTrainedModel, heads: MedusaHeads, given: Any) -> None:
    """`generate` does not pass it on, and it is not ignored."""
    assistant = tiny_base("llama", 3).model
    options = {**OPTIONS, "custom_generate": given, "heads": heads, "tree": Tree.chain(2)}
    refused("assisted generation", lambda: model.generate(ALONE, assistant_model=assistant, **options))
    assert model.generate(ALONE, assistant_model=None, **options).equal(model.generate(ALONE, **OPTIONS))


def test_memory_of_another_type(model: PreTrainedModel) -> None:
    """A file is no memory yet."""
    with pytest.raises(TypeError, match=r"treeopt\.load_memory"):
        model.generate(ALONE, **OPTIONS, **TREES, memory="memory.safetensors")


class EndsAt(StoppingCriteria):
    """Ends all rows at a length that `generate` does not know beforehand."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.length)


def test_memory_holds_the_text_that_is_returned() -> None:
    """A criterion may end a text within a step, whose other tokens nobody gets."""
    model, memory = cycle_base().model, Memory(1 << 14)
    prompt = walk(0, 2 * VOCAB)  # which every draft continues
    for more in range(1, 9):
        memory.clear()
        criteria = StoppingCriteriaList([EndsAt(len(prompt) + more)])
        given = {"input_ids": torch.tensor([prompt]), "attention_mask": torch.ones(1, len(prompt))}
        found = model.generate(**given, stopping_criteria=criteria, memory=memory, **OPTIONS, **TREES)
        assert found.shape[1] == len(prompt) + more
        assert [text.tolist() for text in memory.texts()] == found.tolist()


@pytest.mark.parametrize("option", [{"prompt_lookup_num_tokens": 3}, {"assistant_early_exit": 1}, {"use_mtp": True}])
def test_other_assisted_generation_is_refused(model: PreTrainedModel, option: dict[str, Any]) -> None:
    """Drafts of transformers' own and drafts of a tree exclude each other."""
    refused("assisted generation", lambda: model.generate(ALONE, **OPTIONS, **TREES, **option))


def test_tree_inside_assisted_generation_of_another_model(model: PreTrainedModel) -> None:
    """The assistant of an outer `generate` is not that of an inner one."""
    inner: list[torch.Tensor] = []

    def outer(*_: Any, **__: Any) -> torch.Tensor:
        inner.append(model.generate(ALONE, **OPTIONS, **TREES))
        return ALONE

    other = tiny_base("llama", 4).model
    other.generate(ALONE, **OPTIONS, assistant_model=model, custom_generate=outer)
    assert inner[0].equal(model.generate(ALONE, **OPTIONS))
