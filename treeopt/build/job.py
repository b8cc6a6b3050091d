"""One build from start to end: what is set aside, which size, which method, one task or several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from treeopt.build.fit import Fit, Fitter, candidates
from treeopt.build.judge import Judgement, judge, split
from treeopt.build.mixture import Matrix, Mixed, Tasks
from treeopt.build.refine import Limits
from treeopt.build.sizes import SizeChoice, best_size
from treeopt.build.trees import DEFAULT_TOP_K, describe, tree_limits
from treeopt.calibration import Calibration
from treeopt.latency import LatencyProfile
from treeopt.tree import Tree


@dataclass(frozen=True)
class Job:
    """What is asked of a build; see `treeopt.build.trees.build_tree` for the first seven.

    Args:
        nodes: the budget, root counted; None takes the fastest by `profile`.
        values: `independent` or `joint`.
        weights: `uniform` or `visits`.
        refine_seconds: time for exchanging nodes.
        top_k: K.
        max_rank: no larger rank.
        max_depth: no longer path.
        holdout: so many of the last texts are set aside and judged by at the end.
        profile: seconds per step.
        batch: of the profile.
        context: of the profile; its longest where None.
        shares: of the tasks, where there are several calibrations; by their tokens where None.
        robust: the least loss on the worst task instead of shares.
    """

    nodes: int | None
    values: str = "joint"
    weights: str = "visits"
    refine_seconds: float = 0.0
    top_k: int = DEFAULT_TOP_K
    max_rank: int | None = None
    max_depth: int | None = None
    holdout: int = 0
    profile: LatencyProfile | None = None
    batch: int = 1
    context: int | None = None
    shares: Sequence[float] | None = None
    robust: bool = False


@dataclass(frozen=True)
class Built:
    """A finished tree and all that was found on the way; `judgement()` reads the texts set aside, once, when called."""

    tree: Tree
    fit: Fit
    fitted: Calibration
    limits: Limits
    asked: int
    choice: SizeChoice | None
    matrix: Matrix | None
    mixed: Mixed | None
    aside: Calibration | None
    dropped: int

    def judgement(self) -> Judgement | None:
        """What the tree does on the texts set aside; None where there are none. Call it when the tree is saved."""
        if self.aside is None:
            return None
        return judge(self.tree, self.fitted, self.aside, self.dropped, self.limits)


def run_job(calibrations: Sequence[Calibration], job: Job) -> Built:
    """Build the tree that a job asks for, from one calibration, or from one a task.

    Raises:
        ValueError: where numbers are out of range, or the job asks one and several tasks at once.
        TreeoptError: E221 where the tasks' calibrations do not belong together, E230 where the profile lacks something.
    """
    if job.shares is not None and len(job.shares) != len(calibrations):
        raise ValueError(f"{len(job.shares)} shares for {len(calibrations)} calibrations")
    if len(calibrations) > 1:
        return _several(calibrations, job)
    if job.robust or not calibrations:
        raise ValueError("a robust tree needs several calibrations, any tree at least one")
    fitted, aside, dropped = calibrations[0], None, 0
    if job.holdout:
        fitted, aside, dropped = split(calibrations[0], job.holdout)
    methods = candidates(job.values, job.weights, refined=job.refine_seconds > 0)
    choice, nodes = None, job.nodes
    if nodes is None:
        if job.profile is None:
            raise ValueError("the fastest size needs a latency profile")
        plain = [method for method in methods if not method.refined]
        largest = tree_limits(fitted, job.profile.largest(job.batch, job.context), **_cuts(job))
        choice = best_size(Fitter(fitted, largest), plain, job.profile, job.batch, job.context)
        nodes = choice.best.nodes
    limits = tree_limits(fitted, nodes, **_cuts(job))
    fitter = Fitter(fitted, limits, refine_seconds=job.refine_seconds)
    fit = fitter.choose(methods)
    return Built(describe(fitter, fit), fit, fitted, limits, nodes, choice, None, None, aside, dropped)


def _several(calibrations: Sequence[Calibration], job: Job) -> Built:
    if job.holdout or job.refine_seconds or job.nodes is None:
        raise ValueError("a holdout, refining and the fastest size take one calibration")
    limits = tree_limits(calibrations[0], job.nodes, **_cuts(job))
    tasks = Tasks(calibrations, limits, job.values, job.weights)
    matrix = tasks.matrix()
    shares = job.shares or [calibration.positions for calibration in calibrations]
    mixed = tasks.robust() if job.robust else tasks.weighted(shares)
    shown = ", ".join(f"{share:.4g}" for share in mixed.shares)
    tree = describe(mixed.fitter, mixed.fit, task_shares=shown, chosen_by="robust" if job.robust else "shares")
    return Built(tree, mixed.fit, tasks.joined, limits, job.nodes, None, matrix, mixed, None, 0)


def _cuts(job: Job) -> dict[str, int | None]:
    return {"top_k": job.top_k, "max_depth": job.max_depth, "max_rank": job.max_rank}
