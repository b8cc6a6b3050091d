"""The fastest of several drafters, against loops over all sizes and positions with made-up seconds."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from helpers import stretches
from looped import looped
from per_step_traces import naive, traced
from refusals import refusal_of

from treeopt.calibration import Calibration
from treeopt.errors import Code, TreeoptError
from treeopt.latency import LatencyPoint, LatencyProfile
from treeopt.optimize.auto_drafter import DrafterChoice, choose_drafter
from treeopt.optimize.budget import step_seconds
from treeopt.optimize.build_job import BuildJob
from treeopt.optimize.curve import default_sizes
from treeopt.optimize.per_step import fastest_policy
from treeopt.optimize.select_method import Fitter
from treeopt.optimize.tree_builder import tree_limits
from treeopt.policy import TreePolicy
from treeopt.tree import Tree

Seconds = dict[int, tuple[float, float]]  # of a whole step, and of drafting, by nodes
CHEAP: Seconds = {1: (1.0, 0.0), 2: (1.05, 0.03), 8: (1.1, 0.04), 40: (1.4, 0.06)}
STEEP: Seconds = {1: (1.0, 0.0), 2: (1.2, 0.1), 8: (2.5, 0.5), 40: (9.0, 2.0)}
SLOW: Seconds = {n: (s - part + (n > 1) * 0.9, (n > 1) * 0.9) for n, (s, part) in CHEAP.items()}  # to draft
NAMES = {"d1": "ngram", "d2": "model+ngram", "": "heads"}
MACHINE = {"model_id": "b1", "device": "cpu", "dtype": "float32", "threads": 1}
WHOLE = BuildJob(nodes=None)


def profile_of(seconds: Seconds, drafter: str, kind: str, **machine: Any) -> LatencyProfile:
    """A profile of a drafter's trees at batch 1; drafting is stated for per-step trees alone, as `treeopt profile`."""
    points = [
        LatencyPoint(n, 1, 512, s, s, s, part if part and kind == "dynamic" else None)
        for n, (s, part) in seconds.items()
    ]
    source = {"kind": kind, "drafter_name": NAMES[drafter], **({"drafter": drafter} if drafter else {})}
    return LatencyProfile.from_points(points, {**MACHINE, **source, **machine})


def rates(calibrations: dict[str, Calibration], profiles: list[LatencyProfile]) -> dict[tuple[str, str], float]:
    """Tokens per second of each drafter and kind that has a profile, by loops over sizes and positions."""
    found = {}
    for profile in profiles:
        drafter, kind = str(profile.drafter), str(profile.kind)
        calibration = calibrations[drafter]
        if kind == "static":
            fitter = Fitter(calibration, tree_limits(calibration, profile.largest()))
            fit = fitter.choose(WHOLE.methods)
            sizes = default_sizes(len(fit.growth.values) + 1)
            sums = fitter.cross_validated_sums(fit.method, sizes)
            taus = [calibration.positions / each.steps.sum() for each in sums]
            by_size = (np.interp(n, sizes, taus) / step_seconds(profile, n) for n in range(1, sizes[-1] + 1))
            found[drafter, kind] = float(max(by_size))
        else:
            policy = fastest_policy(calibration, profile)
            sizes = naive(policy, calibration)[1]
            known = [point.nodes for point in profile.points[1:]]
            drafting = np.interp([*sizes, policy.nodes], known, [point.drafting or 0.0 for point in profile.points[1:]])
            seconds = sum(step_seconds(profile, size) for size in sizes) - drafting[:-1].sum()
            found[drafter, kind] = calibration.positions / (seconds + len(sizes) * drafting[-1])
    return found


CALIBRATIONS = {"d1": traced(1, sequences=20), "d2": traced(2, sequences=20, heads=4, exact=True, drafter="d2")}
KEYS = [("d1", "static"), ("d1", "dynamic"), ("d2", "static"), ("d2", "dynamic")]


