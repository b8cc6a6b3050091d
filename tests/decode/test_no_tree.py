"""Decoding without a tree: by the plan that a drafter recommends, or by a drafter that nothing was learned for."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from drafters import answered as answers_of
from drafters import learned, planted, prompts_of
from predicted import predict
from tiny import TREE_FAMILIES, random_heads, tiny_base

import treeopt
from treeopt.decode.decoder import TreeDecoder
from treeopt.drafter import Drafter
from treeopt.errors import Code, TreeoptError
from treeopt.evaluate.validate import validate
from treeopt.files.drafters import save_drafter
from treeopt.files.schedules import as_plan_for
from treeopt.models.base import Base
from treeopt.models.heads import MedusaHeads
from treeopt.policy import Plan, TreePolicy
from treeopt.texts.encode import Text
from treeopt.tree import Tree

NEW = 16
PATHS = ((0,), (1,), (0, 0), (0, 1), (0, 0, 0))
Models = tuple[Base, MedusaHeads, list[Text]]


@pytest.fixture(scope="module")
def models() -> Models:
    """A model, heads for it, and texts with its answers."""
    base, heads = planted()
    return base, heads, answers_of(base, prompts_of(3, 5), NEW)


def recommending(drafter: Drafter, kind: str) -> Drafter:
    """The drafter with a plan."""
    static = Tree.from_paths(PATHS, drafter=drafter.id)
    plan: Plan = static if kind == "static" else TreePolicy(12, drafter.depth, drafter.id)
    return dataclasses.replace(drafter, plan=plan)


@pytest.mark.parametrize("kind", ["static", "dynamic"])
@pytest.mark.parametrize("with_heads", [False, True])
def test_plan_of_the_drafter(models: Models, tmp_path: Path, kind: str, with_heads: bool) -> None:
    """The drafter as a record or a file gives stock's text, in the steps of its plan given as the tree."""
    base, heads, texts = models
    given = heads if with_heads else None
    made = learned(base, given, answers_of(base, prompts_of(1, 12)), levels=4).drafter
    drafter = recommending(made, kind)
    assert drafter.id == made.id
    save_drafter(drafter, tmp_path / "d.safetensors")
    wanted = TreeDecoder(base, given, drafter.plan, drafter=drafter).generate([text.prompt for text in texts], NEW)
    assert [one.tokens for one in wanted] == [text.answer for text in texts]
    assert sum(len(one.step_lengths) for one in wanted) < NEW * len(texts)
    for one in (drafter, tmp_path / "d.safetensors", str(tmp_path / "d.safetensors")):
        assert TreeDecoder(base, given, drafter=one).generate([text.prompt for text in texts], NEW) == wanted
        plan, record = as_plan_for(None, one)
        assert record is not None
        assert (plan, record.id) == (drafter.plan, drafter.id)
        ours = base.model.generate(
            torch.tensor([texts[0].prompt]),
            max_new_tokens=NEW,
            do_sample=False,
            custom_generate=treeopt.tree_generate,
            heads=given,
            drafter=one,
            return_dict_in_generate=True,
        )
        assert ours.sequences[0].tolist() == texts[0].prompt + texts[0].answer
        assert ours.step_lengths == (tuple(wanted[0].step_lengths),)


@pytest.mark.parametrize("family", TREE_FAMILIES)
def test_nothing_learned(family: str) -> None:
    """A model alone: stock's text, alone and in a batch, by per-step trees of 16 nodes from the text so far."""
    base = tiny_base(family, 3)
    base.model.generation_config.pad_token_id = 0
    repeated = [3, 8, 5, 21, 9] * 4
    texts = answers_of(base, [Text("set:0", repeated, []), Text("set:1", [7, 7, 2], [])], NEW)
    decoder = TreeDecoder(base)
    assert (decoder.trees.nodes, decoder.tree) == (16, None)
    decoded = decoder.generate([text.prompt for text in texts], NEW)
    assert [one.tokens for one in decoded] == [text.answer for text in texts]
    ours = base.model.generate(
        torch.tensor([repeated]), max_new_tokens=NEW, do_sample=False, custom_generate=treeopt.tree_generate
    )
    assert ours[0].tolist() == repeated + texts[0].answer


def test_nothing_learned_as_predicted(models: Models) -> None:
    """Replay predicts its steps, and a text that repeats itself takes fewer steps than tokens."""
    base, _, _ = models
    period = answers_of(base, prompts_of(5, 3), 61)
    texts = answers_of(base, [Text(one.prompt_id, one.prompt + one.answer, []) for one in period], 30)
    decoder = TreeDecoder(base)
    drafter = Drafter.untrained(base.vocab_size)
    policy = TreePolicy(16, drafter.depth, drafter.id)
    predicted = predict(base, None, policy, texts, drafter).sums.steps.tolist()
    assert [len(decoder.generate(text.prompt, 30).step_lengths) for text in texts] == predicted
    assert sum(predicted) < 60  # of 90 tokens


def test_heads_need_a_tree_or_a_drafter(models: Models) -> None:
    """Heads alone say nothing about the tree; validate without both is refused too."""
    base, heads, _ = models
    with pytest.raises(ValueError, match="tree"):
        TreeDecoder(base, heads)
    with pytest.raises(ValueError, match="give a tree, or a drafter"):
        validate(base, heads, None, prompts_of(1, 2))


def test_drafters_that_do_not_fit(models: Models, tmp_path: Path) -> None:
    """E223 for a drafter without a plan, of another vocabulary or of other heads; E101 where heads are missing."""
    base, heads, _ = models
    texts = answers_of(base, prompts_of(1, 8))
    made = learned(base, heads, texts).drafter
    save_drafter(made, tmp_path / "d.safetensors")
    other = tiny_base("llama", vocab_size=50)
    untrained = Drafter.untrained(base.vocab_size)
    plan = TreePolicy(8, untrained.depth, untrained.id)
    cases = (
        (base, heads, made, Code.DRAFTER_MISMATCH, "--tree FILE"),
        (base, heads, tmp_path / "d.safetensors", Code.DRAFTER_MISMATCH, "--tree FILE"),
        (other, None, dataclasses.replace(untrained, plan=plan), Code.DRAFTER_MISMATCH, "treeopt learn"),
        (base, None, recommending(made, "dynamic"), Code.TREE_TOO_DEEP, "load_heads"),
        (base, random_heads(base, 2), recommending(made, "static"), Code.DRAFTER_MISMATCH, "treeopt learn"),
    )
    for model, given, drafter, code, fix in cases:
        with pytest.raises(TreeoptError) as caught:
            TreeDecoder(model, given, drafter=drafter)
        assert caught.value.code is code
        assert fix in caught.value.fix
