"""Reliability: bins of estimates, and how often they came true."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from helpers import make_calibration

from treeopt.defaults import STEP_SIZES
from treeopt.optimize.per_step import BINS, reliability
from treeopt.traces import NONE, StepTraces


def test_reliability_by_hand() -> None:
    """Two guesses at 0.5, one of them right, and one at 1.0 that was wrong; the last row has nothing to guess."""
    made = make_calibration([np.array([[0], [3], [1], [0]])])
    confidence = np.array([[0.5], [0.5], [1.0], [0.9]], np.float16)
    node_rank = np.where(made.ranks == NONE, NONE, 1).astype(np.uint8)
    expected_tokens = np.ones((4, len(STEP_SIZES)), np.float32)
    found = reliability(dataclasses.replace(made, steps=StepTraces(node_rank, expected_tokens, confidence)))
    assert found.trials.shape == (1, BINS)
    assert found.trials[0].tolist() == [0, 0, 0, 0, 0, 2, 0, 0, 0, 1]
    assert found.correct[0].tolist() == [0, 0, 0, 0, 0, 1, 0, 0, 0, 0]
    assert found.estimated[0].tolist() == [0, 0, 0, 0, 0, 1, 0, 0, 0, 1]
    assert found.error.tolist() == [pytest.approx(1 / 3)]


def test_reliability_without_trials() -> None:
    """A level that no text reaches has no error."""
    made = make_calibration([np.zeros((1, 2), int)])
    steps = StepTraces(made.ranks, np.ones((1, len(STEP_SIZES)), np.float32), np.ones((1, 2), np.float16))
    assert reliability(dataclasses.replace(made, steps=steps)).error.tolist() == [0, 0]
