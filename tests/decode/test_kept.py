"""Decoders are kept from one call of `tree_generate` to the next: what is used again, and what never may be."""

from __future__ import annotations

import dataclasses
import gc
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from drafters import quick_drafter
from tiny import cycle_base, cycle_heads, random_heads, tiny_base
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedModel, StoppingCriteria

from treeopt import tree_generate
from treeopt.decode import generate as module
from treeopt.decode.decoder import TreeDecoder
from treeopt.drafter import Drafter
from treeopt.drafting.plans import proposer_for
from treeopt.errors import Code, TreeoptError
from treeopt.files.drafters import save_drafter
from treeopt.files.trees import save_tree
from treeopt.models.base import Base
from treeopt.models.heads import MedusaHeads
from treeopt.policy import TreePolicy
from treeopt.tree import Tree

TREE = Tree.from_paths([(0,), (1,), (0, 0), (0, 0, 0)])
PROMPT = torch.tensor([[3, 8, 5, 21]])
NEW = 12


@pytest.fixture
def base() -> Base:
    """A model whose text its heads often know."""
    return cycle_base(disturbed=0.03)


@pytest.fixture
def heads(base: Base) -> MedusaHeads:
    """Its heads."""
    return cycle_heads(base, 3)


@pytest.fixture(scope="module")
def drafter() -> Drafter:
    """A drafter for the same model and heads."""
    base = cycle_base(disturbed=0.03)
    return quick_drafter(base, cycle_heads(base, 3))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[TreeDecoder]]:
    """Every decoder that is made for a call, in order."""
    found: list[weakref.ref[TreeDecoder]] = []

    class Recorded(TreeDecoder):
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            found.append(weakref.ref(self))

    monkeypatch.setattr(module, "TreeDecoder", Recorded)
    return found


def run(model: PreTrainedModel, prompt: Tensor = PROMPT, **options: Any) -> Any:
    """A call, whose text is that of stock `generate`."""
    given = {"do_sample": False, "max_new_tokens": NEW, "pad_token_id": 0}
    out = model.generate(prompt, **given, custom_generate=tree_generate, return_dict_in_generate=True, **options)
    assert out.sequences.equal(model.generate(prompt, **given))
    return out


GIVEN: dict[str, Callable[[MedusaHeads, Drafter, Path], dict[str, Any]]] = {
    "tree": lambda heads, _drafter, _folder: {"heads": heads, "tree": TREE},
    "equal trees": lambda heads, _drafter, _folder: {"heads": heads, "tree": Tree(TREE.paths)},
    "paths": lambda heads, _drafter, _folder: {"heads": heads, "tree": [[0], [1], [0, 0], [0, 0, 0]]},
    "tree file": lambda heads, _drafter, folder: {"heads": heads, "tree": folder / "t.yaml"},
    "record": lambda heads, drafter, _folder: {"heads": heads, "tree": _policy(drafter), "drafter": drafter},
    "drafter file": lambda heads, drafter, folder: {
        "heads": heads,
        "tree": _policy(drafter),
        "drafter": str(folder / "d.safetensors"),
    },
    "tree that names its drafter": lambda heads, _drafter, folder: {
        "heads": heads,
        "tree": str(folder / "n.yaml"),
    },
    "plan of the drafter": lambda heads, _drafter, folder: {"heads": heads, "drafter": folder / "d.safetensors"},
    "nothing": lambda _heads, _drafter, _folder: {},
}


def _policy(drafter: Drafter) -> TreePolicy:
    return TreePolicy(8, drafter.depth, drafter.id)


@pytest.fixture
def folder(tmp_path: Path, drafter: Drafter) -> Path:
    """A folder with a tree, a drafter that recommends a plan, and a tree that names it."""
    save_tree(TREE, tmp_path / "t.yaml")
    write(drafter, tmp_path)
    source = {"drafter": str(tmp_path / "d.safetensors")}
    save_tree(dataclasses.replace(TREE, drafter=drafter.id, source=source), tmp_path / "n.yaml")
    return tmp_path


def write(drafter: Drafter, folder: Path, nodes: int = 8) -> None:
    """The drafter with the plan of so many nodes."""
    plan = TreePolicy(nodes, drafter.depth, drafter.id)
    save_drafter(dataclasses.replace(drafter, plan=plan), folder / "d.safetensors", overwrite=True)


