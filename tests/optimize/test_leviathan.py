"""The formulas of speculative decoding against simulated acceptance, and against replay."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from helpers import make_calibration, random_calibration
from hypothesis import given, settings
from hypothesis import strategies as st

from treeopt.calibration import Calibration
from treeopt.optimize.leviathan import (
    MOST_DRAFTS,
    best_drafts,
    cost_ratio,
    expected_tokens,
    greedy_acceptance,
    predict_chains,
    replayed_chains,
    sampled_acceptance,
    speedup,
)
from treeopt.optimize.replay import replay
from treeopt.tree import Tree


def iid_traces(alpha: float, length: int, levels: int = 6) -> Calibration:
    """One long text; the best token is right at each position and level with probability alpha, whatever the others."""
    right = np.random.default_rng(0).random((length, levels)) < alpha
    return make_calibration([np.where(right, 0, 3)])


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.75, 1.0])
@pytest.mark.parametrize("drafts", [0, 1, 4])
def test_expected_tokens_are_those_of_simulated_steps(alpha: float, drafts: int) -> None:
    """A step accepts drafts until one is wrong, then takes one token of the target."""
    chance, steps, tokens = random.Random(1), 20_000, 0
    for _ in range(steps):
        accepted = 0
        while accepted < drafts and chance.random() < alpha:
            accepted += 1
        tokens += accepted + 1
    assert expected_tokens(alpha, drafts) == pytest.approx(tokens / steps, rel=0.02)


@given(st.floats(0.0, 0.999), st.integers(0, 40))
def test_expected_tokens_are_the_closed_form(alpha: float, drafts: int) -> None:
    """The sum is (1 - alpha^(g+1)) / (1 - alpha)."""
    assert expected_tokens(alpha, drafts) == pytest.approx((1 - alpha ** (drafts + 1)) / (1 - alpha))


def test_ends_of_the_acceptance_rate() -> None:
    """No draft accepted: one token. All accepted: all drafts and one. Nearly all: nearly as many."""
    assert [expected_tokens(0.0, drafts) for drafts in (0, 1, 9)] == [1.0, 1.0, 1.0]
    assert [expected_tokens(1.0, drafts) for drafts in (0, 1, 9)] == [1.0, 2.0, 10.0]
    assert expected_tokens(1 - 1e-16, 9) == pytest.approx(10.0)


def test_speedup_by_hand() -> None:
    """Two drafts at alpha 0.5 give 1.75 tokens; at c = 0.125 the step takes 1.25 target forwards."""
    assert speedup(0.5, 2, 0.125) == pytest.approx(1.4)
    assert speedup(0.5, 2, 0.0) == 1.75
    assert speedup(1.0, 3, 1.0) == 1.0
    assert speedup(0.0, 4, 0.25) == 0.5


@settings(deadline=None)
@given(st.floats(0.0, 1.0), st.floats(0.0, 2.0))
def test_best_drafts_is_the_greatest_speedup(alpha: float, cost: float) -> None:
    """No other length is faster, no shorter one as fast; a draft pays exactly where alpha is above c (theorem 3.8)."""
    found = best_drafts(alpha, cost)
    by_length = [1.0, *(speedup(alpha, drafts, cost) for drafts in range(1, MOST_DRAFTS + 1))]
    assert found == int(np.argmax(by_length))
    if abs(alpha - cost) > 1e-9:
        assert (found > 0) == (alpha > cost)


def test_best_drafts_at_the_ends() -> None:
    """Drafts that are free or always right are as many as there may be; worthless ones are none."""
    assert best_drafts(0.5, 0.0) == MOST_DRAFTS
    assert best_drafts(1.0, 0.5) == MOST_DRAFTS
    assert best_drafts(0.0, 0.0) == best_drafts(1.0, 1.0) == best_drafts(0.3, 0.3) == 0
    assert best_drafts(0.9, 0.01, most=3) == 3


def test_sampled_acceptance_by_hand_and_by_rejection() -> None:
    """sum min(p, q) is the share of draws from q that rejection with min(1, p / q) accepts."""
    p, q = np.array([[0.5, 0.3, 0.2], [1.0, 0.0, 0.0]]), np.array([[0.2, 0.3, 0.5], [0.0, 0.5, 0.5]])
    assert sampled_acceptance(p[:1], q[:1]) == pytest.approx(0.7)
    assert sampled_acceptance(p, q) == pytest.approx(0.35)
    assert sampled_acceptance(p, p) == 1.0
    assert sampled_acceptance(p * 1.0005, p * 1.0005) == 1.0  # rows may be rounded
    chance = np.random.default_rng(0)
    drawn = chance.choice(3, size=40_000, p=q[0])
    kept = chance.random(40_000) < p[0, drawn] / q[0, drawn]
    assert kept.mean() == pytest.approx(sampled_acceptance(p[:1], q[:1]), abs=0.01)


def test_greedy_acceptance_counts_positions_with_a_next_token() -> None:
    """Of two texts of 3 and 2 tokens three positions have a next token; two of these drafts are right."""
    table = [np.array([[0], [2], [0]]), np.array([[0], [0]])]
    assert greedy_acceptance(make_calibration(table)) == pytest.approx(2 / 3)
    assert greedy_acceptance(make_calibration([np.zeros((1, 1), int)])) == 0.0  # one token: no draft


def test_replayed_chains_are_replays_of_chains() -> None:
    """Each figure is that of `replay` with a chain of that many drafts."""
    calibration = random_calibration(4)
    found = replayed_chains(calibration)
    assert found.tolist() == [replay(Tree.chain(g), calibration).tokens_per_step for g in range(1, 5)]


@pytest.mark.parametrize("alpha", [0.2, 0.6, 0.9])
def test_formula_and_replay_agree_on_independent_drafts(alpha: float) -> None:
    """Where drafts are right independently of each other, replay gives the formula's tokens per step."""
    found = predict_chains(iid_traces(alpha, 200_000), 0.1)
    assert found.alpha == pytest.approx(alpha, abs=0.005)
    for chain in found.chains[:6]:
        assert chain.replayed_tokens_per_step == pytest.approx(chain.tokens_per_step, rel=0.01)
        assert chain.replayed_speedup == pytest.approx(chain.speedup, rel=0.01)
    assert [chain.drafts for chain in found.chains] == list(range(1, MOST_DRAFTS + 1))
    assert all(chain.replayed_speedup is None for chain in found.chains[6:])
    assert found.best_drafts == best_drafts(found.alpha, 0.1)
    if found.best_drafts <= 6:
        assert found.chain(found.best_replayed_drafts).speedup == pytest.approx(
            found.chain(found.best_drafts).speedup, rel=0.01
        )


