"""Odd values given in Python: a ValueError or one of our errors, with the value in it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from looped import looped
from tiny import VOCAB, random_heads, tiny_base

from treeopt.decode.decoder import TreeDecoder
from treeopt.decode.rules import Sample, Typical
from treeopt.drafting.memory import Memory
from treeopt.errors import Code, TreeoptError, memory_as_error
from treeopt.models.base import Base
from treeopt.models.heads import MedusaHeads
from treeopt.tree import Tree


@pytest.fixture(scope="module")
def base() -> Base:
    """A tiny model."""
    return tiny_base("llama")


@pytest.fixture(scope="module")
def heads(base: Base) -> MedusaHeads:
    """Its heads."""
    return random_heads(base, 2)


@pytest.fixture(scope="module")
def decoder(base: Base, heads: MedusaHeads) -> TreeDecoder:
    """A decoder with a small tree."""
    return TreeDecoder(base, heads, Tree.chain(2))


@looped(
    ("name", "value"),
    [
        *(("temperature", value) for value in (math.nan, math.inf, -1.0, 1e-7, 1e-300, "1", None, True)),
        *(("top_p", value) for value in (0, -0.1, 1.1, math.nan, math.inf, "1")),
        *(("top_k", value) for value in (-1, 1.5, 2.0, math.nan, True, "3")),
        *(("seed", value) for value in (-1, 1 << 63, 10**30, 1.0, math.nan, True, "1")),
    ],
)
def test_sample_refuses(name: str, value: Any) -> None:
    """What is no such number is a ValueError that names it."""
    with pytest.raises(ValueError, match=name):
        Sample(**{name: value})


def test_the_least_temperature_is_nearly_greedy(base: Base, heads: MedusaHeads) -> None:
    """At 1e-6 texts are those of temperature 0; below, logits would overflow, so it is refused."""
    rules = (Sample(1e-6), Sample(0), Typical(1e-6), Typical(0))
    texts = [TreeDecoder(base, heads, Tree.chain(2), acceptance=rule).generate([3, 5], 12).tokens for rule in rules]
    assert texts == texts[:1] * 4
    with pytest.raises(ValueError, match="temperature"):
        Typical(1e-320)


@looped("name", ["temperature", "epsilon", "delta"])
@looped("value", [math.nan, math.inf, -0.5, "0.1", None, False])
def test_typical_refuses(name: str, value: Any) -> None:
    """What is no such number is a ValueError that names it."""
    with pytest.raises(ValueError, match=name):
        Typical(**{name: value})


def test_the_ends_of_the_ranges(base: Base, heads: MedusaHeads) -> None:
    """The largest seed, numbers of numpy, and the least of each are taken."""
    for rule in (
        Sample(seed=(1 << 63) - 1),
        Sample(seed=0, top_k=np.int64(3), top_p=np.float64(0.5), temperature=np.float32(0.5)),
        Sample(temperature=0, top_k=0, top_p=1),
        Typical(0, 1, 1),
    ):
        decoded = TreeDecoder(base, heads, Tree.chain(2), acceptance=rule).generate([3, 5], 4)
        assert len(decoded.tokens) == 4


PROMPTS: dict[str, Any] = {
    "outside the vocabulary": [3, VOCAB],
    "negative": [3, -1],
    "floats": [3.0, 5.0],
    "not a number": [math.nan],
    "booleans": torch.tensor([True, False]),
    "a text": "Once upon a time",
    "texts": ["Once", "upon"],
    "nothing": None,
    "a number": 7,
    "ragged": [3, [5, 7]],
    "nested": [[[3, 5], [5, 7]]],
    "batches of one tensor": torch.tensor([[[3, 5], [5, 7]]]),
    "too large": [1 << 70],
    "a scalar": torch.tensor(3),
    "none inside": [3, None],
}


@looped("name", PROMPTS)
def test_what_are_no_token_ids_is_refused(decoder: TreeDecoder, name: str) -> None:
    """A prompt that is not token ids of the model is a ValueError of one line."""
    with pytest.raises(ValueError, match=r"token id") as caught:
        decoder.generate(PROMPTS[name], 4)
    assert "\n" not in str(caught.value)


def test_integers_of_any_kind_are_token_ids(decoder: TreeDecoder) -> None:
    """Files of tokens are often uint16."""
    text = decoder.generate([3, 5, 7], 4).tokens
    for kind in (np.uint8, np.uint16, np.int16, np.uint32, np.int32):
        assert decoder.generate(np.array([3, 5, 7], kind), 4).tokens == text
    with pytest.raises(ValueError, match="outside the vocabulary"):
        decoder.generate(np.array([3, 60000], np.uint16), 4)


def test_refused_decoder_leaves_the_memory(base: Base, heads: MedusaHeads) -> None:
    """A memory is of the vocabulary of the first decoder that takes it, one of plain decoding too."""
    memory = Memory(1 << 14)
    with pytest.raises(TreeoptError, match="does not search"):
        TreeDecoder(base, heads, Tree.chain(2), memory=memory)
    assert memory.vocab_size == 0
    TreeDecoder(base, None, Tree.chain(0), memory=memory)
    assert memory.vocab_size == base.vocab_size


@looped("prompts", [[[]], [[3, 5], []], torch.zeros(0, dtype=torch.long)])
def test_empty_prompts_are_refused(decoder: TreeDecoder, prompts: Any) -> None:
    """A prompt without tokens, alone or in a batch, is E503; a list of no prompts is none (test_decoder.py)."""
    with pytest.raises(TreeoptError, match="holds no tokens") as caught:
        decoder.generate(prompts, 4)
    assert caught.value.code is Code.CONTEXT_FULL


@looped("budget", [0, -1, 10**9, 10**30])
def test_budgets_out_of_range_are_refused(decoder: TreeDecoder, budget: int) -> None:
    """No new tokens, and more than the context holds, are E503."""
    with pytest.raises(TreeoptError, match=str(budget)) as caught:
        decoder.generate([3, 5], budget)
    assert caught.value.code is Code.CONTEXT_FULL


@looped("budget", [1.5, math.nan, True, None, "4"])
def test_budgets_that_are_no_numbers_are_refused(decoder: TreeDecoder, budget: Any) -> None:
    """What is no whole number is a ValueError."""
    with pytest.raises(ValueError, match="max_new_tokens"):
        decoder.generate([3, 5], budget)


def fail(error: Exception) -> None:
    """Raise it."""
    raise error


WORK: dict[str, Callable[[], Any]] = {
    "too large": lambda: torch.empty(1 << 50),
    "beyond all sizes": lambda: torch.empty(1 << 62, 2),
    "of Python": lambda: fail(MemoryError()),
    "of a device": lambda: fail(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")),
}


@looped("name", WORK)
def test_memory_that_is_not_there_is_one_error(name: str) -> None:
    """What torch raises for it is E403."""
    with pytest.raises(TreeoptError) as caught, memory_as_error("less"):
        WORK[name]()
    assert caught.value.code is Code.OUT_OF_MEMORY


def test_other_faults_are_no_lack_of_memory() -> None:
    """A bug stays a bug."""
    with pytest.raises(RuntimeError, match="other"), memory_as_error("less"):
        fail(RuntimeError("other"))
