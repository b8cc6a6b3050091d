"""Watch: processors with a state of their own are refused with a tree, and decode as stock with one node."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tiny import VOCAB, tiny_base
from torch import Tensor
from transformers import (
    LogitsProcessor,
    MinLengthLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    PreTrainedModel,
)

from treeopt import tree_generate
from treeopt.decode.processors import Watch, watched
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


@pytest.mark.parametrize("name", GRAMMARS)
def test_trees_refuse_stateful_processors(model: PreTrainedModel, heads: MedusaHeads, name: str) -> None:
    """With a tree they are one error that names them and both ways on, and no text."""
    options = {"max_new_tokens": NEW, "do_sample": False, **ALONE, "custom_generate": tree_generate}
    with pytest.raises(TreeoptError, match="changes its own state") as caught:
        model.generate(**options, logits_processor=[GRAMMARS[name](1)], heads=heads, tree=WIDE)
    assert caught.value.code is Code.GENERATE_UNSUPPORTED
    assert type(GRAMMARS[name](1)).__name__ in caught.value.what
    assert "treeopt.Tree(())" in caught.value.fix
    assert "stateless_processors" in caught.value.fix


class LateLatch(LogitsProcessor):
    """Changes only when it has seen a certain token at the end of a text."""

    def __init__(self, token: int) -> None:
        self.token, self.seen = token, False

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.seen = self.seen or bool((input_ids[:, -1] == self.token).any())
        if self.seen:
            scores[:, ::2] = -torch.inf
        return scores


def test_late_changes_are_refused(model: PreTrainedModel, heads: MedusaHeads) -> None:
    """A change is found in whichever step it comes, and never gives a text other than stock's."""
    options = {"max_new_tokens": NEW, "do_sample": False, **ALONE}
    text = model.generate(**options)[0, 4:].tolist()
    tree = {"custom_generate": tree_generate, "heads": heads, "tree": Tree.chain(2)}
    late = [LateLatch(text[14])]
    with pytest.raises(TreeoptError, match="LateLatch changes"):
        model.generate(**options, **tree, logits_processor=late)
    for latch in (LateLatch(VOCAB), LateLatch(text[14])):  # never; and with one node as stock
        plan = Tree.chain(2) if latch.token == VOCAB else Tree(())
        stock = model.generate(**options, logits_processor=[LateLatch(latch.token)])
        ours = model.generate(**options, **{**tree, "tree": plan}, logits_processor=[latch])
        assert ours.tolist() == stock.tolist()


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
    with pytest.raises(TreeoptError, match="Counting"):
        model.generate(**options, **tree, logits_processor=[Counting()], stateless_processors=[Alternating])


def test_stock_processors_are_not_watched() -> None:
    """Those of transformers are known, and may keep what they like."""
    stock = MinLengthLogitsProcessor(3, 1)
    assert watched([stock, Counting()], False)[0].calls == 0
    assert watched([stock], False) == watched([stock, Counting()], True) == []


def counter() -> Callable[[], int]:
    """A function that remembers how often it was called."""
    calls = 0

    def count() -> int:
        nonlocal calls
        calls += 1
        return calls

    return count


class Slotted:
    """Holds its state in slots."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0


class Holder(LogitsProcessor):
    """A processor with any state at all."""

    def __init__(self, state: Any) -> None:
        self.state = state
        self.tables = {"model": tiny_base("llama").model, "module": torch, "class": Slotted, "of": lambda x: x}

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores


def write(state: Any, value: Any) -> None:
    state[0] = value


# Name -> a state, and what changes it from within.
STATES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "list": (lambda: [0], lambda state: state.append(1)),
    "nested": (lambda: {"a": [{1, 2}]}, lambda state: state["a"][0].add(3)),
    "tensor": (lambda: torch.zeros(3), lambda state: write(state, 1)),
    "large tensor": (lambda: torch.zeros(1 << 17), lambda state: state.add_(1)),
    "bfloat16 tensor": (lambda: torch.zeros(3, dtype=torch.bfloat16), lambda state: state.add_(1)),
    "array": (lambda: torch.zeros(3).numpy(), lambda state: write(state, 1)),
    "slots": (Slotted, lambda state: setattr(state, "value", 1)),
    "closure": (counter, lambda state: state()),
    "method": (lambda: [].append, lambda state: state(1)),
    "iterator": (lambda: iter([1, 2, 3]), next),
    "count": (itertools.count, next),
    "generator": (torch.Generator, lambda state: torch.rand(1, generator=state)),
}


@pytest.mark.parametrize("name", STATES)
def test_every_kind_of_state_is_seen(name: str) -> None:
    """A change anywhere below a processor is seen; without one nothing is."""
    make, change = STATES[name]
    state = make()
    watch = Watch([Holder(None), Holder(state)])
    watch.check()
    change(state)
    with pytest.raises(TreeoptError, match="Holder changes"):
        watch.check()


def test_inference_tensors_are_compared() -> None:
    """Tensors that keep no account of writes are compared by their values."""
    with torch.inference_mode():
        state = torch.zeros(1 << 17)
        watch = Watch([Holder(state)])
        watch.check()
        state[5] = 1
        with pytest.raises(TreeoptError):
            watch.check()


def test_another_tensor_in_the_same_place_is_seen() -> None:
    """A large tensor that is replaced by a new one is a change, wherever the new one lies."""
    holder = Holder(torch.zeros(1 << 17))
    watch = Watch([holder])
    holder.state = None
    holder.state = torch.ones(1 << 17)
    with pytest.raises(TreeoptError):
        watch.check()


def steps() -> Iterator[int]:
    """A generator, whose place nobody can see."""
    yield 1


@pytest.mark.parametrize("state", [steps(), threading.Lock()], ids=["generator", "lock"])
def test_unseen_state_is_refused(model: PreTrainedModel, heads: MedusaHeads, state: Any) -> None:
    """What cannot be looked into is refused with a tree, and not with one node."""
    options = {"max_new_tokens": 3, "do_sample": False, **ALONE, "logits_processor": [Holder(state)]}
    with pytest.raises(TreeoptError, match="state of the logits processor Holder cannot be read") as caught:
        model.generate(**options, custom_generate=tree_generate, heads=heads, tree=WIDE)
    assert caught.value.code is Code.GENERATE_UNSUPPORTED
    model.generate(**options, custom_generate=tree_generate, tree=Tree(()))


def test_function_of_allowed_tokens_is_watched() -> None:
    """The stock way to pass a grammar is a function of the user's, which may keep account of its calls."""

    class Grammar:
        calls = 0

        def __call__(self, batch: int, ids: torch.Tensor) -> list[int]:
            self.calls += 1
            return [self.calls % VOCAB]

    one = PrefixConstrainedLogitsProcessor(Grammar(), 1)
    assert watched([one], False) == [one]
    watch = Watch([one])
    one(torch.tensor([[3]]), torch.zeros(1, VOCAB))
    with pytest.raises(TreeoptError, match="changes its own state"):
        watch.check()
    quiet = PrefixConstrainedLogitsProcessor(lambda batch, ids: [3, 5], 1)
    watch = Watch([quiet])
    quiet(torch.tensor([[3]]), torch.zeros(1, VOCAB))
    watch.check()
