"""Drafters and plans that do not go together are refused before anything is drafted."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from naive_draft import random_drafter
from tiny import random_heads, tiny_base

from treeopt.drafter import Drafter
from treeopt.drafting.interface import AcceptedPart
from treeopt.drafting.plans import proposer_for, trees_for
from treeopt.errors import Code, TreeoptError
from treeopt.models.base import Base
from treeopt.policy import TreePolicy
from treeopt.tree import Tree

VOCAB = 7


def bases() -> tuple[Base, Base]:
    """A model and its draft model."""
    return tiny_base("llama", vocab_size=VOCAB), tiny_base("llama", 1, vocab_size=VOCAB)


def drafter_of(draft: Base | None) -> Drafter:
    """A drafter without heads, for a draft model or for none."""
    _, drafter = random_drafter(np.random.default_rng(0), VOCAB, "voted", 200)
    return dataclasses.replace(drafter, num_heads=0, draft=draft.fingerprint if draft else "")


def test_draft_model_needs_its_record_and_no_heads() -> None:
    """Heads beside it, or no record, are a ValueError; a record that is made without one is E223."""
    base, draft = bases()
    record = drafter_of(draft)
    assert proposer_for(base, None, record, draft).depth == record.depth
    for heads, drafter in ((random_heads(base, 2), record), (None, None), (random_heads(base, 2), None)):
        with pytest.raises(ValueError, match="takes no heads"):
            proposer_for(base, heads, drafter, draft)
    with pytest.raises(TreeoptError) as caught:
        proposer_for(base, None, drafter_of(None), draft)
    assert caught.value.code is Code.DRAFTER_MISMATCH


def test_tree_without_anything_to_draft_by_is_refused() -> None:
    """Only the root alone needs neither heads nor a record (E101); with heads the same tree is taken."""
    base, _ = bases()
    assert trees_for(base, None, Tree(())).nodes == 1
    assert trees_for(base, random_heads(base, 2), Tree.chain(2)).nodes == 3
    with pytest.raises(TreeoptError, match="no heads were given") as caught:
        trees_for(base, None, Tree.chain(2))
    assert caught.value.code is Code.TREE_TOO_DEEP


def test_trees_beyond_the_drafter_are_refused() -> None:
    """Two heads over seven tokens draft two levels (E101) of seven ranks (E102)."""
    base, _ = bases()
    heads = random_heads(base, 2)
    assert trees_for(base, heads, Tree.from_paths([[6], [6, 0]])).nodes == 3
    for tree, code in ((Tree.chain(3), Code.TREE_TOO_DEEP), (Tree.from_paths([[7]]), Code.RANK_TOO_LARGE)):
        with pytest.raises(TreeoptError) as caught:
            trees_for(base, heads, tree)
        assert caught.value.code is code


def test_static_trees_of_heads_store_no_text() -> None:
    """Nothing is read, stored, marked or rewound on the host; where trees are chosen per step all of it is."""
    base, _ = bases()
    heads = random_heads(base, 2)
    kept = AcceptedPart([[3, 4]], None, None, None, None)  # type: ignore[arg-type]
    states = torch.zeros(1, base.hidden_size)
    static = trees_for(base, heads, Tree.chain(2)).start([[1, 2]])
    static.keep(kept)
    static.select([0])
    static.rewind(static.mark())
    assert static.mark() is None
    assert static.observe(states) is None
    assert "_scored" not in vars(static)
    drafter = Drafter.heads_only(2, 5)
    stepwise = trees_for(base, heads, TreePolicy(4, 2, drafter.id), drafter).start([[1, 2]])
    before = stepwise.mark()
    stepwise.keep(kept)
    assert [before[0].tolist(), stepwise.mark()[0].tolist()] == [[2], [4]]
    stepwise.rewind(before)
    assert stepwise.mark()[0].tolist() == [2]
    assert stepwise.observe(states) is not None