def choose(seconds: dict[tuple[str, str], Seconds], job: BuildJob = WHOLE, **options: Any) -> DrafterChoice:
    """The choice between both drafters with these seconds."""
    profiles = [profile_of(curve, *key) for key, curve in seconds.items()]
    return choose_drafter(list(CALIBRATIONS.values()), profiles, job, **options)


@looped("cheap", KEYS)
def test_choice_equals_brute_force(cheap: tuple[str, str]) -> None:
    """The drafter and kind with the most tokens per second is taken, and each one's figure is that of the loops."""
    seconds = {key: CHEAP if key == cheap else STEEP for key in KEYS}
    expected = rates(CALIBRATIONS, [profile_of(curve, *key) for key, curve in seconds.items()])
    choice = choose(seconds)
    figures = {(one.group.drafter_id, one.kind): one.budget for one in choice.candidates}
    assert list(figures) == KEYS
    for key, budget in figures.items():
        assert budget is not None
        assert budget.tokens_per_second == pytest.approx(expected[key])
        assert budget.speedup == pytest.approx(expected[key] * 1.0)  # the autoregressive step takes one second
    best = max(expected, key=expected.__getitem__)
    assert best == cheap
    assert (choice.best.group.drafter_id, choice.best.kind) == best
    assert (choice.plan.drafter, isinstance(choice.plan, TreePolicy)) == (best[0], best[1] == "dynamic")
    assert choice.plan.nodes == choice.best.budget.nodes
    assert choice.warnings == ()


def test_calibrations_of_one_drafter_are_merged() -> None:
    """Two texts files of one drafter count together, and the tree is of both."""
    whole = traced(1, sequences=40)
    tasks = [whole.select(range(20)), whole.select(range(20, 40))]
    profiles = [profile_of(CHEAP, "d1", kind) for kind in ("static", "dynamic")]
    choice = choose_drafter(tasks, profiles, WHOLE)
    expected = rates({"d1": whole}, profiles)
    assert {("d1", one.kind): one.budget.tokens_per_second for one in choice.candidates if one.budget} == pytest.approx(
        expected
    )
    static = choose_drafter(tasks, profiles[:1], WHOLE)
    assert isinstance(static.plan, Tree)
    assert static.plan.source["calibration"]["sequences"] == 40
    policy = choose_drafter(tasks, profiles[1:], WHOLE).plan
    assert policy == fastest_policy(whole, profiles[1])
    assert policy.source["calibration"]["sequences"] == 40


def test_given_number_of_nodes_is_the_only_size() -> None:
    """With a number of nodes the drafters compete at that size, whatever would be faster."""
    choice = choose(dict.fromkeys(KEYS, STEEP), BuildJob(nodes=12))
    assert [one.budget.nodes for one in choice.candidates if one.budget] == [12, 12, 12, 12]
    assert choice.plan.nodes == 12
    for one in choice.candidates:
        assert one.budget is not None
        assert one.budget.seconds == pytest.approx(step_seconds(one.group.profiles[one.kind], 12))
    best = max(one.budget.tokens_per_step for one in choice.candidates if one.budget)
    assert choice.best.budget.tokens_per_step == best  # all take the same seconds


def test_nodes_have_no_price_in_path_tokens() -> None:
    """Of profiles in path tokens static trees alone are compared at a number of nodes."""
    profiles = [profile_of(CHEAP, "d1", kind, unit="path tokens") for kind in ("static", "dynamic")]
    choice = choose_drafter([CALIBRATIONS["d1"]], profiles, BuildJob(nodes=4))
    assert [bool(one.budget) for one in choice.candidates] == [True, False]
    assert "path tokens" in choice.candidates[1].missing


