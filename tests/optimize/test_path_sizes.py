"""Sizes in path tokens: policies, curves and verdicts of models that verify the paths of a tree as a batch."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from looped import looped
from per_step_traces import naive, profile_of, traced, with_paths
from refusals import refusal_of

from treeopt.calibration import Calibration
from treeopt.defaults import PATH_TOKENS, STEP_SIZES
from treeopt.errors import Code
from treeopt.evaluate.learn_drafter import plans_of
from treeopt.latency import LatencyProfile
from treeopt.optimize.budget import size_of
from treeopt.optimize.build_job import BuildJob, run_job
from treeopt.optimize.curve import Timing, calibration_curve
from treeopt.optimize.per_step import build_policy, fastest_policy, replay_policy, sizes_of
from treeopt.optimize.select_method import Fitter
from treeopt.optimize.tree_builder import build_tree, tree_limits
from treeopt.optimize.verdict import named, verdicts_of
from treeopt.policy import TreePolicy
from treeopt.tree import Tree

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24)
CALIBRATION = with_paths(traced(1, sequences=16, heads=5, exact=True))


def timed(kind: str, each: float = 0.05) -> LatencyProfile:
    """Seconds that grow with the path tokens."""
    return profile_of({size: 1 + each * size for size in SIZES}, kind=kind, drafter="d1", unit=PATH_TOKENS)


def static_tau(calibration: Calibration, size: int) -> float:
    """Cross-validated tokens per step of the best tree of so many path tokens, by the method of the largest size."""
    largest = Fitter(calibration, tree_limits(calibration, None, path_tokens=SIZES[-1]))
    method = largest.choose(BuildJob(nodes=None).methods).method
    fitter = Fitter(calibration, tree_limits(calibration, None, path_tokens=size))
    return fitter.cross_validated_sums(method, [size])[0].tokens_per_step


@looped("seed", range(4))
@looped("size_cost", [(), ((2, 0.2), (8, 0.5), (32, 1.1))])
def test_replay_is_a_naive_loop(seed: int, size_cost: tuple[tuple[int, float], ...]) -> None:
    """Steps and sizes of a policy of path tokens are those of its own traces, not of nodes."""
    calibration = with_paths(traced(seed), seed)
    policy = TreePolicy(32, 3, "d1", size_cost, path_tokens=True)
    steps, sizes = naive(policy, calibration)
    found = replay_policy(policy, calibration)
    assert calibration.steps is not None
    assert found.sums.steps.tolist() == steps
    assert sizes_of(policy, calibration.steps)[found.visited].tolist() == sizes
    assert steps != naive(dataclasses.replace(policy, path_tokens=False), calibration)[0]


def test_policies_need_their_traces_and_depth() -> None:
    """E220 without traces by path tokens and for another depth; E103 for a size that is not traced."""
    assert refusal_of(build_policy, traced(1), 8, path_tokens=True).code is Code.CALIBRATION_INVALID
    shallow = TreePolicy(8, 2, "d1", path_tokens=True)
    assert refusal_of(replay_policy, shallow, CALIBRATION).code is Code.CALIBRATION_INVALID
    assert refusal_of(build_policy, CALIBRATION, 7, path_tokens=True).code is Code.TREE_INVALID
    assert refusal_of(fastest_policy, traced(1), timed("dynamic")).code is Code.CALIBRATION_INVALID
    assert build_policy(CALIBRATION, 8, path_tokens=True).path_tokens


def test_verdict_compares_trees_by_path_tokens() -> None:
    """Static trees are the best of each price, per-step trees those traced by it, and the file has what was chosen."""
    found = verdicts_of(CALIBRATION, [timed("static"), timed("dynamic"), timed("chain")])
    [place] = found.verdicts
    by_kind = {
        kind: {one.budget.nodes: one for one in place.settings if one.kind == kind and one.of.unit == PATH_TOKENS}
        for kind in ("static", "dynamic")
    }
    assert set(by_kind["static"]) >= set(SIZES[1:])
    for size, one in by_kind["static"].items():
        assert one.budget.tokens_per_step == pytest.approx(static_tau(CALIBRATION, size), abs=1e-12)
        tree = one.of.plan()
        assert isinstance(tree, Tree)
        assert tree.path_tokens <= size
        assert one.budget.seconds == 1 + 0.05 * size
    for size, one in by_kind["dynamic"].items():
        policy = one.of.plan()
        assert isinstance(policy, TreePolicy)
        assert (policy.path_tokens, policy.nodes) == (True, size)
        assert size in STEP_SIZES
    assert named(by_kind["static"][8]) == "static, 8 path tokens"
    plan = place.best.of.plan()
    assert plan.path_tokens if isinstance(plan, TreePolicy) else plan.path_tokens <= place.best.budget.nodes


def test_curve_and_fastest_size() -> None:
    """Each size is a tree of its own, and `build --nodes auto` writes that of the fastest."""
    curve = calibration_curve(CALIBRATION, Timing(timed("static")))
    assert curve.unit == PATH_TOKENS
    taus = {point.nodes: point.tokens_per_step for point in curve.points}
    assert taus[6] == pytest.approx(static_tau(CALIBRATION, 6), abs=1e-12)
    built = run_job(CALIBRATION, BuildJob(nodes=None, profile=timed("static")))
    assert built.fastest is not None
    assert (built.budget, built.limits.path_tokens) == (None, built.fastest.nodes)
    assert built.tree.path_tokens <= built.fastest.nodes
    speeds = {size: tau / (1 + 0.05 * size) for size, tau in taus.items()}
    assert built.fastest.tokens_per_second == pytest.approx(max(speeds.values()), rel=0.02)
    dear = run_job(CALIBRATION, BuildJob(nodes=None, profile=timed("static", each=9.0)))
    assert dear.tree.nodes == dear.budget == 1
    per_step = calibration_curve(CALIBRATION, Timing(timed("dynamic")), kind="dynamic")
    assert {point.nodes for point in per_step.points} <= set(STEP_SIZES)
    assert per_step.unit == PATH_TOKENS


def test_a_tree_is_priced_in_the_unit_of_the_profile() -> None:
    """Path tokens, or nodes."""
    tree = Tree.from_paths([(0,), (1,), (0, 0)])
    assert (size_of(tree, timed("static")), size_of(tree, profile_of({1: 1.0}))) == (6, 4)


def test_learn_times_trees_by_path_tokens() -> None:
    """Where per-step trees were traced so; else by nodes."""
    trees = [plan for plan in plans_of(CALIBRATION, [8, 12], with_draft=False) if isinstance(plan, Tree)]
    assert [tree.paths for tree in trees[1:]] == [build_tree(CALIBRATION, path_tokens=n).paths for n in (8, 12)]
    policies = [plan for plan in plans_of(CALIBRATION, [8], with_draft=False) if isinstance(plan, TreePolicy)]
    assert [policy.path_tokens for policy in policies] == [True]
    plain = plans_of(traced(1), [8], with_draft=False)
    assert [plan.nodes for plan in plain] == [1, 8, 8]


@looped("fault", ["missing", "shape", "dtype", "beyond", "not finite"])
def test_traces_by_path_tokens_are_checked(fault: str) -> None:
    """One array without the other, of another shape or type, more drafts than the text has left."""
    steps = CALIBRATION.steps
    assert steps is not None
    assert steps.path_accepted is not None
    assert steps.path_expected is not None
    changed = {
        "missing": {"path_expected": None},
        "shape": {"path_accepted": steps.path_accepted[:, 1:]},
        "dtype": {"path_accepted": steps.path_accepted.astype(np.int16)},
        "beyond": {"path_accepted": np.full_like(steps.path_accepted, 6)},
        "not finite": {"path_expected": np.full_like(steps.path_expected, np.nan)},
    }[fault]
    error = refusal_of(dataclasses.replace, CALIBRATION, steps=dataclasses.replace(steps, **changed))
    assert error.code is Code.CALIBRATION_INVALID
