"""Logits processors: those of transformers and declared ones are taken, others are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import VOCAB
from torch import Tensor
from transformers import (
    LogitsProcessor,
    MinLengthLogitsProcessor,
    PreTrainedModel,
)

from treeopt import tree_generate
from treeopt.errors import Code, TreeoptError
from treeopt.models.heads import MedusaHeads
from treeopt.tree import Tree

NEW = 20
ALONE = {"input_ids": torch.tensor([[3, 8, 5, 21]])}
WIDE = Tree.from_paths([(rank,) for rank in range(VOCAB)] + [(0, rank) for rank in range(8)])


class Alternating(LogitsProcessor):
    """A grammar: even and odd tokens by turns, told by the number of calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        scores[:, self.calls % 2 :: 2] = -torch.inf
        return scores


class OwnLength(MinLengthLogitsProcessor):
    """A processor of the user's that is made from one of transformers."""


@pytest.mark.parametrize("one", [Alternating(), OwnLength(3, 1)], ids=lambda one: type(one).__name__)
def test_trees_refuse_undeclared_processors(model: PreTrainedModel, heads: MedusaHeads, one: LogitsProcessor) -> None:
    """With a tree they are one error, before the first call, that names them and both ways on."""
    options = {"max_new_tokens": NEW, "do_sample": False, **ALONE, "custom_generate": tree_generate}
    before, name = dict(vars(one)), type(one).__name__
    for declared in (False, [], [Counting]):
        with pytest.raises(TreeoptError, match=f"{name} may depend on its earlier calls") as caught:
            model.generate(**options, logits_processor=[one], heads=heads, tree=WIDE, stateless_processors=declared)
        assert caught.value.code is Code.GENERATE_UNSUPPORTED
        assert "leave out custom_generate" in caught.value.fix
        assert f"stateless_processors=True, or [{name}]" in caught.value.fix
    assert vars(one) == before


class Counting(LogitsProcessor):
    """Counts its calls, and changes nothing."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        return scores


@pytest.mark.parametrize("declared", [True, [Counting], (LogitsProcessor,)])
def test_declared_processors_are_taken_at_their_word(model: PreTrainedModel, heads: MedusaHeads, declared: Any) -> None:
    """Who says that a processor has no state that matters gets stock's text with a tree."""
    options = {"max_new_tokens": NEW, "do_sample": False, **ALONE}
    tree = {"custom_generate": tree_generate, "heads": heads, "tree": WIDE}
    ours = model.generate(**options, **tree, logits_processor=[Counting()], stateless_processors=declared)
    assert ours.tolist() == model.generate(**options).tolist()


def test_storing_processors_of_transformers_are_refused(model: PreTrainedModel, heads: MedusaHeads) -> None:
    """No declaration helps where transformers itself stores the texts of all calls."""
    options = {"max_new_tokens": 5, "guidance_scale": 1.5, **ALONE, "custom_generate": tree_generate}
    with pytest.raises(TreeoptError, match="ClassifierFree") as caught:
        model.generate(**options, heads=heads, tree=WIDE, stateless_processors=True)
    assert caught.value.fix == "leave out custom_generate for this call"