def test_what_has_no_profile_is_named_with_its_command() -> None:
    """Candidates without figures say why, and what to run."""
    calibrations = [CALIBRATIONS["d1"], dataclasses.replace(CALIBRATIONS["d2"], steps=None)]
    choice = choose_drafter(calibrations, [profile_of(CHEAP, "d1", "static")], WHOLE)
    found = {(one.group.name, one.kind): (one.missing, one.fix) for one in choice.candidates}
    command = "treeopt profile --heads heads --drafter d.safetensors --kind {0} -o {0}.profile.yaml"
    assert found == {
        ("ngram", "static"): ("", ""),
        ("ngram", "dynamic"): ("no profile", command.format("dynamic")),
        ("d.safetensors", "static"): ("no profile", command.format("static")),
        ("d.safetensors", "dynamic"): (
            "no traces of per-step trees",
            "treeopt calibrate --kind dynamic, with the same --drafter",
        ),
    }
    assert choice.best.group.name == "ngram"


def test_drafters_of_one_name_are_told_by_their_files() -> None:
    """Two n-gram drafters are shown with their files."""
    files = [
        dataclasses.replace(one, provenance=dataclasses.replace(one.provenance, drafter=f"of/{name}.safetensors"))
        for name, one in CALIBRATIONS.items()
    ]
    profiles = [profile_of(CHEAP, drafter, "static", drafter_name="ngram") for drafter in CALIBRATIONS]
    names = [one.group.name for one in choose_drafter(files, profiles, WHOLE, kinds=["static"]).candidates]
    assert names == ["ngram (d1.safetensors)", "ngram (d2.safetensors)"]


def test_profile_without_the_size_leaves_its_candidate_out() -> None:
    """A profile up to 8 nodes has no seconds of 12; the other drafter is taken."""
    few = {n: seconds for n, seconds in CHEAP.items() if n <= 8}
    choice = choose({("d1", "static"): few, ("d2", "static"): STEEP}, BuildJob(nodes=12), kinds=["static"])
    assert choice.best.group.drafter_id == "d2"
    assert "12 nodes" in choice.candidates[0].missing


@looped(
    "changed, said",
    [
        ({"device": "cuda"}, "device (cpu, cuda)"),
        ({"threads": 2}, "threads (1, 2)"),
        ({"model_id": "b2"}, "model_id (b1, b2)"),
    ],
)
def test_profiles_of_different_machines_are_doubted(changed: dict[str, Any], said: str) -> None:
    """The comparison is made, and the difference is named."""
    profiles = [profile_of(CHEAP, "d1", "static"), profile_of(CHEAP, "d2", "static", **changed)]
    [warning] = choose_drafter(list(CALIBRATIONS.values()), profiles, WHOLE).warnings
    assert warning == f"the profiles differ in {said}: their seconds cannot be compared"


def test_profiles_under_different_load_are_doubted() -> None:
    """Autoregressive steps that differ by more than a quarter are named."""
    twice = {n: (2 * s, 2 * part) for n, (s, part) in CHEAP.items()}
    [warning] = choose({("d1", "static"): CHEAP, ("d2", "static"): twice}).warnings
    assert warning.startswith("autoregressive steps take 1000.00 to 2000.00 ms")


def test_other_prompts_and_contexts_are_doubted() -> None:
    """Figures of other texts, and step times after other numbers of cached tokens, are no comparison of drafters."""
    profiles = [profile_of(CHEAP, "d1", "static"), profile_of(CHEAP, "d2", "static")]
    parts = [CALIBRATIONS["d1"], CALIBRATIONS["d2"].select(range(10))]
    [warning] = choose_drafter(parts, profiles, WHOLE).warnings
    assert warning.startswith("the calibrations are of different prompts")
    longer = [dataclasses.replace(point, context=2048) for point in profiles[1].points]
    profiles[1] = LatencyProfile.from_points(longer, profiles[1].provenance)
    [warning] = choose_drafter(list(CALIBRATIONS.values()), profiles, WHOLE).warnings
    assert warning.startswith("the profiles end at contexts [512, 2048]")


