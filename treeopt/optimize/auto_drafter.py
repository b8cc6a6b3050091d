"""The drafter, kind and size of tree with the most tokens per second, the time of drafting included.

Drafters differ in tokens per step and in the seconds that drafting takes. A calibration gives the first, a latency
profile of the same drafter and kind the second: its steps contain drafting. So the comparison is of whole steps.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath

import numpy as np

from treeopt.calibration import Calibration
from treeopt.defaults import HEADS, KINDS, MAX_NODES, ONE_NODE
from treeopt.errors import Code, TreeoptError
from treeopt.latency import LatencyProfile
from treeopt.optimize.budget import Budget, fastest, profile_command, size_of, step_seconds
from treeopt.optimize.build_job import BuildJob, run_job
from treeopt.optimize.curve import best_size
from treeopt.optimize.per_step import build_policy, fastest_policy, policy_budget
from treeopt.optimize.select_method import Fitter, Limits
from treeopt.optimize.tree_builder import budget_of, build_tree, check_size, tree_limits
from treeopt.policy import Plan, TreePolicy
from treeopt.progress import Progress, silent

_SETTINGS = ("model_id", "device", "dtype", "threads", "attention")  # that comparable profiles share
_DRIFT = 1.25  # ratio of one-node steps of two profiles from which on they were measured under different load
_LEFT_OUT = (Code.PROFILE_INVALID, Code.TREE_INVALID)  # errors that leave out one candidate


@dataclass(frozen=True)
class DrafterGroup:
    """The calibration and the profiles of one drafter, or of the guesses of the heads."""

    name: str
    calibration: Calibration
    profiles: Mapping[str, LatencyProfile]

    @property
    def drafter_id(self) -> str:
        """As in the provenance of its calibrations; empty for the guesses of the heads."""
        return self.calibration.provenance.drafter_id


@dataclass(frozen=True)
class Candidate:
    """A drafter and a kind of trees.

    `budget` has the figures of the fastest or the given size; without them `missing` says why, and `fix` what helps.
    """

    group: DrafterGroup
    kind: str
    budget: Budget | None
    missing: str = ""
    fix: str = ""


@dataclass(frozen=True)
class DrafterChoice:
    """The fastest of several candidates.

    `plan` is its tree or policy, or the tree of the root alone where none pays. `warnings` are doubts about the
    comparison.
    """

    plan: Plan
    best: Candidate
    candidates: tuple[Candidate, ...]
    warnings: tuple[str, ...]


def choose_drafter(
    calibrations: Sequence[Calibration],
    profiles: Sequence[LatencyProfile],
    job: BuildJob,
    *,
    kinds: Sequence[str] = KINDS,
    progress: Progress = silent,
) -> DrafterChoice:
    """Build the tree or policy with the most tokens per second over several drafters.

    Tokens per step of static trees are cross-validated where there are enough different texts; those of per-step trees
    are replayed. Calibrations of one drafter are merged. A candidate without a profile is left out.
    """
    _check_alike(calibrations)
    priced = _by_drafter_and_kind(profiles)
    groups = _groups(calibrations, priced)
    if job.nodes is not None:
        for group in groups:
            check_size(_limits(group.calibration, job, job.nodes), group.calibration.num_heads, "--nodes")
    candidates = tuple(_candidate(group, kind, job, progress) for group in groups for kind in kinds)
    known = [(one, one.budget) for one in candidates if one.budget is not None]
    if not known:
        raise _nothing(candidates)
    known.sort(key=lambda pair: pair[1].nodes)  # of equally fast ones the smaller
    speedups = [budget.speedup for _, budget in known]
    pays = fastest(speedups)
    # A given size is built even where it does not pay.
    best = known[pays or 0 if job.nodes is None else int(np.argmax(speedups))][0]
    none = job.nodes is None and pays is None
    plan = build_tree(best.group.calibration, ONE_NODE) if none else _plan(best, job, progress)
    warnings = [
        f"no calibration is of {_called(profile)}, of which there is a profile of {kind} trees"
        for (drafter, kind), profile in priced.items()
        if drafter not in {group.drafter_id for group in groups}
    ]
    warnings += profile_doubts([one.group.profiles[one.kind] for one, _ in known], job.batch, job.context)
    if len({one.calibration.prompt_ids for one in groups}) > 1:
        warnings.append("the calibrations are of different prompts: a part of the difference is that of their texts")
    if pays is None:
        warnings.append("no drafter is faster than autoregressive decoding on this machine")
    return DrafterChoice(plan, best, candidates, tuple(warnings))


def _check_alike(calibrations: Sequence[Calibration]) -> None:
    """Raise E221 where the tokens of a second, or of a step, of these calibrations cannot be compared."""
    models = {one.provenance.model_id: f"{one.provenance.model} ({one.provenance.model_id})" for one in calibrations}
    answers = {one.temperature for one in calibrations}
    said = {one: "given answers" if one is None else f"temperature {one:g}" for one in answers}
    for found, of, figure, option in (
        (models, "of different base models", "second", "--model"),
        (said, "of texts at different temperatures", "step", "--temperature"),
    ):
        if len(found) > 1:
            what = f"the calibrations are {of}, so their tokens per {figure} cannot be compared"
            fix = f"treeopt calibrate again, with one {option}"
            raise TreeoptError(Code.CALIBRATION_MISMATCH, what, at="\n".join(found.values()), fix=fix)


def _by_drafter_and_kind(profiles: Sequence[LatencyProfile]) -> dict[tuple[str, str], LatencyProfile]:
    priced: dict[tuple[str, str], LatencyProfile] = {}
    for profile in profiles:
        if profile.drafter is None or profile.kind is None:
            what = "a profile does not say of which drafter and kind its steps are"
            raise TreeoptError(Code.PROFILE_INVALID, what, fix="measure it with treeopt profile")
        if priced.setdefault((profile.drafter, profile.kind), profile) is not profile:
            what = f"two profiles are of {profile.kind} trees by {_called(profile)}"
            raise TreeoptError(Code.PROFILE_INVALID, what, fix="leave one out")
    return priced


def _groups(
    calibrations: Sequence[Calibration], priced: Mapping[tuple[str, str], LatencyProfile]
) -> list[DrafterGroup]:
    """The calibrations and profiles of each drafter; of several with one name, its file or id is in the name, too."""
    by_drafter: dict[str, list[Calibration]] = {}
    for calibration in calibrations:
        by_drafter.setdefault(calibration.provenance.drafter_id, []).append(calibration)
    found = []
    for drafter_id, several in by_drafter.items():
        calibration = several[0].merge(*several[1:])
        profiles = {kind: profile for (drafter, kind), profile in priced.items() if drafter == drafter_id}
        named = [name for profile in profiles.values() if (name := str(profile.provenance.get("drafter_name", "")))]
        known = PurePath(calibration.provenance.drafter).name or drafter_id
        name = (named or [known])[0] if drafter_id else HEADS
        found.append((name, f"{name} ({known})" if known else name, (calibration, profiles)))
    names = [name for name, *_ in found]
    return [
        DrafterGroup(name if names.count(name) == 1 else whole, *traced_and_timed)
        for name, whole, traced_and_timed in found
    ]


def _called(profile: LatencyProfile) -> str:
    """The drafter of a profile, for a message."""
    name = str(profile.provenance.get("drafter_name", "")) or (HEADS if not profile.drafter else "drafter")
    return f"{name} ({profile.drafter})" if profile.drafter else name


def _candidate(group: DrafterGroup, kind: str, job: BuildJob, progress: Progress) -> Candidate:
    """The figures of a drafter's trees of one kind, or why there are none."""
    profile = group.profiles.get(kind)
    static = kind == KINDS[0]
    if not static and group.calibration.steps is None:
        again = "treeopt calibrate --kind dynamic, with the same --drafter"
        return Candidate(group, kind, None, "no traces of per-step trees", again)
    if profile is None:
        return Candidate(group, kind, None, "no profile", profile_command(group.calibration, kind))
    if not static and profile.path_tokens and job.nodes is not None:
        return Candidate(group, kind, None, "a number of nodes has no price in path tokens", "--nodes auto")
    try:
        if static:
            return Candidate(group, kind, _static_budget(group, profile, job, progress))
        policy = _policy(group, profile, job)
        budget = policy_budget(policy, group.calibration, profile, batch=job.batch, context=job.context)
    except TreeoptError as error:
        if error.code not in _LEFT_OUT:
            raise
        return Candidate(group, kind, None, error.what, error.fix)
    return Candidate(group, kind, budget)


