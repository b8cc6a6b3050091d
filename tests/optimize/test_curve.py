"""The curve: tokens per step of every size on texts left out, and where tokens per second are most."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from helpers import random_calibration
from looped import looped

from treeopt.errors import Code, TreeoptError
from treeopt.latency import LatencyPoint, LatencyProfile
from treeopt.optimize.budget import step_seconds
from treeopt.optimize.curve import Curve, Timing, default_sizes, measure_curve
from treeopt.optimize.intervals import Interval, by_text, prediction_interval, sampling_interval
from treeopt.optimize.select_method import MEDUSA, Fitter, Limits, Method
from treeopt.optimize.tree_builder import tree_limits

SIZES = [1, 2, 4, 8, 16, 24]
JOINT = Method("joint", "visits", 256.0)


def profile_of(seconds: dict[int, float], *, batch: int = 1, context: int = 512) -> LatencyProfile:
    """Seconds by number of nodes."""
    return LatencyProfile.from_points(LatencyPoint(n, batch, context, s, s, s) for n, s in seconds.items())


def fitter_of(seed: int, largest: int = 24) -> Fitter:
    """Twenty texts."""
    calibration = random_calibration(seed)
    return Fitter(calibration, tree_limits(calibration, largest))


@looped(
    "largest, sizes",
    [
        (1, [1]),
        (2, [1, 2]),
        (5, [1, 2, 3, 4, 5]),
        (16, [1, 2, 3, 4, 6, 8, 12, 16]),
        (64, [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64]),
        (70, [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 70]),
    ],
)
def test_default_sizes_end_with_the_largest(largest: int, sizes: list[int]) -> None:
    """Powers of two and their halves in between, from 1 up to and with the largest."""
    assert default_sizes(largest) == sizes


@looped("method", [MEDUSA, JOINT])
def test_points_ascend_from_exactly_one(method: Method) -> None:
    """The root alone makes one token a step, and more nodes make more; intervals are those of the texts left out."""
    fitter = fitter_of(1)
    curve = measure_curve(fitter, method, SIZES)
    assert [point.nodes for point in curve.points] == SIZES
    assert curve.method == str(method)
    first, *_ = curve.points
    assert (first.sampling, first.prediction) == (Interval(1.0, 1.0), Interval(1.0, 1.0))
    assert first.tokens_per_step == 1.0
    taus = [point.tokens_per_step for point in curve.points]
    assert taus == sorted(taus)
    tokens = np.diff(fitter.calibration.offsets)
    for point, sums in zip(curve.points, fitter.cross_validated_sums(method, SIZES), strict=True):
        assert point.tokens_per_step == tokens.sum() / sums.steps.sum()
        texts = by_text(fitter.calibration.token_hashes, tokens, sums.steps)
        assert point.sampling == sampling_interval(*texts)
        assert point.prediction == prediction_interval(*texts)


@looped("hashes", ["a", "aaa"])
def test_one_text_in_any_number_of_copies_has_no_interval(hashes: str) -> None:
    """How texts vary is unknown from one of them, so there is no interval, and none of no width."""
    calibration = random_calibration(3, sequences=len(hashes))
    fitter = Fitter(dataclasses.replace(calibration, token_hashes=tuple(hashes)), Limits(8, 16))
    for point in measure_curve(fitter, MEDUSA, [1, 4, 8]).points:
        assert (point.sampling, point.prediction) == (None, None)


def test_points_are_on_texts_left_out() -> None:
    """Each text is replayed by the tree of the other folds, so the curve lies below replay on the fitted texts."""
    fitter = fitter_of(2)
    growth = fitter.build(MEDUSA)
    point = measure_curve(fitter, MEDUSA, [24]).points[0]
    assert point.tokens_per_step < fitter.sums(growth.tree(24)).tokens_per_step


@looped(
    "profile, best",
    [
        (profile_of({1: 0.01, 24: 0.01}), 24),
        (profile_of({1: 0.01, 2: 0.05, 24: 0.9}), 1),
        (profile_of({1: 0.01, 2: 0.0102, 4: 0.0105, 8: 0.011, 16: 0.03, 24: 0.06}), 8),
    ],
)
def test_best_is_the_greatest_speedup(profile: LatencyProfile, best: int) -> None:
    """Overhead refers to the step of one node; the marked size has the most tokens per second of all points."""
    curve = measure_curve(fitter_of(1), JOINT, SIZES, Timing(profile))
    alone = step_seconds(profile, 1)
    speedups = {}
    for point in curve.points:
        assert point.seconds == step_seconds(profile, point.nodes)
        assert point.overhead == point.seconds / alone
        assert point.speedup == point.tokens_per_step / point.overhead
        speedups[point.nodes] = point.tokens_per_step / (step_seconds(profile, point.nodes) / alone)
    assert curve.best == best == max(speedups, key=speedups.__getitem__)


def test_best_of_equals_is_the_smaller() -> None:
    """Where a larger tree gains as much as it costs, the smaller one is marked."""
    fitter = fitter_of(1)
    plain: Curve = measure_curve(fitter, MEDUSA, [1, 2])
    seconds = {1: 1.0, 2: plain.points[1].tokens_per_step}
    curve = measure_curve(fitter, MEDUSA, [1, 2], Timing(profile_of(seconds)))
    assert [point.speedup for point in curve.points] == [1.0, 1.0]
    assert curve.best == 1


def test_batch_and_context_choose_the_line_of_the_profile() -> None:
    """Seconds are those of the batch and context asked for."""
    flat, steep = profile_of({1: 0.01, 24: 0.01}), profile_of({1: 0.01, 2: 1.0, 24: 9.0}, batch=8, context=64)
    both = LatencyProfile.from_points([*flat.points, *steep.points])
    assert measure_curve(fitter_of(1), MEDUSA, SIZES, Timing(both)).best == 24
    assert measure_curve(fitter_of(1), MEDUSA, SIZES, Timing(both, batch=8, context=64)).best == 1


@looped("seconds, batch", [({2: 0.1, 24: 0.2}, 1), ({1: 0.1, 16: 0.2}, 1), ({1: 0.1, 24: 0.2}, 3)])
def test_what_the_profile_lacks_is_one_error(seconds: dict[int, float], batch: int) -> None:
    """No one-node step, no largest size, or no such batch: E230."""
    with pytest.raises(TreeoptError) as caught:
        measure_curve(fitter_of(1), MEDUSA, SIZES, Timing(profile_of(seconds), batch=batch))
    assert caught.value.code is Code.PROFILE_INVALID
