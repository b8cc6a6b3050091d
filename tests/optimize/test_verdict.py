"""The verdict on simulated step times, against a loop over all candidates."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
from helpers import random_calibration
from looped import looped
from per_step_traces import traced
from refusals import refusal_of

from treeopt.calibration import Calibration
from treeopt.errors import Code
from treeopt.latency import LatencyPoint, LatencyProfile
from treeopt.optimize.budget import LEAST_GAIN, fastest
from treeopt.optimize.build_job import BuildJob
from treeopt.optimize.chains import chain_tokens
from treeopt.optimize.curve import calibration_curve
from treeopt.optimize.per_step import replay_policy, sums_by_size
from treeopt.optimize.replay import replay
from treeopt.optimize.verdict import EQUAL, Verdicts, verdict_warnings, verdicts_of
from treeopt.policy import TreePolicy
from treeopt.tree import Tree

SIZES = (1, 2, 3, 4, 6, 8, 9, 12, 16, 24, 32)
Seconds = Callable[[int, int, int], float]  # of nodes, batch and context
TIMES: dict[str, Seconds] = {
    "flat": lambda nodes, batch, context: 1.0,
    "linear": lambda nodes, batch, context: 0.5 + 0.1 * nodes * batch + context / 4096,
    "steep": lambda nodes, batch, context: float(nodes * batch),
    "cliff": lambda nodes, batch, context: 1.0 if nodes <= 8 else 10.0,
    "memory-bound": lambda nodes, batch, context: max(1.0, nodes * batch / 200) + 0.001 * nodes,
    "compute-bound": lambda nodes, batch, context: max(1.0, nodes * batch / 6),
}
CALIBRATION = traced(1, sequences=16, heads=6, exact=True)
PLACES = [(1, 128), (4, 128), (4, 2048), (16, 2048)]


def profile_of(seconds: Seconds, kind: str | None = None, *, sizes: tuple[int, ...] = SIZES) -> LatencyProfile:
    """A profile of one kind, or without provenance as read from CSV."""
    points = [LatencyPoint(nodes, *place, *[1e-3 * seconds(nodes, *place)] * 3) for nodes in sizes for place in PLACES]
    return LatencyProfile.from_points(points, {} if kind is None else {"kind": kind, "drafter": "d1"})


def taus(calibration: Calibration) -> list[tuple[str, int, float]]:
    """Kind, nodes and tokens per step of all candidates of one size, the simplest first, each by its own function."""
    found = [("chain", drafts + 1, tau) for drafts, tau in enumerate(chain_tokens(calibration).tolist())][1:]
    curve = calibration_curve(calibration, largest=SIZES[-1])
    known = {point.nodes: point.tokens_per_step for point in curve.points}
    found += [("static", nodes, tau) for nodes, tau in known.items() if nodes > 1]
    per_step = [(nodes, sums_by_size(calibration, nodes).tokens_per_step) for nodes in SIZES]
    return found + [("dynamic", nodes, tau) for nodes, tau in per_step if nodes > 1]


TAUS = taus(CALIBRATION)


@looped("name", TIMES)
def test_choice_equals_brute_force(name: str) -> None:
    """The greatest tokens per second, of equally fast ones the simplest, none below the least gain; every figure."""
    seconds = TIMES[name]
    found = verdicts_of(CALIBRATION, [profile_of(seconds)])
    assert [(one.batch, one.context) for one in found.verdicts] == PLACES
    for place in found.verdicts:
        at = (place.batch, place.context)
        alone = seconds(1, *at)
        speeds = {(kind, nodes): tau * alone / seconds(nodes, *at) for kind, nodes, tau in TAUS}
        figures = {(one.kind, one.budget.nodes): one for one in reversed(place.settings)}  # of two the fixed size
        for key, speed in speeds.items():
            assert figures[key].budget.speedup == pytest.approx(speed)
            rate = place.batch * speed / (alone * 1e-3)
            assert figures[key].tokens_per_second == pytest.approx(rate)
        # Per-step trees whose size is chosen by its cost have no loop here; they are checked by their replay below.
        costed = [one for one in place.settings if isinstance(one.of.plan(), TreePolicy) and one.of.plan().size_cost]
        assert len(costed) <= (place.batch == 1)
        fast = max([*speeds.values(), *(one.budget.speedup for one in costed)])
        near = [key for key, speed in speeds.items() if speed >= fast * (1 - EQUAL)]
        chosen = (place.best.kind, place.best.budget.nodes)
        if fast < 1 + LEAST_GAIN:
            assert chosen == ("none", 1)
        elif near:
            assert chosen == near[0]
        else:
            assert place.best is costed[0]
        assert place.best.budget.speedup >= fast * (1 - EQUAL) or fast < 1 + LEAST_GAIN
    kinds = {place.best.kind for place in found.verdicts}
    assert ("none" in kinds) == (name in ("linear", "steep", "compute-bound"))
    if name == "cliff":
        assert all(place.best.budget.nodes <= 8 for place in found.verdicts)


def test_plans_have_the_promised_tokens_per_step() -> None:
    """Chains and per-step trees replay to the very figure; static trees are those of one growth."""
    found = verdicts_of(CALIBRATION, [profile_of(TIMES["compute-bound"])])
    for one in found.verdicts[0].settings:
        plan = one.of.plan()
        assert plan.nodes == one.budget.nodes
        assert plan.drafter == "d1"
        again = replay_policy(plan, CALIBRATION) if isinstance(plan, TreePolicy) else replay(plan, CALIBRATION)
        if one.kind != "static":
            assert again.tokens_per_step == one.budget.tokens_per_step
        else:
            assert again.tokens_per_step >= one.budget.tokens_per_step * 0.98
        if one.kind == "chain":
            assert isinstance(plan, Tree)
            assert plan.paths == Tree.chain(one.budget.nodes - 1).paths
    schedule = found.schedule
    assert [one.key for one in schedule.cells] == PLACES
    for cell, place in zip(schedule.cells, found.verdicts, strict=True):
        assert cell.plan.nodes == place.best.budget.nodes
        assert cell.speedup == pytest.approx(place.best.budget.speedup)


def test_intervals_are_those_of_the_texts() -> None:
    """A speedup's interval is that of tokens per step over the overhead; none has no width, equal plans no gap."""
    found = verdicts_of(CALIBRATION, [profile_of(TIMES["linear"])])
    place = found.verdicts[0]
    curve = {point.nodes: point for point in calibration_curve(CALIBRATION, largest=SIZES[-1]).points}
    for one in place.settings:
        assert one.interval is not None
        assert one.interval.low <= one.budget.speedup <= one.interval.high
        sampling = curve[one.budget.nodes].sampling if one.kind == "static" and one.budget.nodes in curve else None
        if sampling is not None:
            assert one.interval.low == pytest.approx(sampling.low / one.budget.overhead)
    none, first = place.settings[:2]
    assert (none.interval.low, none.interval.high) == (1.0, 1.0)  # type: ignore[union-attr]
    gap = found.gap(first, first)
    assert gap is not None
    assert (gap.low, gap.high) == (0.0, 0.0)
    gap = found.gap(first, none)
    assert gap is not None
    assert gap.low <= first.budget.speedup - 1 <= gap.high
    one_text = dataclasses.replace(CALIBRATION, token_hashes=("a",) * CALIBRATION.sequences)
    assert verdicts_of(one_text, [profile_of(TIMES["flat"])]).verdicts[0].best.interval is None


