"""Isotonic regression: equal to pooling of adjacent violators, and exact where nothing rises."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import pooled
from hypothesis import given
from hypothesis import strategies as st

from treeopt.optimize.isotonic import falling_rows, isotonic


@given(st.lists(st.tuples(st.floats(0.0, 1e6), st.integers(1, 5)), min_size=1, max_size=12))
def test_isotonic_equals_pooling(pairs: list[tuple[float, int]]) -> None:
    """A weight is as many equal values; a rising sequence is the falling one of the reversed values."""
    values, weights = (np.array(column, np.float64) for column in zip(*pairs, strict=True))
    last = np.cumsum(weights).astype(np.int64) - 1
    repeated = np.repeat(values, weights.astype(np.int64)).tolist()
    fallen = np.array(pooled(repeated))[last]
    np.testing.assert_allclose(isotonic(values, weights, increasing=False), fallen, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(isotonic(values[::-1], weights[::-1])[::-1], fallen, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("width", [1, 2, 3, 7, 32])
def test_falling_equals_pooling(width: int) -> None:
    """Each row becomes the nearest row that never rises, whatever the other rows are."""
    rng = np.random.default_rng(width)
    rows = rng.random((40, width)) * (rng.random((40, width)) < 0.7)
    fitted = falling_rows(rows)
    np.testing.assert_allclose(fitted, [pooled(row) for row in rows.tolist()], rtol=1e-9, atol=1e-12)
    assert (fitted[:, 1:] <= fitted[:, :-1]).all()
    assert np.array_equal(np.concatenate([falling_rows(rows[:7]), falling_rows(rows[7:])]), fitted)


def test_falling_again_changes_nothing() -> None:
    """Smoothed rows, and rows that fall from the start, stay as they are."""
    rows = np.random.default_rng(0).random((20, 9))
    once = falling_rows(rows)
    assert np.array_equal(falling_rows(once), once)
    ordered = -np.sort(-rows, axis=1)
    assert np.array_equal(falling_rows(ordered), ordered)
    assert falling_rows(np.array([[1.0, 3.0, 2.0, 0.0]])).tolist() == [[2.0, 2.0, 2.0, 0.0]]


def test_falling_keeps_zeros_exact() -> None:
    """Zeros at the end of a row stay exactly 0: growth leaves out nodes of value 0."""
    rows = np.random.default_rng(1).random((50, 12))
    rows[:, 7:] = 0.0
    assert (falling_rows(rows)[:, 7:] == 0.0).all()
