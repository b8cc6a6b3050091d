"""The fastest number of nodes: traces against seconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from helpers import random_calibration
from looped import looped

from treeopt.errors import Code, TreeoptError
from treeopt.latency import LatencyPoint, LatencyProfile
from treeopt.optimize.budget import step_seconds
from treeopt.optimize.build_job import BuildJob, run_job
from treeopt.optimize.curve import SizeChoice, Timing, best_size, default_sizes, measure_curve
from treeopt.optimize.select_method import MEDUSA, Fitter, Method
from treeopt.optimize.tree_builder import tree_limits

CALIBRATION = random_calibration(1)


def profile_of(seconds: dict[int, float], *, batch: int = 1) -> LatencyProfile:
    """Seconds by number of nodes."""
    return LatencyProfile.from_points(LatencyPoint(n, batch, 512, s, s, s) for n, s in seconds.items())


def fastest(profile: LatencyProfile, *, methods: Sequence[Method] = (MEDUSA,), batch: int = 1) -> SizeChoice:
    """The choice among all sizes of the profile."""
    fitter = Fitter(CALIBRATION, tree_limits(CALIBRATION, profile.largest(batch)))
    return best_size(fitter, methods, profile, batch)


def test_64_beyond_the_profile_is_none() -> None:
    """Seconds are never guessed beyond the profile."""
    choice = fastest(profile_of({1: 0.01, 63: 0.011}))
    assert choice.at_64 is None
    assert choice.best.nodes <= 63


def test_choice_equals_brute_force_over_all_sizes() -> None:
    """No size from 1 to the largest has more tokens per second, by replay on texts left out of the fit."""
    profile = profile_of({1: 0.01, 2: 0.012, 16: 0.014, 40: 0.03})
    fitter = Fitter(CALIBRATION, tree_limits(CALIBRATION, 40, top_k=16, max_depth=3, max_rank=5))
    choice = best_size(fitter, [MEDUSA], profile)
    sizes = default_sizes(40)
    taus = [CALIBRATION.positions / sums.steps.sum() for sums in fitter.cross_validated_sums(MEDUSA, sizes)]
    speed = {n: np.interp(n, sizes, taus) / step_seconds(profile, n) for n in range(1, 41)}
    assert choice.best.nodes == max(speed, key=speed.__getitem__)
    assert choice.best.seconds == step_seconds(profile, choice.best.nodes)
    assert choice.best.speedup == pytest.approx(speed[choice.best.nodes] * step_seconds(profile, 1))


@looped("seconds, batch", [({2: 0.01, 64: 0.02}, 1), ({1: 0.01, 64: 0.02}, 2), ({1: 0.01, 63: 0.02}, 1)])
def test_profile_without_the_size_or_batch_is_one_error(seconds: dict[int, float], batch: int) -> None:
    """No step of one node, no such batch, or no size as large as the limit: E230."""
    fitter = Fitter(CALIBRATION, tree_limits(CALIBRATION, 64))
    with pytest.raises(TreeoptError) as caught:
        best_size(fitter, [MEDUSA], profile_of(seconds), batch)
    assert caught.value.code is Code.PROFILE_INVALID


@looped(
    "source, code",
    [
        ({"model_id": "m", "drafter": "d1"}, Code.DRAFTER_MISMATCH),
        ({"model_id": "m", "kind": "static", "drafter": "d1"}, Code.DRAFTER_MISMATCH),
        ({"model_id": "m", "kind": "dynamic"}, Code.PROFILE_INVALID),
        ({"model_id": "m"}, None),
        ({"model_id": "m", "kind": "static"}, None),
    ],
)
def test_profiles_of_other_steps_are_refused(source: dict[str, str], code: Code | None) -> None:
    """E223 for another drafter than that of the traces, E230 for per-step trees."""
    profile = LatencyProfile(profile_of({1: 0.01, 40: 0.02}).points, source)
    fitter = Fitter(CALIBRATION, tree_limits(CALIBRATION, 40))
    uses: tuple[Callable[[], object], ...] = (
        lambda: best_size(fitter, [MEDUSA], profile),
        lambda: measure_curve(fitter, MEDUSA, [1, 8], Timing(profile)),
        lambda: run_job([CALIBRATION], BuildJob(profile=profile, nodes=None)),
    )
    for use in uses:
        if code is None:
            use()
            continue
        with pytest.raises(TreeoptError) as caught:
            use()
        assert (caught.value.code, caught.value.exit_status) == (code, 3)
        assert caught.value.fix == "treeopt profile --heads heads --kind static -o static.profile.yaml"