def edges(found: Verdicts) -> set[tuple[str, int]]:
    return {(one.kind, one.budget.nodes) for one in found.verdicts[0].settings if one.at_edge}


def test_edge_of_what_was_measured() -> None:
    """The largest measured size is an edge, unless no tree or chain of the drafter is larger."""
    few = verdicts_of(CALIBRATION, [profile_of(TIMES["flat"], sizes=(1, 2, 5))])
    assert edges(few) >= {("chain", 5), ("static", 5), ("dynamic", 5)}
    assert few.verdicts[0].best.at_edge
    assert ("chain", 7) not in edges(verdicts_of(CALIBRATION, [profile_of(TIMES["flat"])]))  # it has six levels
    deep = random_calibration(2, heads=20)
    sizes = tuple(range(1, 33))
    found = verdicts_of(deep, [profile_of(TIMES["flat"], sizes=sizes)], kinds=["static"])
    assert ("chain", 17) in edges(found)  # 16 drafts are the most that are considered
    place = found.verdicts[0]
    longest = next(one for one in place.settings if (one.kind, one.budget.nodes) == ("chain", 17))
    warned = verdict_warnings(dataclasses.replace(found, verdicts=(dataclasses.replace(place, best=longest),)))
    assert any("chain of 16, is the longest that is considered: a longer one" in one for one in warned)


def test_job_limits_static_trees_and_chains() -> None:
    """Ranks and depth of a job hold for every plan but those chosen per step."""
    job = BuildJob(nodes=None, max_depth=2, max_rank=1)
    found = verdicts_of(CALIBRATION, [profile_of(TIMES["flat"])], kinds=["static"], job=job)
    plans = [one.of.plan() for one in found.verdicts[0].settings]
    assert max(plan.depth for plan in plans) == 2
    assert max(plan.max_rank for plan in plans if isinstance(plan, Tree)) == 1


