"""Isotonic regression: the monotone sequence that is nearest to given values in least squares."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def isotonic(values: Floats, weights: Floats | None = None, *, increasing: bool = True) -> Floats:
    """The nearest sequence that never falls, or never rises.

    Args:
        values: float64 [n].
        weights: float64 [n], above 0; all equal where None.
        increasing: False for a sequence that never rises.

    Returns:
        float64 [n].
    """
    from scipy.optimize import isotonic_regression

    fitted: Floats = isotonic_regression(values, weights=weights, increasing=increasing).x
    return fitted


def falling_rows(table: Floats) -> Floats:
    """Each row of float64 [n, K] replaced by its nearest row that never rises; a row that never rises is unchanged."""
    fitted = table.copy()
    for row in np.flatnonzero((table[:, 1:] > table[:, :-1]).any(axis=1)).tolist():
        fitted[row] = isotonic(table[row], increasing=False)
    return fitted