def _static_budget(group: DrafterGroup, profile: LatencyProfile, job: BuildJob, progress: Progress) -> Budget:
    """The figures of the best static tree of the given or the fastest size."""
    where = (job.batch, job.context)
    alone = step_seconds(profile, ONE_NODE, *where)
    largest = job.nodes or min(profile.largest(*where), MAX_NODES)
    limits = _limits(group.calibration, job, largest, path_tokens=profile.path_tokens and job.nodes is None)
    fitter = Fitter(group.calibration, limits, progress=progress)
    if job.nodes is None:
        return best_size(fitter, job.methods, profile, *where)
    fit = fitter.choose(job.methods)
    tau = (fit.sums or fitter.sums(fit.tree)).tokens_per_step
    return Budget.of(fit.tree.nodes, tau, step_seconds(profile, size_of(fit.tree, profile), *where), alone)


def _policy(group: DrafterGroup, profile: LatencyProfile, job: BuildJob) -> TreePolicy:
    if job.nodes is not None:
        return build_policy(group.calibration, job.nodes)
    return fastest_policy(group.calibration, profile, batch=job.batch, context=job.context)


def _plan(best: Candidate, job: BuildJob, progress: Progress) -> Plan:
    """The tree or policy of a candidate."""
    assert best.budget is not None
    group = best.group
    if best.kind == KINDS[0]:
        size = best.budget.nodes
        by_paths = group.profiles[best.kind].path_tokens and job.nodes is None and size > ONE_NODE
        sized = dataclasses.replace(job, **budget_of(size, path_tokens=by_paths))
        return run_job(group.calibration, sized, progress=progress).tree
    return _policy(group, group.profiles[best.kind], job)


