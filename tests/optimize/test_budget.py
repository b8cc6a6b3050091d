"""The number of nodes with the most tokens per second: by a curve of tokens, by the tree builder, and on `curve`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
from helpers import random_calibration
from hypothesis import given, settings
from hypothesis import strategies as st
from looped import looped
from refusals import refusal_of

from treeopt.errors import Code, TreeoptError
from treeopt.latency import LatencyPoint, LatencyProfile
from treeopt.optimize.budget import LEAST_GAIN, Budget, best_budget, budget_at, step_seconds
from treeopt.optimize.build_job import BuildJob, run_job
from treeopt.optimize.curve import Curve, Timing, best_size, default_sizes, measure_curve
from treeopt.optimize.intervals import Interval, by_text, prediction_interval, sampling_interval
from treeopt.optimize.select_method import MEDUSA, Fitter, Limits, Method
from treeopt.optimize.tree_builder import tree_limits

ROUNDING = 1e-9


def profile_of(curve: dict[int, float], *, batch: int = 1, context: int = 512) -> LatencyProfile:
    """A profile of one curve, nodes -> seconds, without spread."""
    return LatencyProfile.from_points(LatencyPoint(n, batch, context, s, s, s) for n, s in curve.items())


def test_budget_at_by_hand() -> None:
    """2.5 tokens in 30 ms against one in 20 ms: overhead 1.5, speed-up 5/3; one node is autoregressive itself."""
    expected = np.array([1.0, 1.5, 2.0, 2.5])
    profile = profile_of({1: 0.02, 4: 0.03})
    assert budget_at(expected, profile, 4) == Budget(4, 2.5, 0.03, pytest.approx(1.5), pytest.approx(5 / 3))
    assert budget_at(expected, profile, 1) == Budget(1, 1.0, 0.02, 1.0, 1.0)


@settings(deadline=None)
@given(
    st.lists(st.floats(0.0, 1.0), min_size=0, max_size=40),
    st.dictionaries(st.integers(2, 50), st.floats(0.5, 20.0), max_size=6),
    st.floats(0.5, 2.0),
)
def test_best_budget_is_the_greatest_ratio(gains: list[float], curve: dict[int, float], one: float) -> None:
    """No number of nodes within both limits yields more tokens per second; one node where none yields 2 % more."""
    expected = 1.0 + np.concatenate([[0.0], np.cumsum(sorted(gains, reverse=True))])
    profile = profile_of({**curve, 1: one})
    sizes = range(1, min(len(expected), max([1, *curve])) + 1)
    speedups = np.array([expected[n - 1] / step_seconds(profile, n) * step_seconds(profile, 1) for n in sizes])
    found = best_budget(expected, profile)
    assert found == budget_at(expected, profile, found.nodes)
    if found.nodes == 1:
        assert speedups.max() <= (1 + LEAST_GAIN) * (1 + ROUNDING)
    else:
        assert found.speedup >= (1 + LEAST_GAIN) * (1 - ROUNDING)
        assert found.speedup == pytest.approx(speedups.max(), rel=ROUNDING)
        assert speedups[1 : found.nodes - 1].max(initial=0.0) <= found.speedup


def test_equal_ratios_give_the_smaller_tree() -> None:
    """Twice the tokens in twice the time: the smaller tree."""
    assert best_budget(np.array([1.0, 2.0, 3.0, 4.0]), profile_of({1: 1.0, 2: 2.0, 4: 4.0})).nodes == 1


def test_noise_of_one_size_is_smoothed() -> None:
    """A size that one measurement made cheaper than smaller trees does not win by that."""
    expected = np.array([1.0, 1.5, 1.6, 1.7])
    found = best_budget(expected, profile_of({1: 1.0, 2: 1.3, 4: 1.1}))
    assert (found.nodes, found.seconds) == (4, pytest.approx(1.2))
    assert found.overhead == pytest.approx(1.2)


def test_profiles_that_end_early_or_lack_one_node() -> None:
    """Sizes without a tree, and without seconds, are left out; a profile without one node is E230."""
    free = profile_of({1: 1.0, 64: 1.0})
    assert best_budget(np.array([1.0, 1.5, 1.75]), free).nodes == 3
    assert best_budget(np.linspace(1.0, 9.0, 1000), free).nodes == 64
    with pytest.raises(TreeoptError, match="a tree of 1 node") as caught:
        best_budget(np.array([1.0, 2.0]), profile_of({2: 1.0, 4: 2.0}))
    assert caught.value.code is Code.PROFILE_INVALID


def test_batch_and_context_choose_the_curve() -> None:
    """A large batch makes nodes dear; without a context the longest counts."""
    points = [
        *profile_of({1: 1.0, 2: 1.1}).points,
        *profile_of({1: 1.0, 2: 3.0}, batch=8).points,
        *profile_of({1: 1.0, 2: 9.0}, context=1024).points,
    ]
    profile, expected = LatencyProfile.from_points(points), np.array([1.0, 1.5])
    assert best_budget(expected, profile, 1, 512).nodes == 2
    assert best_budget(expected, profile, batch=8).nodes == 1
    assert best_budget(expected, profile).nodes == 1
    assert budget_at(expected, profile, 2).seconds == 9.0


def test_seconds_interpolates_the_smoothed_curve() -> None:
    """Measured sizes give the smoothed medians, sizes between them the straight line."""
    profile = profile_of({1: 1.0, 4: 4.0, 8: 2.0, 16: 11.0})
    found = [step_seconds(profile, n) for n in (1, 2, 3, 4, 6, 8, 12, 16)]
    assert found == pytest.approx([1.0, 5 / 3, 7 / 3, 3.0, 3.0, 3.0, 7.0, 11.0])


@looped("nodes", [0, 1, 65])
def test_seconds_outside_the_measured_sizes_is_refused(nodes: int) -> None:
    """Nothing is extrapolated, upwards or downwards."""
    with pytest.raises(TreeoptError, match="holds sizes from 2 to 64 nodes") as caught:
        step_seconds(profile_of({2: 1.0, 64: 2.0}), nodes)
    assert caught.value.code is Code.PROFILE_INVALID
    assert "treeopt profile" in caught.value.fix


CALIBRATION = random_calibration(1)


def profile_of_auto_nodes(seconds: dict[int, float], *, batch: int = 1) -> LatencyProfile:
    """Seconds by number of nodes."""
    return LatencyProfile.from_points(LatencyPoint(n, batch, 512, s, s, s) for n, s in seconds.items())


def test_choice_equals_brute_force_over_all_sizes() -> None:
    """No size from 1 to the largest has more tokens per second, by replay on texts left out of the fit."""
    profile = profile_of_auto_nodes({1: 0.01, 2: 0.012, 16: 0.014, 40: 0.03})
    fitter = Fitter(CALIBRATION, tree_limits(CALIBRATION, 40, top_k=16, max_depth=3, max_rank=5))
    choice = best_size(fitter, [MEDUSA], profile)
    sizes = default_sizes(40)
    taus = [CALIBRATION.positions / sums.steps.sum() for sums in fitter.cross_validated_sums(MEDUSA, sizes)]
    speed = {n: np.interp(n, sizes, taus) / step_seconds(profile, n) for n in range(1, 41)}
    assert choice.nodes == max(speed, key=speed.__getitem__)
    assert choice.seconds == step_seconds(profile, choice.nodes)
    assert choice.speedup == pytest.approx(speed[choice.nodes] * step_seconds(profile, 1))


@looped("seconds, batch", [({2: 0.01, 64: 0.02}, 1), ({1: 0.01, 64: 0.02}, 2)])
def test_profile_without_the_size_or_batch_is_one_error(seconds: dict[int, float], batch: int) -> None:
    """No step of one node, or no such batch: E230."""
    fitter = Fitter(CALIBRATION, tree_limits(CALIBRATION, 64))
    assert refusal_of(best_size, fitter, [MEDUSA], profile_of_auto_nodes(seconds), batch).code is Code.PROFILE_INVALID


@looped(
    "source, code",
    [
        ({"model_id": "m", "kind": "static", "drafter": "d1"}, Code.DRAFTER_MISMATCH),
        ({"model_id": "m", "kind": "dynamic"}, Code.PROFILE_INVALID),
        ({"model_id": "m"}, None),
        ({"model_id": "m", "kind": "static"}, None),
    ],
)
def test_profiles_of_other_steps_are_refused(source: dict[str, str], code: Code | None) -> None:
    """E223 for another drafter than that of the traces, E230 for per-step trees."""
    profile = LatencyProfile(profile_of_auto_nodes({1: 0.01, 40: 0.02}).points, source)
    fitter = Fitter(CALIBRATION, tree_limits(CALIBRATION, 40))
    uses: tuple[Callable[[], object], ...] = (
        lambda: best_size(fitter, [MEDUSA], profile),
        lambda: measure_curve(fitter, MEDUSA, [1, 8], Timing(profile)),
        lambda: run_job(CALIBRATION, BuildJob(profile=profile, nodes=None)),
    )
    for use in uses:
        if code is None:
            use()
            continue
        error = refusal_of(use)
        assert (error.code, error.exit_status) == (code, 3)
        assert error.fix == "treeopt profile --heads heads --kind static -o static.profile.yaml"


SIZES = [1, 2, 4, 8, 16, 24]
JOINT = Method("joint", "visits", 256.0)


def profile_of_curve(seconds: dict[int, float], *, batch: int = 1, context: int = 512) -> LatencyProfile:
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
        (profile_of_curve({1: 0.01, 24: 0.01}), 24),
        (profile_of_curve({1: 0.01, 2: 0.05, 24: 0.9}), 1),
        (profile_of_curve({1: 0.01, 2: 0.0102, 4: 0.0105, 8: 0.011, 16: 0.03, 24: 0.06}), 8),
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
    curve = measure_curve(fitter, MEDUSA, [1, 2], Timing(profile_of_curve(seconds)))
    assert [point.speedup for point in curve.points] == [1.0, 1.0]
    assert curve.best == 1


def test_batch_and_context_choose_the_line_of_the_profile() -> None:
    """Seconds are those of the batch and context asked for."""
    flat, steep = (
        profile_of_curve({1: 0.01, 24: 0.01}),
        profile_of_curve({1: 0.01, 2: 1.0, 24: 9.0}, batch=8, context=64),
    )
    both = LatencyProfile.from_points([*flat.points, *steep.points])
    assert measure_curve(fitter_of(1), MEDUSA, SIZES, Timing(both)).best == 24
    assert measure_curve(fitter_of(1), MEDUSA, SIZES, Timing(both, batch=8, context=64)).best == 1


@looped("seconds, batch", [({2: 0.1, 24: 0.2}, 1), ({1: 0.1, 16: 0.2}, 1), ({1: 0.1, 24: 0.2}, 3)])
def test_what_the_profile_lacks_is_one_error(seconds: dict[int, float], batch: int) -> None:
    """No one-node step, no largest size, or no such batch: E230."""
    assert (
        refusal_of(measure_curve, fitter_of(1), MEDUSA, SIZES, Timing(profile_of_curve(seconds), batch=batch)).code
        is Code.PROFILE_INVALID
    )
