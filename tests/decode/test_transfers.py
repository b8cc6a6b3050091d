"""Transfers between host and device in a step: one down and at most one up, and nothing of the vocabulary's size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from drafters import SIZE_COST, planted, prompts_of, quick_drafter
from tiny import random_heads, tiny_base

from treeopt.decode.decoder import TreeDecoder
from treeopt.drafter import TOP_LOGPROBS, Drafter
from treeopt.models import logits
from treeopt.policy import TreePolicy
from treeopt.tree import Tree

DOWN = ("cpu", "tolist", "item", "numpy", "__bool__", "__int__", "__float__", "__index__", "nonzero")
UP = ("from_numpy", "tensor", "as_tensor")


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Counter[str], list[int]]]:
    """Calls by direction while inside, and the sizes of what goes down; a call within a call is not counted."""
    calls: Counter[str] = Counter()
    sizes: list[int] = []
    inside = [False]

    def noted(direction: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any, **more: Any) -> Any:
            outermost, inside[0] = not inside[0], True
            try:
                if outermost:
                    calls[direction] += 1
                    if direction == "down":
                        sizes.append(given[0].numel())
                return call(*given, **more)
            finally:
                inside[0] = inside[0] and not outermost

        return run

    with monkeypatch.context() as patch:
        for name in DOWN:
            patch.setattr(torch.Tensor, name, noted("down", getattr(torch.Tensor, name)))
        for name in UP:
            patch.setattr(torch, name, noted("up", getattr(torch, name)))
        yield calls, sizes


@pytest.fixture(scope="module")
def decoders() -> dict[str, TreeDecoder]:
    """One of each kind of drafting."""
    base, heads = planted(3)
    drafter, plain = quick_drafter(base, heads), Drafter.heads_only(3, 8)
    tree = Tree(Tree.from_paths([(0,), (1,), (0, 0), (0, 1), (0, 0, 0)]).paths, drafter=drafter.id)
    return {
        "one node": TreeDecoder(base, None, Tree(())),
        "heads": TreeDecoder(base, heads, Tree.from_paths([(0,), (1,), (0, 0)])),
        "heads per step": TreeDecoder(base, heads, TreePolicy(12, 3, plain.id), drafter=plain),
        "static": TreeDecoder(base, heads, tree, drafter=drafter),
        "per step": TreeDecoder(base, heads, TreePolicy(16, drafter.depth, drafter.id), drafter=drafter),
        "size cost": TreeDecoder(base, heads, TreePolicy(16, drafter.depth, drafter.id, SIZE_COST), drafter=drafter),
        "no heads": TreeDecoder(base),
    }


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("kind", ["one node", "heads", "heads per step", "static", "per step", "size cost", "no heads"])
def test_one_transfer_down_and_one_up(
    decoders: dict[str, TreeDecoder], kind: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every step waits for the device once; the drafts go up in one piece, those of heads not at all."""
    monkeypatch.setattr(
        logits, "_SPARE", 1 << 20
    )  # the way of other devices than the CPU, where a look at values waits
    decoder = decoders[kind]
    going = decoder.prefill([text.prompt for text in prompts_of(1, rows)], 64)
    decoder.step(going)  # compiles and builds masks
    for _ in range(4):
        with counted(monkeypatch) as (calls, _):
            decoder.step(going)
        assert calls["down"] == 1
        assert calls["up"] <= (0 if kind in ("one node", "heads") else 1) + (rows > 1)


def test_nothing_of_the_size_of_the_vocabulary_leaves_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each level 64 tokens and log-probabilities are read, whatever the vocabulary."""
    base = tiny_base("llama", 1, vocab_size=4000)
    heads = random_heads(base, 3, 1)
    drafter = quick_drafter(base, heads)
    decoder = TreeDecoder(base, heads, TreePolicy(16, drafter.depth, drafter.id), drafter=drafter)
    going = decoder.prefill([[1, 2, 3, 1, 2]], 64)
    decoder.step(going)
    with counted(monkeypatch) as (_, sizes):
        decoder.step(going)
    assert max(sizes) <= 3 * (2 * TOP_LOGPROBS + 1) + 3 + 2 * (drafter.depth + 1)
    assert max(sizes) < base.vocab_size
