"""A build from start to end, as the command line asks for it."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import make_calibration, random_calibration
from looped import looped

from treeopt.calibration import Calibration
from treeopt.errors import Code, TreeoptError
from treeopt.latency import LatencyPoint, LatencyProfile
from treeopt.optimize.build_job import BuildJob, run_job
from treeopt.optimize.select_method import MEDUSA, Fitter, Limits
from treeopt.optimize.tree_builder import build_tree


def test_job_of_one_calibration_is_build_tree() -> None:
    """The library's one call and the command line's job give the same tree."""
    calibration = random_calibration(4, sequences=30)
    assert run_job([calibration], BuildJob(nodes=12)).tree == build_tree(calibration, 12)


def test_texts_set_aside_are_read_only_when_asked() -> None:
    """The tree of a job with a holdout is the tree of the other texts alone."""
    calibration = random_calibration(5, sequences=30)
    built = run_job([calibration], BuildJob(nodes=12, holdout=10))
    assert built.tree == build_tree(calibration.select(range(20)), 12)
    judgement = built.judgement()
    assert judgement is not None
    assert judgement.texts == 10
    assert run_job([calibration], BuildJob(nodes=12)).judgement() is None


def test_contradictions_are_refused() -> None:
    """Several tasks take no holdout; the fastest size needs a profile."""
    calibration = random_calibration(6)
    with pytest.raises(ValueError, match="one calibration"):
        run_job([calibration, calibration], BuildJob(nodes=8, holdout=3))
    with pytest.raises(ValueError, match="profile"):
        run_job([calibration], BuildJob(nodes=None))
    for shares in ([1.0], [1.0, 1.0, 1.0]):
        with pytest.raises(ValueError, match="shares for 2"):
            run_job([calibration, calibration], BuildJob(nodes=8, shares=shares))
    with pytest.raises(ValueError, match="shares for 1"):
        run_job([calibration], BuildJob(nodes=8, shares=[1.0, 1.0]))


def test_profile_of_per_step_trees_gives_no_static_size() -> None:
    """Their steps take other times: E230, before any tree is grown."""
    points = [LatencyPoint(nodes, 1, 64, seconds, seconds, seconds) for nodes, seconds in ((1, 1.0), (8, 1.5))]
    profile = LatencyProfile.from_points(points, {"kind": "dynamic"})
    with pytest.raises(TreeoptError, match="dynamic") as caught:
        run_job([random_calibration(6)], BuildJob(nodes=None, profile=profile))
    assert caught.value.code is Code.PROFILE_INVALID


def empty() -> Calibration:
    """A calibration without texts."""
    return random_calibration(1).select([])


def test_calibration_without_texts_is_one_error() -> None:
    """There is nothing to count: E303, also as one of several tasks."""
    for calibrations in ([empty()], [random_calibration(1), empty()]):
        with pytest.raises(TreeoptError) as caught:
            run_job(calibrations, BuildJob(nodes=8))
        assert caught.value.code is Code.PROMPTS_EMPTY


def test_equal_texts_share_a_fold() -> None:
    """A text that stands twice is never judged by a tree that was fitted to its twin."""
    tables = [np.random.default_rng(s).integers(0, 6, (20, 3)) for s in range(12)]
    twice = make_calibration(tables + tables)
    fitter = Fitter(twice, Limits(8, 16))
    sums = fitter.choose([MEDUSA]).sums
    assert sums is not None
    assert np.array_equal(sums.steps[:12], sums.steps[12:])


@looped("tasks", [1, 2])
def test_tree_larger_than_the_engine_takes_is_refused(tasks: int) -> None:
    """Sequoia reads 2,048 nodes: E105, for one task and for several."""
    with pytest.raises(TreeoptError, match="2,048 nodes at most") as caught:
        run_job([random_calibration(1, sequences=5)] * tasks, BuildJob(nodes=2049, engine="sequoia"))
    assert caught.value.code is Code.TREE_NOT_EXPORTABLE