def test_profile_of_a_drafter_without_calibration_is_named() -> None:
    """It is not used, and that is said."""
    profiles = [profile_of(CHEAP, "d1", "static"), profile_of(CHEAP, "d2", "static")]
    choice = choose_drafter([CALIBRATIONS["d1"]], profiles, WHOLE)
    assert choice.warnings == ("no calibration is of model+ngram (d2), of which there is a profile of static trees",)


def test_nothing_to_compare_is_one_error() -> None:
    """Without any profile the error lists what each candidate lacks, and the commands."""
    error = refusal_of(choose_drafter, [CALIBRATIONS["d1"]], [], WHOLE)
    assert error.code is Code.PROFILE_INVALID
    assert error.at == "d.safetensors, static: no profile\nd.safetensors, dynamic: no profile"
    assert [one.split(" --kind ")[1] for one in error.fix.split(", then ")] == [
        "static -o static.profile.yaml",
        "dynamic -o dynamic.profile.yaml",
    ]


def test_different_base_models_are_refused() -> None:
    """Tokens per second of two models have nothing in common: E221."""
    other = dataclasses.replace(CALIBRATIONS["d2"].provenance, model_id="b2", model="other")
    calibrations = [CALIBRATIONS["d1"], dataclasses.replace(CALIBRATIONS["d2"], provenance=other)]
    error = refusal_of(choose_drafter, calibrations, [profile_of(CHEAP, "d1", "static")], WHOLE)
    assert error.code is Code.CALIBRATION_MISMATCH
    assert error.at == "base (b1)\nother (b2)"


def test_calibrations_of_other_heads_are_refused() -> None:
    """Within a drafter the calibrations must be mergeable: E221."""
    other = dataclasses.replace(CALIBRATIONS["d1"].provenance, heads_id="h2")
    calibrations = [CALIBRATIONS["d1"], dataclasses.replace(CALIBRATIONS["d1"], provenance=other)]
    assert (
        refusal_of(choose_drafter, calibrations, [profile_of(CHEAP, "d1", "static")], WHOLE).code
        is Code.CALIBRATION_MISMATCH
    )


@looped("two", [True, False])
def test_unclear_profiles_are_refused(two: bool) -> None:
    """Two profiles of the same steps, and one that does not say of which, are E230."""
    one = profile_of(CHEAP, "d1", "static")
    profiles = [one, profile_of(STEEP, "d1", "static")] if two else [one, LatencyProfile(one.points)]
    assert refusal_of(choose_drafter, [CALIBRATIONS["d1"]], profiles, WHOLE).code is Code.PROFILE_INVALID


@looped("nodes", [None, 24])
def test_options_of_static_trees_reach_them(nodes: int | None) -> None:
    """On traces whose levels depend on each other, the estimate of the Medusa tree has fewer tokens per step."""
    calibration, profiles = stretches(1), [profile_of({1: (1.0, 0.0), 24: (1.0, 0.5)}, "", "static")]
    medusa = BuildJob(nodes=nodes, values="independent", weights="uniform", exactly=True)
    jobs = (BuildJob(nodes=nodes), medusa, BuildJob(nodes=nodes, max_depth=1))
    best, found, flat = (choose_drafter([calibration], profiles, job, kinds=["static"]) for job in jobs)
    assert best.best.budget.tokens_per_step > found.best.budget.tokens_per_step
    assert flat.plan.depth == 1


def test_other_errors_leave_no_candidate_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what a profile or a tree lacks is a reason to go on without it."""

    def failing(*_: object) -> None:
        raise TreeoptError(Code.PROMPTS_EMPTY, "no texts")

    monkeypatch.setattr("treeopt.optimize.auto_drafter._static_budget", failing)
    error = refusal_of(choose, {("d1", "static"): CHEAP}, kinds=["static"])
    assert (error.code, error.what) == (Code.PROMPTS_EMPTY, "no texts")
