"""Shorter chains from the counts of a longer one, beside the same chains over sequences of right and wrong drafts."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from looped import looped
from refusals import refusal_of

from treeopt.errors import Code
from treeopt.optimize.chains import MeasuredAcceptance, mean_acceptance
from treeopt.optimize.counters import ALLOWANCE, estimate_chains


def counted(right: Sequence[bool], drafts: int) -> list[int]:
    """Steps by accepted drafts of a chain over a text, of whose tokens it is known whether the drafter has them."""
    counts = [0] * (drafts + 1)
    root = 0
    while root < len(right):
        accepted = 0
        while accepted < drafts and root + 1 + accepted < len(right) and right[root + 1 + accepted]:
            accepted += 1
        counts[accepted] += 1
        root += accepted + 1
    return counts


def drawn(after_wrong: float, after_right: float, tokens: int = 30_000) -> list[bool]:
    """Tokens whose chance of being right depends on the token before."""
    chance = random.Random(5)
    text = [False]
    for _ in range(tokens):
        text.append(chance.random() < (after_right if text[-1] else after_wrong))
    return text


def of_counts(counts: Sequence[int]) -> MeasuredAcceptance:
    return MeasuredAcceptance(mean_acceptance(counts), tuple(counts))


@looped("after_wrong, after_right", [(0.5, 0.5), (0.2, 0.8), (0.9, 0.97)])
@looped("longest", [5, 3])
def test_shorter_chains_are_those_of_the_same_text(after_wrong: float, after_right: float, longest: int) -> None:
    """Where a draft's chance depends on the token before, one chain's counts give the shorter ones to 1 %."""
    text = drawn(after_wrong, after_right)
    found = estimate_chains(of_counts(counted(text, longest)))
    for drafts in range(1, longest + 1):
        run = mean_acceptance(counted(text, drafts))
        assert found.tokens[drafts] == pytest.approx(run, rel=0.01)
        assert found.chains[drafts].low <= run <= found.chains[drafts].high
        assert found.chains[drafts].drafts == drafts


def test_sum_over_positions_is_lower() -> None:
    """Where right tokens follow each other, 1 + sum of P(>= d) of the longer chain is below the shorter ones."""
    text = drawn(0.3, 0.85)
    counts = counted(text, 6)
    found = estimate_chains(of_counts(counts))
    for drafts in (1, 2, 3):
        run = mean_acceptance(counted(text, drafts))
        assert 1 + sum(found.rates[:drafts]) < run * 0.97
        assert abs(found.tokens[drafts] / run - 1) < 0.01


def test_chain_of_all_drafts_is_the_measured_one() -> None:
    """Its mean is the engine's, and its interval has no allowance for an estimate."""
    counts = [40_000, 20_000, 10_000, 30_000]
    found = estimate_chains(of_counts(counts))
    last, before = found.chains[-1], found.chains[-2]
    assert last.tokens_per_step == mean_acceptance(counts) == pytest.approx(2.3)
    assert last.high - last.low < 0.06
    assert before.high - before.low >= 2 * ALLOWANCE * before.tokens_per_step
    assert (found.steps, found.longest) == (100_000, 3)
    assert found.rates == pytest.approx((0.6, 0.4, 0.3))
    assert found.last_rate == pytest.approx(0.3)


def test_all_accepted_and_none_accepted() -> None:
    """Chains of k drafts have k + 1 tokens a step, or one."""
    assert estimate_chains(of_counts([0, 0, 0, 0, 5000])).tokens == pytest.approx((1, 2, 3, 4, 5))
    assert estimate_chains(of_counts([5000, 0, 0, 0, 0])).tokens == pytest.approx((1, 1, 1, 1, 1))


def test_one_draft_gives_itself_and_none() -> None:
    """K = 1: the chains are none and the measured one; a histogram without accepted drafts keeps its length."""
    found = estimate_chains(of_counts([60, 40]))
    assert found.tokens == (1.0, pytest.approx(1.4))
    assert (found.chains[0].low, found.chains[0].high) == (1.0, 1.0)
    assert estimate_chains(of_counts([9])).tokens == (1.0,)


@settings(max_examples=10, deadline=None)
@given(st.lists(st.integers(0, 500), min_size=2, max_size=6).filter(any))
def test_figures_are_in_order(counts: list[int]) -> None:
    """More drafts have no fewer tokens a step and at most k + 1, and each interval holds its figure."""
    found = estimate_chains(of_counts(counts))
    assert list(found.tokens) == pytest.approx(sorted(found.tokens))
    for one in found.chains:
        assert 1.0 <= one.low <= one.tokens_per_step + 1e-9
        assert one.tokens_per_step - 1e-9 <= one.high <= one.drafts + 1 + 1e-9


def test_more_steps_have_narrower_intervals() -> None:
    """The width beyond the allowance falls with the root of the steps."""
    one, other = (estimate_chains(of_counts([6 * n, 3 * n, n, 2 * n])).chains[2] for n in (40, 4000))
    widths = [(found.high - found.low) / 2 / found.tokens_per_step for found in (one, other)]
    spread = [(width**2 - ALLOWANCE**2) ** 0.5 for width in widths]
    assert spread[0] / spread[1] == pytest.approx(10, rel=0.2)
    assert ALLOWANCE < widths[1] < 0.05


def test_whether_the_chain_was_too_short() -> None:
    """It was where the longest is the fastest, or, without step times, where steps still accept all drafts."""
    found = estimate_chains(of_counts([50, 30, 20]))
    assert found.too_short(2)
    assert not found.too_short(1)
    assert found.too_short(None)
    assert not estimate_chains(of_counts([500, 300, 1])).too_short(None)


def test_mean_alone_is_refused() -> None:
    """Shorter chains need counts."""
    error = refusal_of(estimate_chains, MeasuredAcceptance(2.5, None))
    assert error.code is Code.FILE_INVALID
    assert "by position" in error.what
