"""Isotonic regression: equal to pooling of adjacent violators, and exact where nothing rises."""

from __future__ import annotations

import numpy as np
from helpers import pooled
from hypothesis import given
from hypothesis import strategies as st
from looped import looped

from treeopt.optimize.values import falling_rows, isotonic


@given(st.lists(st.tuples(st.floats(0.0, 1e6), st.integers(1, 5)), min_size=1, max_size=12))
def test_isotonic_equals_pooling(pairs: list[tuple[float, int]]) -> None:
    """A weight is as many equal values; a rising sequence is the falling one of the reversed values."""
    values, weights = (np.array(column, np.float64) for column in zip(*pairs, strict=True))
    last = np.cumsum(weights).astype(np.int64) - 1
    repeated = np.repeat(values, weights.astype(np.int64)).tolist()
    fallen = np.array(pooled(repeated))[last]
    np.testing.assert_allclose(isotonic(values, weights, increasing=False), fallen, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(isotonic(values[::-1], weights[::-1])[::-1], fallen, rtol=1e-9, atol=1e-9)


@looped("width", [1, 2, 3, 7, 32])
def test_falling_equals_pooling(width: int) -> None:
    """Each row becomes the nearest row that never rises, whatever the other rows are."""
    rng = np.random.default_rng(width)
    rows = rng.random((40, width)) * (rng.random((40, width)) < 0.7)
    fitted = falling_rows(rows)
    np.testing.assert_allclose(fitted, [pooled(row) for row in rows.tolist()], rtol=1e-9, atol=1e-12)
    assert (fitted[:, 1:] <= fitted[:, :-1]).all()
    assert np.array_equal(np.concatenate([falling_rows(rows[:7]), falling_rows(rows[7:])]), fitted)


def test_falling_keeps_zeros_exact() -> None:
    """Zeros at the end of a row stay exactly 0: growth leaves out nodes of value 0."""
    rows = np.random.default_rng(1).random((50, 12))
    rows[:, 7:] = 0.0
    assert (falling_rows(rows)[:, 7:] == 0.0).all()


def by_extremes(values: list[float]) -> list[float]:
    """Isotonic regression by its min-max formula: at i the least, over ends, of the greatest mean of any stretch."""
    n = len(values)
    return [min(max(float(np.mean(values[a : b + 1])) for a in range(i + 1)) for b in range(i, n)) for i in range(n)]


def test_known_cases() -> None:
    """Violators are pooled, as far back as needed; ascending values stay."""
    cases = [
        ([2.0], [2.0]),
        ([1.0, 3.0, 2.0, 4.0], [1.0, 2.5, 2.5, 4.0]),
        ([3.0, 2.0, 1.0], [2.0, 2.0, 2.0]),
        ([1.0, 4.0, 5.0, 0.0], [1.0, 3.0, 3.0, 3.0]),
        ([1.0, 1.0, 2.0], [1.0, 1.0, 2.0]),
    ]
    for values, expected in cases:
        assert isotonic(np.array(values)).tolist() == expected


@given(st.lists(st.floats(0.001, 10.0), min_size=1, max_size=12))
def test_equals_the_min_max_formula(values: list[float]) -> None:
    """Any sequence becomes the one of the min-max formula, and never decreases."""
    smooth = isotonic(np.array(values))
    np.testing.assert_allclose(smooth, by_extremes(values), rtol=1e-12)
    assert np.all(np.diff(smooth) >= 0)
