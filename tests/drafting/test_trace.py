"""Traces of drafters: every position as the step that might begin there, whatever the pieces it is worked on in."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from drafters import answered, learned, planted, prompts_of
from kernel_scorer import listed
from looped import looped
from tiny import VOCAB

from treeopt.defaults import STEP_SIZES
from treeopt.drafter import Drafter
from treeopt.drafting.heads import HeadsProposer
from treeopt.drafting.ngram import RecordProposer
from treeopt.drafting.plans import proposer_for
from treeopt.drafting.trace import trace_texts
from treeopt.texts.hidden_states import hidden_states
from treeopt.traces import MISS, NONE


def test_ranks_of_heads_drafter_are_those_of_the_heads() -> None:
    """A drafter without corrections ranks as the heads alone do, up to its candidates."""
    base, heads = planted()
    texts = answered(base, prompts_of(0, 5))
    for top in (VOCAB, 3):
        traced = trace_texts(base, [HeadsProposer(base, heads, Drafter.heads_only(3, top))] * 5, texts, 253)
        for one, other in zip(traced, trace_texts(base, [HeadsProposer(base, heads)] * 5, texts, 253), strict=True):
            ranks = other.ranks
            np.testing.assert_array_equal(one.ranks, np.where((ranks >= top) & (ranks != NONE), MISS, ranks))
            assert one.steps is None


def test_ranks_on_the_device_are_those_of_the_candidates() -> None:
    """The heads' ranks, found without sorting, are the places among their candidates."""
    base, heads = planted()
    texts = answered(base, prompts_of(0, 4))
    fast = HeadsProposer(base, heads)
    pairs = zip(*(trace_texts(base, [one] * 4, texts, 253) for one in (fast, fast.by_probability)), strict=True)
    assert all(np.array_equal(one.ranks, other.ranks) for one, other in pairs)


def test_ranks_position_by_position() -> None:
    """Each rank is the true token's place among the candidates that one step alone gives it, after the true tokens."""
    base, heads = planted()
    texts = answered(base, prompts_of(0, 10))
    drafter = learned(base, heads, texts).drafter
    proposer = RecordProposer(base, heads, drafter)
    [text] = answered(base, prompts_of(9, 1))
    [traced] = trace_texts(base, [proposer], [text], 5, step_depth=drafter.depth)
    [hidden] = hidden_states(base, [text])
    assert traced.steps is not None
    for i in range(len(text.answer)):
        session = proposer.start([[*text.prompt, *text.answer[: i + 1]]], drafter.depth)
        with torch.inference_mode():
            session.begin(torch.tensor(text.answer[i : i + 1]), hidden[i : i + 1])
        after = text.answer[i + 1 :][: drafter.depth]
        for level, token in enumerate(after):
            found, likely = listed(session, after[:level])
            rank = found.index(token) if token in found else 99
            assert traced.ranks[i, level] == (rank if rank < 5 else MISS)
            assert traced.steps.confidence[i, level] == pytest.approx(likely, rel=2e-3)
        tree = session.expand(254, drafter.depth)
        total = 1 + np.exp(tree.log_probability[0].astype(np.float64)).cumsum()
        wanted = [1.0, *(total[min(size - 1, len(total)) - 1] for size in STEP_SIZES[1:])]
        np.testing.assert_allclose(traced.steps.expected_tokens[i], wanted, rtol=1e-5)


@looped("piece", [1, 3, 256])
def test_pieces_change_nothing(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts traced together and a few positions at a time have the traces of one text alone."""
    base, heads = planted()
    texts = answered(base, prompts_of(0, 6))
    drafter = learned(base, heads, texts).drafter
    proposer = RecordProposer(base, heads, drafter)
    alone = [trace_texts(base, [proposer], [text], 253, step_depth=5)[0] for text in texts]
    monkeypatch.setattr(proposer, "rows_at_once", piece)
    for one, other in zip(trace_texts(base, [proposer] * 6, texts, 253, step_depth=5), alone, strict=True):
        np.testing.assert_array_equal(one.ranks, other.ranks)
        assert one.steps is not None
        assert other.steps is not None
        np.testing.assert_array_equal(one.steps.node_rank, other.steps.node_rank)


def test_each_text_has_its_own_model() -> None:
    """Texts of one batch are traced by the models that stand at their places."""
    base, heads = planted()
    texts = answered(base, prompts_of(0, 2))
    proposers = [proposer_for(base, heads, Drafter.heads_only(3, top)) for top in (VOCAB, 1)]
    first, second = trace_texts(base, proposers, texts, 253)
    assert set(np.unique(second.ranks)) <= {0, MISS, NONE}
    assert ((first.ranks > 0) & (first.ranks < MISS)).any()


def test_answer_of_one_token() -> None:
    """There is nothing to draft behind it."""
    base, heads = planted()
    text = dataclasses.replace(prompts_of(0, 1)[0], answer=[3])
    [traced] = trace_texts(base, [HeadsProposer(base, heads, Drafter.heads_only(3, 4))], [text], 253, step_depth=3)
    assert traced.steps is not None
    assert traced.ranks.tolist() == traced.steps.node_rank.tolist() == [[NONE] * 3]
