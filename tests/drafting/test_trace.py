"""Traces of drafters: every position as a step that may begin there, and the target's probabilities of candidates."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from drafters import answered, learned, planted, prompts_of
from kernel_scorer import listed
from looped import looped
from tiny import VOCAB, random_heads, tiny_base

from treeopt.decode.rules import Sample
from treeopt.defaults import STEP_SIZES
from treeopt.drafter import Drafter
from treeopt.drafting.heads import HeadsProposer
from treeopt.drafting.interface import Proposer
from treeopt.drafting.ngram import RecordProposer
from treeopt.drafting.plans import proposer_for
from treeopt.drafting.trace import Target, TextTraces, trace_texts
from treeopt.models.base import Base
from treeopt.texts.answers import hidden_states
from treeopt.texts.encode import Text
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


@pytest.mark.slow
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


TEMPERATURE = 0.6
COUNT = 7
EXACT = {"rtol": 2**-10, "atol": 2**-23}  # of float16


def distribution(base: Base, text: Text, place: int) -> np.ndarray:
    """The model's probabilities of answer token `place` after the text before it, at `TEMPERATURE`."""
    ids = torch.tensor([[*text.prompt, *text.answer[:place]]])
    with torch.inference_mode():
        logits = base.model(ids).logits[0, -1].double()
    return (logits / TEMPERATURE).softmax(-1).numpy()


def check_probabilities(base: Base, text: Text, traced: TextTraces, candidates: np.ndarray) -> None:
    """Compare each probability with that of the token in candidates int64 [G, L, R]; 0 for -1 and past the end."""
    assert traced.target is not None
    found, length = traced.target.probability, len(text.answer)
    assert found.shape == candidates.shape
    rows = [distribution(base, text, place) for place in range(length)]
    for i, level in np.ndindex(*candidates.shape[:2]):
        place = i + level + 1
        tokens = candidates[i, level]
        wanted = np.where(tokens < 0, 0, rows[place][tokens]) if place < length else np.zeros(len(tokens))
        np.testing.assert_allclose(found[i, level], wanted, **EXACT)


@looped("family", ["llama", "gemma2", "gpt2", "qwen2-mixed"])
def test_probabilities_of_heads_candidates(family: str) -> None:
    """Level h's candidates are head h's likeliest tokens; the probability is that after the true tokens before.

    gemma2 caps its logits, so its LM head alone would give other probabilities.
    """
    base = tiny_base(family)
    heads = random_heads(base, 3)
    [text] = answered(base, prompts_of(1, 1), 9)
    target = Target.at_temperature(TEMPERATURE, COUNT)
    assert target.count == COUNT
    [traced] = trace_texts(base, [HeadsProposer(base, heads)], [text], 253, target=target)
    [states] = hidden_states(base, [text])
    with torch.inference_mode():
        logits = heads(states, base.lm_head, 3).numpy()
    order = np.argsort(-logits, axis=-1, kind="stable")[:, :, :COUNT]
    check_probabilities(base, text, traced, order.transpose(1, 0, 2))