@pytest.mark.parametrize("name", GIVEN)
def test_second_call_makes_nothing(
    name: str, base: Base, heads: MedusaHeads, drafter: Drafter, folder: Path, made: list[Any]
) -> None:
    """The same arguments again, or equal ones, use the decoder of the first call; texts and steps are the same."""
    arguments = [GIVEN[name](heads, drafter, folder) for _ in range(3)]
    found = [run(base.model, **one) for one in arguments]
    assert len(made) == 1
    assert found[0].step_lengths == found[1].step_lengths == found[2].step_lengths


def test_more_tokens_are_another_decoder(made: list[Any]) -> None:
    """A model whose vocabulary was resized is not drafted for by tables of its former tokens."""
    base = tiny_base("llama", 1)
    run(base.model)
    base.model.resize_token_embeddings(base.vocab_size + 3)
    run(base.model)
    assert len(made) == 2


@pytest.mark.parametrize("name", ["drafter file", "plan of the drafter"])
def test_changed_drafter_is_read_again(
    name: str, base: Base, heads: MedusaHeads, drafter: Drafter, folder: Path, made: list[Any]
) -> None:
    """Another drafter in the file is used, or refused where the tree is not its own."""
    options = GIVEN[name](heads, drafter, folder)
    run(base.model, **options)
    run(base.model, **options)
    write(drafter, folder, nodes=2)
    found = run(base.model, **options)
    assert len(made) == 2
    if name == "plan of the drafter":
        assert max(map(max, found.step_draft_tokens)) == 1
    write(quick_drafter(base, heads, seed=5), folder)
    if name == "plan of the drafter":
        run(base.model, **options)
        assert len(made) == 3
    else:
        with pytest.raises(TreeoptError) as caught:
            run(base.model, **options)
        assert caught.value.code is Code.DRAFTER_MISMATCH


def test_changed_tree_is_read_again(base: Base, heads: MedusaHeads, folder: Path) -> None:
    """A tree file that was written again, or deleted, is not the one that is kept."""
    path = folder / "t.yaml"
    depths = []
    for depth in (1, 3, 3, 2):
        save_tree(Tree.chain(depth), path)
        depths.append(run(base.model, heads=heads, tree=path).tree_depth)
    assert depths == [1, 3, 3, 2]
    path.unlink()
    with pytest.raises(TreeoptError):
        run(base.model, heads=heads, tree=str(path))


def test_other_heads_are_not_used(base: Base, heads: MedusaHeads, made: list[Any]) -> None:
    """Other heads, and heads that were written to, give the steps that they give without anything kept."""
    half = cycle_heads(base, 3).to(torch.bfloat16)  # converted for the model, so a copy is kept
    for one in (heads, half):
        good = run(base.model, heads=one, tree=TREE).step_lengths
        with torch.no_grad():
            one.lm_head.copy_(random_heads(base, 3).lm_head)
        bad = run(base.model, heads=one, tree=TREE).step_lengths
        assert len(bad[0]) > len(good[0])
    assert len(made) == 4
    one.lm_head = torch.nn.Parameter(cycle_heads(base, 3).lm_head.detach().to(torch.bfloat16))
    assert run(base.model, heads=one, tree=TREE).step_lengths == good


def test_heads_follow_the_model(base: Base, heads: MedusaHeads, made: list[Any]) -> None:
    """After `model.to` the heads have the model's new dtype, and decoders of the old one are gone."""
    run(base.model, heads=heads, tree=TREE)
    base.model.to(torch.bfloat16)
    base.model.generate(PROMPT, max_new_tokens=NEW, custom_generate=tree_generate, heads=heads, tree=TREE)
    assert [one() is None for one in made] == [True, False]
    assert made[1]().trees.proposer.heads.weight.dtype == torch.bfloat16
    base.model.to(torch.float32)
    run(base.model, heads=heads, tree=TREE)
    assert len(made) == 3


@pytest.mark.parametrize("name", ["tree", "record", "nothing"])
def test_deleted_model_is_freed(name: str, folder: Path, drafter: Drafter, made: list[Any]) -> None:
    """A model that is deleted is freed at once, without the garbage collector, and so are its decoders."""
    base = cycle_base(disturbed=0.03)
    heads = cycle_heads(base, 3)
    run(base.model, **GIVEN[name](heads, drafter, folder))
    gone = weakref.ref(base.model)
    gc.collect()
    gc.disable()
    try:
        del base
        assert gone() is None
        assert made[0]() is None
    finally:
        gc.enable()


