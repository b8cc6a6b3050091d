"""Traces of whole texts against the naive drafter, rank by rank; and what is not yet known changes none of them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from looped import looped
from naive_draft import SOURCES, NaiveDrafter, Table, bounds, naive_of, random_drafter
from tiny import random_heads, tiny_base

from treeopt.drafter import Drafter
from treeopt.drafting import trace as trace_module
from treeopt.drafting.interface import Ints
from treeopt.drafting.plans import proposer_for
from treeopt.drafting.trace import TextTraces, trace_texts
from treeopt.models.base import Base
from treeopt.models.heads import MedusaHeads
from treeopt.texts.answers import hidden_states
from treeopt.texts.encode import Text
from treeopt.traces import MISS, NONE

SEEDS = int(os.environ.get("TREEOPT_SEEDS", "2"))  # of each source
WINDOWS = (4, 8, 25, 200)  # shorter than the texts, about as long, longer


@dataclass(frozen=True)
class World:
    """A random model, a drafter for it, and texts that repeat themselves."""

    base: Base
    heads: MedusaHeads | None
    table: Table
    drafter: Drafter
    texts: list[Text]


def world(seed: int, source: str, window: int | None = None, *, mapped: bool = False) -> World:
    """The texts need not be the model's own."""
    rng = np.random.default_rng([seed, SOURCES.index(source)])
    vocab = int(rng.integers(3, 9))
    base = tiny_base("llama", seed, vocab_size=vocab)
    window = int(rng.choice(WINDOWS)) if window is None else window
    table, drafter = random_drafter(rng, vocab, source, window, mapped=mapped)
    heads = random_heads(base, drafter.num_heads, seed) if drafter.num_heads else None
    texts = []
    for number in range(3):
        length = int(rng.integers(4, 40))
        tokens = np.resize(rng.integers(vocab, size=rng.integers(2, 8)), length)
        changed = rng.random(length) < 0.2
        tokens[changed] = rng.integers(vocab, size=changed.sum())
        prompt = int(rng.integers(1, length - 1))
        texts.append(Text(f"set:{number}", tokens[:prompt].tolist(), tokens[prompt:].tolist()))
    return World(base, heads, table, drafter, texts)


def traced(made: World, texts: Sequence[Text], *, steps: bool = False) -> list[TextTraces]:
    """The texts' traces."""
    proposer = proposer_for(made.base, made.heads, made.drafter)
    depth = made.drafter.depth if steps else 0
    return trace_texts(made.base, [proposer] * len(texts), texts, 253, step_depth=depth)


@torch.inference_mode()
def naive_at(made: World, text: Text, place: int) -> NaiveDrafter:
    """The naive drafter whose root is one token of the answer."""
    [states] = hidden_states(made.base, [text])
    state = states[place : place + 1]
    if made.heads is None:
        logits = [made.base.lm_head(state)[0].tolist()] * made.drafter.lm_head_levels
    else:
        logits = made.heads(state, made.base.lm_head, made.drafter.num_heads)[:, 0].tolist()
    window = max(made.drafter.window, 4)
    recent = ([-1] * window + text.prompt + text.answer[: place + 1])[-window:]
    return naive_of(made.drafter, made.table, logits, recent)


@looped("source", SOURCES)
@looped("seed", range(SEEDS))
def test_ranks_are_the_naive_ones(seed: int, source: str) -> None:
    """Every position and level of every text, in windows shorter and longer than it; beyond its end there is none."""
    made = world(seed, source)
    sure = total = 0
    for text, found in zip(made.texts, traced(made, made.texts), strict=True):
        for place in range(len(text.answer)):
            naive, after = naive_at(made, text, place), text.answer[place + 1 :]
            for level in range(made.drafter.depth):
                rank = int(found.ranks[place, level])
                if level >= len(after):
                    assert rank == NONE
                    continue
                low, high = bounds(naive.ranked(after[:level]), after[level])
                assert low <= rank <= high
                sure, total = sure + (low == high), total + 1
    assert sure > 0.6 * total


def test_ranks_are_mostly_found() -> None:
    """The random worlds say something: many tokens are candidates of many ranks."""
    worlds = [world(seed, source) for seed in range(3) for source in SOURCES]
    ranks = np.concatenate([one.ranks.ravel() for made in worlds for one in traced(made, made.texts)])
    counts = np.bincount(ranks[ranks < MISS], minlength=3)
    assert (counts[:3] > 20).all()


@looped("source", SOURCES)
def test_batches_of_texts_change_nothing(source: str) -> None:
    """A text's traces do not depend on the texts beside it."""
    made = world(2, source)
    together = traced(made, made.texts, steps=True)
    for text, found in zip(made.texts, together, strict=True):
        [alone] = traced(made, [text], steps=True)
        np.testing.assert_array_equal(found.ranks, alone.ranks)
        assert_same_steps(found, alone, len(text.answer))


def assert_same_steps(one: TextTraces, other: TextTraces, places: int) -> None:
    """Whether the per-step trees of the first places are the same."""
    assert one.steps is not None
    assert other.steps is not None
    np.testing.assert_array_equal(one.steps.node_rank[:places], other.steps.node_rank[:places])
    for name in ("expected_tokens", "confidence"):  # batches of other shapes round otherwise
        np.testing.assert_allclose(getattr(one.steps, name)[:places], getattr(other.steps, name)[:places], rtol=2e-3)


def with_garbage(made: World, text: Text, place: int, seed: int) -> Text:
    """The text with other tokens after one place of its answer, and as many of them."""
    rng = np.random.default_rng(seed)
    after = rng.integers(made.base.vocab_size, size=len(text.answer) - place - 1)
    return replace(text, answer=[*text.answer[: place + 1], *after.tolist()])


@looped("source", SOURCES)
@looped("window", WINDOWS)
def test_nothing_after_the_root_is_known(source: str, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Garbage after a root, and in other texts, changes neither candidates, ranks nor per-step trees at that place.

    The true tokens after each root are given apart from the text that is searched, so those stay.
    """
    made = world(3, source, window, mapped=True)
    text = max(made.texts, key=lambda one: len(one.answer))
    places = range(0, len(text.answer), 3)
    [clean] = traced(made, [text], steps=True)
    true_of = trace_module._true

    for place in places:
        others = [with_garbage(made, one, 0, place) for one in made.texts if one is not text]
        garbage = with_garbage(made, text, place, place)

        def known(one: Text, depth: int, garbage: Text = garbage) -> Ints:
            return true_of(text if one is garbage else one, depth)

        monkeypatch.setattr(trace_module, "_true", known)
        found = traced(made, [others[0], garbage, others[1]], steps=True)[1]
        np.testing.assert_array_equal(found.ranks[: place + 1], clean.ranks[: place + 1])
        assert_same_steps(found, clean, place + 1)
        monkeypatch.setattr(trace_module, "_true", true_of)