@looped("with_heads", [True, False])
def test_probabilities_and_places_of_drafter_candidates(with_heads: bool) -> None:
    """With an n-gram table, candidates are those of a step after the true tokens, and places those in its tree."""
    base, heads = planted()
    used = heads if with_heads else None
    drafter = learned(base, used, answered(base, prompts_of(0, 10))).drafter
    proposer = proposer_for(base, used, drafter)
    [text] = answered(base, prompts_of(9, 1))
    target = Target.at_temperature(TEMPERATURE, COUNT)
    [traced] = trace_texts(base, [proposer], [text], 253, step_depth=drafter.depth, target=target)
    assert traced.target is not None
    assert traced.target.places is not None
    assert traced.steps is not None
    candidates = np.full((len(text.answer), drafter.depth, COUNT), -1)
    [hidden] = hidden_states(base, [text])
    for i in range(len(text.answer)):
        session = proposer.start([[*text.prompt, *text.answer[: i + 1]]], drafter.depth)
        with torch.inference_mode():
            session.begin(torch.tensor(text.answer[i : i + 1]), hidden[i : i + 1])
        tree = session.expand(254, drafter.depth)
        after = text.answer[i + 1 :][: drafter.depth]
        for level in range(len(after)):
            tokens = listed(session, after[:level])[0][:COUNT]
            candidates[i, level, : len(tokens)] = tokens
            parent = node_of(tree.tokens[0], tree.parents[0], after[:level])
            for rank, token in enumerate(tokens):
                node = None if parent is None else child_of(tree.tokens[0], tree.parents[0], parent, token)
                wanted = MISS if node is None or node > 253 else node
                assert traced.target.places[i, level, rank] == wanted
    check_probabilities(base, text, traced, candidates)
    hit = (traced.ranks < COUNT) & (traced.ranks != NONE)
    assert hit.sum() > 20
    row, level = np.nonzero(hit)
    assert np.array_equal(
        traced.target.places[row, level, traced.ranks[row, level]], traced.steps.node_rank[row, level]
    )


def child_of(tokens: np.ndarray, parents: np.ndarray, parent: int, token: int) -> int | None:
    """The node below a parent with this token; nodes count from 1, the root is 0."""
    found = [i + 1 for i in range(len(tokens)) if parents[i] == parent and tokens[i] == token]
    return found[0] if found else None


def node_of(tokens: np.ndarray, parents: np.ndarray, path: list[int]) -> int | None:
    """The node of a path of tokens."""
    node: int | None = 0
    for token in path:
        node = None if node is None else child_of(tokens, parents, node, token)
    return node


def test_probabilities_under_top_k_and_top_p() -> None:
    """The target is what the rule samples from: the tokens that top-k and top-p leave out have probability 0."""
    base, heads = planted()
    [text] = answered(base, prompts_of(3, 1), 8)
    rule = Sample(temperature=TEMPERATURE, top_k=4, top_p=0.9)
    [traced] = trace_texts(base, [HeadsProposer(base, heads)], [text], 253, target=Target(rule.scores, VOCAB))
    assert traced.target is not None
    inside = np.isin(np.arange(1, 1 + heads.num_heads)[None] + np.arange(8)[:, None], np.arange(8))
    total = traced.target.probability.sum(axis=2, dtype=np.float32)
    np.testing.assert_allclose(total, inside, atol=2e-3)  # all tokens are candidates
    assert ((traced.target.probability > 0).sum(axis=2)[inside] <= 4).all()


@pytest.mark.slow
@looped("piece", [1, 5])
def test_pieces_change_nothing_of_target_trace(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few positions at a time have the candidates and places of all at once; five candidates fill five columns."""
    base, heads = planted()
    texts = answered(base, prompts_of(0, 5))
    drafter = learned(base, heads, texts).drafter
    target = Target.at_temperature(TEMPERATURE, COUNT)
    five = HeadsProposer(base, heads, Drafter.heads_only(3, 5))
    proposers: list[Proposer] = [RecordProposer(base, heads, drafter), five]
    for proposer in proposers:
        depth = proposer.depth
        whole = trace_texts(base, [proposer] * 5, texts, 253, step_depth=depth, target=target)
        monkeypatch.setattr(proposer, "rows_at_once", piece)
        parts = trace_texts(base, [proposer] * 5, texts, 253, step_depth=depth, target=target)
        for one, other in zip(parts, whole, strict=True):
            assert one.target is not None
            assert other.target is not None
            np.testing.assert_array_equal(one.target.probability, other.target.probability)
            if proposer is not five:  # its nodes are nearly tied: one row's matrix product rounds differently
                np.testing.assert_array_equal(one.target.places, other.target.places)
            assert one.target.probability[:, :, 5:].any() == (proposer is not five)
