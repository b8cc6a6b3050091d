"""Reliability: estimated probabilities of guesses, compared with how often these were right."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treeopt.calibration import NONE, Calibration

BINS = 10  # of estimated probability, equally wide

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Reliability:
    """The most likely guess of each level, in bins of its estimated probability.

    Args:
        trials: float64 [H, BINS], guesses for which there was a token.
        estimated: float64 [H, BINS], sum of their estimated probabilities.
        correct: float64 [H, BINS], how many were right.
    """

    trials: Floats
    estimated: Floats
    correct: Floats

    @property
    def error(self) -> Floats:
        """float64 [H]: expected calibration error, the mean over guesses of |estimated - correct| of their bins."""
        found: Floats = np.abs(self.estimated - self.correct).sum(1) / np.maximum(self.trials.sum(1), 1)
        return found


def reliability(calibration: Calibration) -> Reliability:
    """The reliability by a calibration with traces of per-step trees."""
    assert calibration.steps is not None
    confidence = calibration.steps.confidence.astype(np.float64)
    bins = np.minimum((confidence * BINS).astype(np.int64), BINS - 1)
    weights = {
        "trials": calibration.ranks != NONE,
        "estimated": np.where(calibration.ranks == NONE, 0.0, confidence),
        "correct": calibration.ranks == 0,
    }
    return Reliability(**{name: _by_bin(bins, weight) for name, weight in weights.items()})


def _by_bin(bins: NDArray[np.int64], weights: NDArray[Any]) -> Floats:
    """Sums of weights [P, H] by bin: float64 [H, BINS]."""
    sums = [np.bincount(level, weight, BINS) for level, weight in zip(bins.T, weights.T, strict=True)]
    return np.stack(sums).astype(np.float64)
