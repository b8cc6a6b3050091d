"""Budget: the number of nodes with the most tokens per second, against a loop over all of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from looped import looped

from treeopt.errors import Code, TreeoptError
from treeopt.latency import LatencyPoint, LatencyProfile
from treeopt.optimize.budget import LEAST_GAIN, Budget, best_budget, budget_at, step_seconds

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


def test_growth_may_end_before_the_profile_and_after() -> None:
    """Sizes without a tree, and sizes without seconds, are left out."""
    free = profile_of({1: 1.0, 64: 1.0})
    assert best_budget(np.array([1.0, 1.5, 1.75]), free).nodes == 3
    assert best_budget(np.linspace(1.0, 9.0, 1000), free).nodes == 64


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


def test_profile_without_the_one_node_step_is_refused() -> None:
    """Overheads refer to the one-node step: a profile without it is E230."""
    with pytest.raises(TreeoptError, match="a tree of 1 node") as caught:
        best_budget(np.array([1.0, 2.0]), profile_of({2: 1.0, 4: 2.0}))
    assert caught.value.code is Code.PROFILE_INVALID


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
