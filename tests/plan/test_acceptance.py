"""Tokens per step of a plan: the paper's logarithm, and the curve of calibrations."""

from __future__ import annotations

import math

import numpy as np
import pytest
from helpers import random_calibration

from treeopt.optimize.curve import default_sizes, measure_curve
from treeopt.optimize.select_method import Fitter, candidates
from treeopt.optimize.tree_builder import tree_limits
from treeopt.plan.planner import Acceptance, calibrated_acceptance


def test_logarithm_begins_at_one() -> None:
    """1 + 0.477 ln N: one token at one node, 2.984 at 64 (the paper's chart begins at 1 and has about 3 there)."""
    assert Acceptance().at(np.array([1.0, 64.0])).tolist() == [1.0, 1 + 0.477 * math.log(64)]
    assert Acceptance().at(np.array([64.0]))[0] == pytest.approx(2.9838, abs=1e-4)


def test_calibration_gives_the_cross_validated_curve() -> None:
    """The figures are those of `measure_curve`, which differ from those of the fitted texts."""
    calibration = random_calibration(3, sequences=40)
    found = calibrated_acceptance(calibration, 24)
    fitter = Fitter(calibration, tree_limits(calibration, 24))
    method = fitter.choose(candidates("joint", "visits")).method
    curve = measure_curve(fitter, method, default_sizes(24))
    assert found.sizes == tuple(point.nodes for point in curve.points)
    assert found.tokens == tuple(point.tokens_per_step for point in curve.points)
    assert found.tokens[0] == 1.0
    assert found.tokens[-1] != pytest.approx(curve.expected[found.sizes[-1] - 1], abs=1e-6)
    between = found.at(np.array([5.0]))[0]  # between 4 and 6
    assert between == pytest.approx((found.tokens[3] + found.tokens[4]) / 2)
    assert found.largest == found.sizes[-1] <= 24
    assert dict(found.provenance)["heads_id"] == calibration.provenance.heads_id