def test_replay_differs_where_drafts_depend_on_each_other() -> None:
    """Texts that are either easy or hard have fewer tokens per step by replay than the formula says for short chains.

    Half of the positions are always right and half never, in long stretches: alpha is 0.5.
    """
    length, levels = 4000, 6
    ahead = np.arange(length)[:, None] + np.arange(1, levels + 1)
    found = predict_chains(make_calibration([np.where(ahead // 200 % 2 == 0, 0, 3)]), 0.02)
    assert found.alpha == pytest.approx(0.5, abs=0.01)
    one = found.chain(1)
    assert one.tokens_per_step == pytest.approx(1.5, abs=0.01)
    assert one.replayed_tokens_per_step == pytest.approx(4 / 3, abs=0.01)  # 2 tokens a step on half of the text
    six = found.chain(6)
    assert six.replayed_tokens_per_step == pytest.approx(1.75, abs=0.02)  # 2 / (1 + 1/7)
    assert (found.best_drafts, found.best_replayed_drafts) == (4, 6)


def test_given_rate_replaces_that_of_the_traces() -> None:
    """The rate of sampled decoding comes from the distributions; replay stays that of the traces."""
    calibration = random_calibration(4)
    found, usual = predict_chains(calibration, 0.2, 0.9), predict_chains(calibration, 0.2)
    assert (found.alpha, found.chain(1).tokens_per_step) == (0.9, 1.9)
    assert [c.replayed_speedup for c in found.chains] == [c.replayed_speedup for c in usual.chains]


def test_nothing_that_pays_is_zero_drafts() -> None:
    """A draft model as slow as its target never pays."""
    found = predict_chains(random_calibration(4), 1.0)
    assert (found.best_drafts, found.best_replayed_drafts) == (0, 0)


@pytest.mark.parametrize(
    "call",
    [
        lambda: expected_tokens(-0.1, 1),
        lambda: expected_tokens(1.1, 1),
        lambda: expected_tokens(math.nan, 1),
        lambda: expected_tokens(0.5, -1),
        lambda: speedup(0.5, 1, -0.1),
        lambda: speedup(0.5, 1, math.inf),
        lambda: cost_ratio(-1.0, 1.0),
        lambda: cost_ratio(1.0, 0.0),
        lambda: sampled_acceptance(np.ones((1, 2)) / 2, np.ones((1, 3)) / 3),
        lambda: sampled_acceptance(np.ones((1, 2)), np.ones((1, 2)) / 2),
        lambda: sampled_acceptance(np.ones((0, 2)), np.ones((0, 2))),
    ],
)
def test_numbers_out_of_range_are_refused(call: object) -> None:
    with pytest.raises(ValueError, match=r"."):
        call()  # type: ignore[operator]


def test_cost_ratio_by_hand() -> None:
    assert cost_ratio(0.002, 0.008) == 0.25