def test_kinds_without_a_profile_are_left_out_with_their_command() -> None:
    """A profile of static trees alone leaves per-step trees out, and names what measures them."""
    static, dynamic = (profile_of(TIMES["flat"], kind) for kind in ("static", "dynamic"))
    found = verdicts_of(CALIBRATION, [static], batches=[1, 4], contexts=[128])
    assert [(one.batch, one.context) for one in found.verdicts] == [(1, 128), (4, 128)]
    assert {one.kind for one in found.verdicts[0].settings} == {"none", "chain", "static"}
    command = found.left_out["dynamic"]
    assert command.startswith("treeopt profile --heads heads")
    assert command.endswith("--kind dynamic -o dynamic.profile.yaml --batch-size 1,4 --context 128")
    only = verdicts_of(CALIBRATION, [dynamic])
    assert {one.kind for one in only.verdicts[0].settings} == {"none", "dynamic"}
    assert list(only.left_out) == ["static"]
    assert verdicts_of(CALIBRATION, [static, dynamic]).left_out == {}
    untraced = dataclasses.replace(CALIBRATION, steps=None)
    found = verdicts_of(untraced, [static, dynamic])
    assert found.left_out == {"dynamic": "treeopt calibrate --kind dynamic, with the same --drafter"}


def test_each_kind_is_priced_by_its_own_profile() -> None:
    """Per-step trees that take longer to draft lose where they would win."""
    flat, slow = profile_of(TIMES["flat"], "static"), profile_of(lambda n, b, c: 1.0 + 4.0 * (n > 1), "dynamic")
    found = verdicts_of(CALIBRATION, [flat, slow]).verdicts[0]
    by_kind = {one.kind: one for one in found.settings}
    assert by_kind["dynamic"].budget.overhead == pytest.approx(5.0)
    assert found.best.kind in ("chain", "static")
    assert found.best is found.best_of(found.best.kind)
    assert found.best_of("dynamic").budget.speedup < 1  # type: ignore[union-attr]


def test_chains_are_priced_by_a_profile_of_chains() -> None:
    """With one, chains take its seconds and static trees their own; it alone leaves trees out, not chains."""
    trees, chains = profile_of(TIMES["flat"], "static"), profile_of(lambda n, b, c: 1.0 + n, "chain", sizes=(1, 2, 5))
    found = verdicts_of(CALIBRATION, [trees, chains]).verdicts[0]
    overheads = {(one.kind, one.budget.nodes): one.budget.overhead for one in found.settings}
    assert overheads["chain", 5] == pytest.approx(3.0)
    assert ("chain", 6) not in overheads
    assert overheads["static", 32] == 1.0
    only = verdicts_of(CALIBRATION, [chains])
    assert {one.kind for one in only.verdicts[0].settings} == {"none", "chain"}
    assert list(only.left_out) == ["static", "dynamic"]


def test_chains_of_a_draft_model_have_a_doubt() -> None:
    """A tree of as many nodes has fewer levels, so a profile of trees prices these chains too low."""
    source = {"drafter": "d1", "drafter_name": "model"}
    trees, chains = (
        dataclasses.replace(profile_of(TIMES["flat"], kind), provenance={"kind": kind, **source})
        for kind in ("static", "chain")
    )
    assert "--kind chain" in " ".join(verdicts_of(CALIBRATION, [trees]).warnings)
    assert not verdicts_of(CALIBRATION, [trees, chains]).warnings


def test_what_was_not_measured_is_refused() -> None:
    """E230 for another batch or context, two profiles of a kind, or none; E223 for another drafter."""
    static = profile_of(TIMES["flat"], "static")
    other = dataclasses.replace(static, provenance={"kind": "static", "drafter": "d2"})
    cases = (
        ([static], {"batches": [3]}, Code.PROFILE_INVALID, "does not hold batch 3"),
        ([static], {"batches": [1], "contexts": [128, 99]}, Code.PROFILE_INVALID, "batch 1 with context 99"),
        ([static, static], {}, Code.PROFILE_INVALID, "two profiles are of static trees"),
        ([profile_of(TIMES["flat"], "chain")] * 2, {}, Code.PROFILE_INVALID, "two profiles are of chains"),
        ([static], {"kinds": ["dynamic"]}, Code.PROFILE_INVALID, "no profile is of dynamic trees"),
        ([], {}, Code.PROFILE_INVALID, "no profile is of static or dynamic"),
        ([other], {}, Code.DRAFTER_MISMATCH, "d2"),
        ([profile_of(TIMES["flat"], sizes=(2, 8))], {}, Code.PROFILE_INVALID, "1 node"),
    )
    for profiles, options, code, what in cases:
        error = refusal_of(verdicts_of, CALIBRATION, profiles, **options)
        assert error.code is code
        assert what in error.what


def test_fastest_of_equals_is_the_first() -> None:
    """Without `equal` the greatest; with it the first that is close, but never one below the least gain."""
    assert fastest([1.5, 1.506, 1.2]) == 1
    assert fastest([1.5, 1.506, 1.2], equal=EQUAL) == 0
    assert fastest([1.017, 1.021], equal=EQUAL) == 1
    assert fastest([1.0, 1.019], equal=EQUAL) is None
    assert fastest([], equal=EQUAL) is None
    assert fastest(np.array([1.2, 1.2])) == 0
