"""Logits processors: a tree takes those of transformers and declared ones; one node takes all, and is stock."""

from __future__ import annotations

from collections.abc import Callable
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
BATCH = {
    "input_ids": torch.tensor([[3, 8, 5, 21, 9], [0, 0, 7, 7, 2], [0, 0, 0, 0, 33]]),
    "attention_mask": torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1], [0, 0, 0, 0, 1]]),
}
WIDE = Tree.from_paths([(rank,) for rank in range(VOCAB)] + [(0, rank) for rank in range(8)])


class Alternating(LogitsProcessor):
    """A grammar: even and odd tokens by turns, told by the number of calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        scores[:, self.calls % 2 :: 2] = -torch.inf
        return scores


class Matcher(LogitsProcessor):
    """A grammar as its libraries write it: each row's own state, moved on by the last token of each call."""

    def __init__(self, rows: int) -> None:
        self.states = [0] * rows
        self.prefilled = False

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        assert len(input_ids) == len(self.states)
        for row, token in enumerate(input_ids[:, -1].tolist()):
            if self.prefilled:
                self.states[row] = (2 * self.states[row] + token) % 3
            scores[row, self.states[row] :: 3] = -torch.inf
        self.prefilled = True
        return scores


GRAMMARS: dict[str, Callable[[int], LogitsProcessor]] = {"alternating": lambda _: Alternating(), "matcher": Matcher}


@pytest.mark.parametrize("rows", ["alone", "batch", "batch that ends"])
@pytest.mark.parametrize("name", GRAMMARS)
def test_one_node_is_stock(model: PreTrainedModel, name: str, rows: str) -> None:
    """With one node a stateful processor gives stock's text, from as many calls, alone and in a batch."""
    options = {"max_new_tokens": NEW, "do_sample": False, **(ALONE if rows == "alone" else BATCH)}
    count = len(options["input_ids"])
    plain = model.generate(**options, logits_processor=[GRAMMARS[name](count)])
    if rows == "batch that ends":
        options["eos_token_id"] = [int(plain[0, 12]), int(plain[2, 15])]
    wanted, ours = GRAMMARS[name](count), GRAMMARS[name](count)
    stock = model.generate(**options, logits_processor=[wanted])
    out = model.generate(**options, logits_processor=[ours], custom_generate=tree_generate, tree=Tree(()))
    assert out.tolist() == stock.tolist()
    assert stock.tolist() != model.generate(**options).tolist()
    assert vars(ours) == vars(wanted)


@pytest.mark.parametrize("rows", ["alone", "batch"])
def test_one_node_takes_guidance(model: PreTrainedModel, rows: str) -> None:
    """The processor of classifier-free guidance, which stores its texts, decodes as in stock."""
    options = {
        "max_new_tokens": NEW,
        "do_sample": False,
        "guidance_scale": 1.5,
        **(ALONE if rows == "alone" else BATCH),
    }
    ours = model.generate(**options, custom_generate=tree_generate, tree=Tree(()))
    assert ours.tolist() == model.generate(**options).tolist()


class OwnLength(MinLengthLogitsProcessor):
    """A processor of the user's that is made from one of transformers."""


@pytest.mark.parametrize("one", [Alternating(), Matcher(1), OwnLength(3, 1)], ids=lambda one: type(one).__name__)
def test_trees_refuse_undeclared_processors(model: PreTrainedModel, heads: MedusaHeads, one: LogitsProcessor) -> None:
    """With a tree they are one error, before the first call, that names them and both ways on."""
    options = {"max_new_tokens": NEW, "do_sample": False, **ALONE, "custom_generate": tree_generate}
    before, name = dict(vars(one)), type(one).__name__
    for declared in (False, [], [Counting]):
        with pytest.raises(TreeoptError, match=f"{name} may depend on its earlier calls") as caught:
            model.generate(**options, logits_processor=[one], heads=heads, tree=WIDE, stateless_processors=declared)
        assert caught.value.code is Code.GENERATE_UNSUPPORTED
        assert "treeopt.Tree(())" in caught.value.fix
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
    assert caught.value.fix == "tree=treeopt.Tree(()) decodes with one node"
