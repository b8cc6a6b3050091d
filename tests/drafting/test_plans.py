"""Drafters and plans that do not go together are refused before anything is drafted."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from naive_draft import random_drafter
from tiny import random_heads, tiny_base

from treeopt.drafter import Drafter
from treeopt.drafting.plans import proposer_for, trees_for
from treeopt.errors import Code, TreeoptError
from treeopt.models.base import Base
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
