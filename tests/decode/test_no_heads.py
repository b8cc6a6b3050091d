"""A drafter without heads (H = 0): the n-gram table and prompt lookup draft alone, through the same interface."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from drafters import answered, learned, planted, prompts_of

from treeopt.decode.decoder import TreeDecoder
from treeopt.drafter import Drafter, Level
from treeopt.errors import Code, TreeoptError
from treeopt.evaluate.runs import predict, trace
from treeopt.models.base import Base
from treeopt.policy import TreePolicy
from treeopt.texts.encode import Text
from treeopt.tree import Tree

NEW = 30
Made = tuple[Base, Drafter, list[Text]]


@pytest.fixture(scope="module")
def made() -> Made:
    """A model, a drafter without heads for it, and texts that were not counted."""
    base, heads = planted()
    drafter = learned(base, heads, answered(base, prompts_of(1, 24))).drafter
    levels = tuple(dataclasses.replace(level, head=0.0, ngram=1.0, prior=1.0) for level in drafter.levels)
    return base, dataclasses.replace(drafter, num_heads=0, levels=levels), answered(base, prompts_of(2, 5), NEW)


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_text_and_steps_without_heads(made: Made, kind: str) -> None:
    """The text is that of stock generate, in the predicted steps, alone and in a batch."""
    base, drafter, texts = made
    static = Tree.from_paths([(0,), (1,), (0, 0), (0, 1), (0, 0, 0), (0, 0, 0, 0)], drafter=drafter.id)
    plan = static if kind == "static" else TreePolicy(12, drafter.depth, drafter.id)
    decoder = TreeDecoder(base, None, plan, drafter=drafter)
    decoded = [decoder.generate(text.prompt, NEW) for text in texts]
    assert [one.tokens for one in decoded] == [text.answer for text in texts]
    predicted = predict(base, None, plan, texts, drafter)
    assert [len(one.step_lengths) for one in decoded] == predicted.steps_by_sequence().tolist()
    assert predicted.tokens_per_step > 1.2
    assert decoder.generate([text.prompt for text in texts], NEW) == decoded


def test_trace_without_heads(made: Made) -> None:
    """Traces have a column for each level of the record."""
    base, drafter, texts = made
    calibration = trace(base, None, texts, drafter, steps=drafter.depth)
    assert calibration.num_heads == drafter.depth
    assert calibration.provenance.heads_id == ""
    assert np.count_nonzero(calibration.ranks == 0) > 10


def test_a_record_with_heads_needs_them(made: Made) -> None:
    """A drafter whose record has heads is refused without them; one without heads is refused with them."""
    base, drafter, _ = made
    _, heads = planted()
    for given, record in ((None, dataclasses.replace(drafter, num_heads=3)), (heads, drafter)):
        with pytest.raises(TreeoptError) as caught:
            TreeDecoder(base, given, TreePolicy(8, 2, record.id), drafter=record)
        assert caught.value.code in (Code.TREE_TOO_DEEP, Code.DRAFTER_MISMATCH)


@pytest.mark.parametrize("levels", [0, 2])
def test_record_without_heads_needs_a_table(levels: int) -> None:
    """Levels without heads need an n-gram table, and there is at least one level."""
    with pytest.raises(TreeoptError) as caught:
        Drafter((Level(),) * levels, 0, 4)
    assert caught.value.code is Code.DRAFTER_INVALID
