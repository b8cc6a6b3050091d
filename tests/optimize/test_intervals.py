"""How sure a figure is: a bootstrap over texts against a naive one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from looped import looped
from numpy.typing import NDArray
from recipes import script
from scipy import stats

from treeopt.optimize import intervals
from treeopt.optimize.intervals import (
    LEVEL,
    Interval,
    by_text,
    difference_interval,
    prediction_interval,
    sampling_interval,
)

Ints = NDArray[np.int64]

ratio_interval = script("intervals").ratio_interval


def random_texts(rng: np.random.Generator, count: int) -> tuple[Ints, Ints]:
    """Tokens and steps of texts of different lengths, each with a pace of its own."""
    tokens = rng.integers(20, 120, count)
    pace = rng.normal(2.5, 0.4, count).clip(1.2, 4.0)
    return tokens, np.ceil(tokens / pace).astype(np.int64)


def width(interval: Interval | None) -> float:
    """From end to end."""
    assert interval is not None
    return interval.high - interval.low


def widened(drawn: Any, estimate: float, tokens: Ints) -> tuple[float, float]:
    """The 5 % and 95 % quantiles of draws, moved away from the estimate as few texts of these lengths need."""
    texts = tokens.sum() ** 2 / (tokens**2).sum()
    factor = stats.t(texts - 1).ppf(0.95) / stats.norm.ppf(0.95) * (texts / (texts - 1)) ** 0.5
    assert factor > 1
    low, high = np.quantile(drawn, [0.05, 0.95])
    return estimate - factor * (estimate - low), estimate + factor * (high - estimate)


def test_draws_equal_a_naive_bootstrap(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ends are the widened quantiles of tau over texts drawn one by one with replacement."""
    tokens, steps = random_texts(np.random.default_rng(0), 40)
    rng = np.random.default_rng(1)
    taus = []
    for _ in range(20_000):
        drawn = rng.integers(0, 40, 40)
        taus.append(tokens[drawn].sum() / steps[drawn].sum())
    low, high = widened(taus, tokens.sum() / steps.sum(), tokens)
    monkeypatch.setattr(intervals, "REPLICATES", 20_000)
    found = sampling_interval(tokens, steps)
    assert found is not None
    spread = high - low
    assert found.low == pytest.approx(low, abs=0.03 * spread)
    assert found.high == pytest.approx(high, abs=0.03 * spread)
    assert found.level == LEVEL == 0.9


def test_ends_of_five_texts_move_by_the_exact_factor() -> None:
    """With few texts the degrees of freedom and n/(n-1) show, which 40 texts hide in the noise of draws."""
    tokens, steps = random_texts(np.random.default_rng(2), 5)
    drawn = intervals._draw(tokens, steps)
    found = sampling_interval(tokens, steps)
    assert found is not None
    ends = widened(drawn, tokens.sum() / steps.sum(), tokens)
    assert (found.low, found.high) == pytest.approx(ends, rel=1e-9)


def test_prediction_equals_a_naive_difference_of_two_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """What will be measured = what was measured + the difference of two samples, of new and of the old texts."""
    tokens, steps = random_texts(np.random.default_rng(2), 40)
    rng = np.random.default_rng(3)

    def taus() -> NDArray[np.float64]:
        drawn = rng.integers(0, 40, (20_000, 40))
        ratio: NDArray[np.float64] = tokens[drawn].sum(axis=1) / steps[drawn].sum(axis=1)
        return ratio

    monkeypatch.setattr(intervals, "REPLICATES", 20_000)
    estimate = tokens.sum() / steps.sum()
    low, high = widened(estimate + taus() - taus(), estimate, tokens)
    found = prediction_interval(tokens, steps)
    assert found is not None
    assert found.low == pytest.approx(low, abs=0.03 * (high - low))
    assert found.high == pytest.approx(high, abs=0.03 * (high - low))