def test_objects_that_may_hold_the_model_are_not_kept(base: Base, heads: MedusaHeads, made: list[Any]) -> None:
    """A proposer holds its model, so nothing that was made with it is kept."""
    proposer = proposer_for(Base(base.model, None, ""), heads, None)
    for _ in range(2):
        run(base.model, tree=TREE, drafter=proposer)
    assert [one() for one in made] == [None, None]


def test_few_decoders_are_kept(base: Base, heads: MedusaHeads, made: list[Any]) -> None:
    """Of many trees the last used are kept."""
    chains = [Tree.from_paths([(rank,) for rank in range(n)]) for n in range(1, 7)]
    for tree in chains:
        run(base.model, heads=heads, tree=tree)
    assert [one() is not None for one in made] == [False] * 2 + [True] * module.MOST_KEPT
    run(base.model, heads=heads, tree=chains[2])
    run(base.model, heads=heads, tree=chains[0])
    assert len(made) == 7
    assert made[2]() is not None
    assert made[3]() is None


class Shift(LogitsProcessor):
    """Adds to one token's score."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores + torch.nn.functional.one_hot(torch.tensor(7), scores.shape[-1]) * 3.0


def test_processors_are_those_of_the_call(base: Base, heads: MedusaHeads, made: list[Any]) -> None:
    """The rule is that of each call, and is not kept."""
    plain = run(base.model, heads=heads, tree=TREE).sequences
    processor = Shift()
    given = {"do_sample": False, "max_new_tokens": NEW, "logits_processor": [processor]}
    tree = {"custom_generate": tree_generate, "heads": heads, "tree": TREE, "stateless_processors": [Shift]}
    found = base.model.generate(PROMPT, **given, **tree)
    assert found.equal(base.model.generate(PROMPT, **given))
    assert not found.equal(plain)
    gone = weakref.ref(processor)
    del processor, given
    gc.collect()
    assert gone() is None
    assert run(base.model, heads=heads, tree=TREE).sequences.equal(plain)
    assert len(made) == 1


class Failing(StoppingCriteria):
    """Fails at the fifth token."""

    def __call__(self, input_ids: Tensor, scores: Any, **_more: Any) -> Tensor:
        if input_ids.shape[1] > 8:
            raise KeyboardInterrupt
        return torch.zeros(len(input_ids), dtype=torch.bool)


def test_interrupted_call_keeps_nothing(base: Base, heads: MedusaHeads, made: list[Any]) -> None:
    """A decoder whose call was interrupted is not used again."""
    with pytest.raises(KeyboardInterrupt):
        base.model.generate(
            PROMPT,
            max_new_tokens=NEW,
            custom_generate=tree_generate,
            heads=heads,
            tree=TREE,
            stopping_criteria=[Failing()],
        )
    run(base.model, heads=heads, tree=TREE)
    assert len(made) == 2


class Meeting(StoppingCriteria):
    """Every thread waits for the others at every token, so their steps alternate."""

    def __init__(self, barrier: threading.Barrier) -> None:
        self.barrier = barrier

    def __call__(self, input_ids: Tensor, scores: Any, **_more: Any) -> Tensor:
        self.barrier.wait(timeout=60)
        return torch.zeros(len(input_ids), dtype=torch.bool)


def test_threads_share_no_decoder(heads: MedusaHeads, made: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls in two threads, whose steps alternate, use two decoders and give their texts; both are used again."""
    base = tiny_base("llama")
    used: list[int] = []
    prefill = TreeDecoder.prefill

    def noted(decoder: TreeDecoder, *given: Any) -> Any:
        used.append(id(decoder))
        return prefill(decoder, *given)

    monkeypatch.setattr(TreeDecoder, "prefill", noted)
    prompts = [torch.tensor([[3, 8]]), torch.arange(40)[None]]
    texts: dict[int, Tensor] = {}

    def call(number: int, barrier: threading.Barrier) -> None:
        texts[number] = base.model.generate(
            prompts[number],
            do_sample=False,
            max_new_tokens=NEW,
            custom_generate=tree_generate,
            heads=heads,
            tree=TREE,
            stopping_criteria=[Meeting(barrier)],
        )

    for _ in range(2):
        texts.clear()
        barrier = threading.Barrier(2)
        threads = [threading.Thread(target=call, args=(number, barrier)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for number, prompt in enumerate(prompts):
            assert texts[number].equal(base.model.generate(prompt, do_sample=False, max_new_tokens=NEW))
    assert len(made) == 2
    assert set(used[:2]) == set(used[2:]) == {id(one()) for one in made}