def _limits(calibration: Calibration, job: BuildJob, size: int, *, path_tokens: bool = False) -> Limits:
    budget = budget_of(size, path_tokens=path_tokens)
    return tree_limits(calibration, **budget, top_k=job.top_k, max_depth=job.max_depth, max_rank=job.max_rank)


def profile_doubts(profiles: Sequence[LatencyProfile], batch: int, context: int | None) -> list[str]:
    """Warnings where profiles were measured on different machines, under different load, or to different contexts."""
    found = []
    ends = {max(other for at, other, _ in (point.key for point in one.points) if at == batch) for one in profiles}
    if context is None and len(ends) > 1:
        found.append(f"the profiles end at contexts {sorted(ends)}: their speedups cannot be compared; use --context")
    values = {name: {str(profile.provenance.get(name, "")) for profile in profiles} for name in _SETTINGS}
    differing = [f"{name} ({', '.join(sorted(seen))})" for name, seen in values.items() if len(seen) > 1]
    if differing:
        found.append(f"the profiles differ in {', '.join(differing)}: their seconds cannot be compared")
    alone = np.array([step_seconds(profile, ONE_NODE, batch, context) for profile in profiles])
    if alone.max() > _DRIFT * alone.min():
        found.append(
            f"autoregressive steps take {alone.min() * 1e3:.2f} to {alone.max() * 1e3:.2f} ms by the profiles: "
            "compare the speedups, or measure all profiles one after the other on an idle machine"
        )
    return found


def _nothing(candidates: Sequence[Candidate]) -> TreeoptError:
    """E230 where no candidate has figures, with what each one lacks."""
    at = "\n".join(f"{one.group.name}, {one.kind}: {one.missing}" for one in candidates)
    fix = ", then ".join(dict.fromkeys(one.fix for one in candidates if one.fix))
    what = "no drafter has figures of tokens per second"
    return TreeoptError(Code.PROFILE_INVALID, what, at=at, why="drafting is a part of each step", fix=fix)