def test_equal_texts_are_summed_in_the_order_of_their_first() -> None:
    """Tokens and steps of equal texts add up to one text; texts that weigh nothing are left out."""
    tokens, steps = np.array([10, 20, 0, 30, 10, 5]), np.array([5, 8, 0, 9, 4, 5])
    found = by_text(["b", "a", "empty", "c", "b", "a"], tokens, steps, steps * 2)
    assert [each.tolist() for each in found] == [[20, 25, 30], [9, 13, 9], [18, 26, 18]]
    weighted = by_text(["x", "y", "x"], np.array([0.5, 0.0, 1.5]), np.array([0.25, 0.0, 1.0]))
    assert [each.tolist() for each in weighted] == [[2.0], [1.25]]
    light = by_text(["x", "y"], np.array([0.5, 0.25]), np.array([0.25, 0.125]))
    assert [each.tolist() for each in light] == [[0.5, 0.25], [0.25, 0.125]]


@looped("texts", [0, 1])
def test_below_two_texts_there_is_no_interval(texts: int) -> None:
    """One text, or none, does not say how texts vary; two say a little."""
    tokens, steps = random_texts(np.random.default_rng(12), 2)
    few = tokens[:texts], steps[:texts]
    assert sampling_interval(*few) is prediction_interval(*few) is difference_interval(*few, few[1]) is None
    assert width(sampling_interval(tokens, steps)) > 0
    assert width(prediction_interval(tokens, steps)) > 0


def test_text_that_outweighs_all_others_has_no_interval() -> None:
    """Where nearly all weight is on one text the others say nothing of how it would vary."""
    tokens, steps = np.array([100.0, 1.0, 1.0]), np.array([40.0, 0.5, 0.5])
    assert sampling_interval(tokens, steps) is prediction_interval(tokens, steps) is None
    tokens, steps = np.array([100.0, 30.0]), np.array([40.0, 15.0])  # 130^2 / (100^2 + 30^2) = 1.55
    assert width(sampling_interval(tokens, steps)) > 0
    assert sampling_interval(np.array([100.0, 25.0]), steps) is None  # 1.47


@looped("at_once", [1, 30 * 7, 1 << 22])
def test_there_are_as_many_draws_as_replicates(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many are drawn at once, each replicate is one figure, and each draws as many texts as are asked for."""
    monkeypatch.setattr("treeopt.optimize.intervals._DRAWN_AT_ONCE", at_once)
    tokens, steps = random_texts(np.random.default_rng(13), 30)
    monkeypatch.setattr(intervals, "REPLICATES", 100)
    figures = intervals._draw(tokens, steps)
    assert figures.shape == (100,)
    times = np.concatenate(list(intervals.resamples(30, 45, 0, 100)))
    assert times.shape == (100, 30)
    assert (times.sum(axis=1) == 45).all()


def test_ratio_equals_a_naive_paired_bootstrap() -> None:
    """Rows and texts are drawn one at a time; both trees are summed over the same draws."""
    rng = np.random.default_rng(4)
    tokens, steps = random_texts(rng, 30)
    tokens = np.stack([tokens] * 4)
    fewer = np.maximum(steps - rng.integers(0, 6, (4, 30)), 1)
    more = np.stack([steps] * 4)
    ratios = []
    for _ in range(20_000):
        rows, texts = rng.integers(0, 4, 4), rng.integers(0, 30, 30)
        chosen = np.ix_(rows, texts)
        ratios.append((tokens[chosen].sum() / fewer[chosen].sum()) / (tokens[chosen].sum() / more[chosen].sum()))
    low, high = widened(ratios, more.sum() / fewer.sum(), tokens[0])
    found = ratio_interval(tokens, fewer, tokens, more, replicates=20_000)
    assert found.low == pytest.approx(low, abs=0.04 * (high - low))
    assert found.high == pytest.approx(high, abs=0.04 * (high - low))


def test_ratio_of_equal_trees_is_exactly_one() -> None:
    """Resamples are paired, so the same steps twice leave no width; one text has no interval."""
    tokens, steps = random_texts(np.random.default_rng(5), 12)
    assert ratio_interval(tokens, steps, tokens, steps) == Interval(1.0, 1.0)
    assert ratio_interval(tokens, steps, tokens, 2 * steps) == Interval(2.0, 2.0)
    assert ratio_interval(tokens[:1], steps[:1], tokens[:1], steps[:1]) is None
