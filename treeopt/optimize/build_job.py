"""One build: number of nodes, method, and one task or several."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from treeopt.calibration import Calibration
from treeopt.defaults import DEFAULT_TOP_K, DEFAULT_VALUES, DEFAULT_WEIGHTS, KINDS, MAX_NODES, ONE_NODE
from treeopt.engines import ENGINES
from treeopt.errors import Code, TreeoptError
from treeopt.latency import LatencyProfile
from treeopt.optimize.budget import check_priced, step_seconds
from treeopt.optimize.curve import SizeChoice, best_size
from treeopt.optimize.mixtures import Mixed, Tasks
from treeopt.optimize.select_method import Fitter, Limits, Method, MethodFit, candidates
from treeopt.optimize.tree_builder import check_size, describe, tree_limits
from treeopt.progress import Progress, silent
from treeopt.tree import Tree


@dataclass(frozen=True)
class BuildJob:
    """The options of a build; see also `treeopt.optimize.tree_builder.build_tree`."""

    nodes: int | None  # the budget, root counted; the fastest size by `profile` where None
    values: str = DEFAULT_VALUES  # `independent` or `joint`
    weights: str = DEFAULT_WEIGHTS  # `uniform` or `visits`
    top_k: int = DEFAULT_TOP_K  # K, the ranks of each head that are considered
    max_rank: int | None = None  # the largest rank of a path; no further limit where None
    max_depth: int | None = None  # the length of the longest path; the number of heads where None
    profile: LatencyProfile | None = None  # seconds per step
    batch: int = 1  # texts decoded together, as in `profile`
    context: int | None = None  # cached tokens, as in `profile`; the most measured where None
    shares: Sequence[float] | None = None  # weight of each task, of several; proportional to their tokens where None
    robust: bool = False  # minimise the loss on the worst task, instead of `shares`
    exactly: bool = False  # build with these values and weights, even where the Medusa tree is better
    engine: str = ""  # a name of `treeopt.engines.ENGINES`, whose limits are kept as well; none where empty

    @property
    def constrained(self) -> bool:
        """Whether the tree is limited for the sake of an engine, beyond size, depth and K."""
        return bool(self.engine) or self.max_rank is not None

    @property
    def unconstrained(self) -> BuildJob:
        """The same job without these limits."""
        return dataclasses.replace(self, engine="", max_rank=None)

    @property
    def cuts(self) -> dict[str, Any]:
        """The limits of ranks, depth and gaps, those of the engine included, for `tree_limits`."""
        engine = ENGINES[self.engine] if self.engine else None
        return {
            "top_k": self.top_k,
            "max_depth": _least(self.max_depth, engine.max_depth if engine else None),
            "max_rank": _least(self.max_rank, engine.max_rank if engine else None),
            "contiguous": engine.contiguous if engine else 0,
        }

    @property
    def methods(self) -> list[Method]:
        """The candidate methods."""
        return candidates(self.values, self.weights, exactly=self.exactly)


@dataclass(frozen=True)
class Built:
    """A finished tree and the intermediate results."""

    tree: Tree
    fit: MethodFit  # how its method was chosen
    fitted: Calibration  # the texts it was fitted to
    limits: Limits
    budget: int  # the number of nodes that was given, or found to be the fastest
    choice: SizeChoice | None = None  # the fastest size, where it was searched
    mixed: Mixed | None = None  # the fit to several tasks


def run_job(calibrations: Sequence[Calibration], job: BuildJob, *, progress: Progress = silent) -> Built:
    """Build the tree of a job from one calibration, or from one for each task; ValueError where these are mixed."""
    if job.shares is not None and len(job.shares) != len(calibrations):
        raise ValueError(f"{len(job.shares)} shares for {len(calibrations)} calibrations")
    if not calibrations or (job.robust and len(calibrations) == 1):
        raise ValueError("a robust tree needs several calibrations, any tree at least one")
    if len(calibrations) > 1 and job.nodes is None:
        raise ValueError("the fastest size takes one calibration")
    if job.nodes is not None:
        _check_engine(job.nodes, job)
        check_size(tree_limits(calibrations[0], job.nodes, **job.cuts), calibrations[0].num_heads, "--nodes")
    if len(calibrations) > 1:
        return _several(calibrations, job, progress)
    fitted, choice, nodes = calibrations[0], None, job.nodes
    if nodes is None:
        if job.profile is None:
            raise ValueError("the fastest size needs a latency profile")
        check_priced(job.profile, fitted, KINDS[0])
        step_seconds(job.profile, ONE_NODE, job.batch, job.context)  # speedups refer to one node: fail before any work
        most = min(job.profile.largest(job.batch, job.context), MAX_NODES)
        sizing = Fitter(fitted, tree_limits(fitted, most, **job.cuts), progress=progress)
        choice = best_size(sizing, job.methods, job.profile, job.batch, job.context)
        nodes = choice.best.nodes
    limits = tree_limits(fitted, nodes, **job.cuts)
    fitter = Fitter(fitted, limits, progress=progress)
    fit = fitter.choose(job.methods)
    tree = describe(fitter, fit, engine=job.engine)
    return Built(tree, fit, fitted, limits, nodes, choice)


def _several(calibrations: Sequence[Calibration], job: BuildJob, progress: Progress) -> Built:
    assert job.nodes is not None
    limits = tree_limits(calibrations[0], job.nodes, **job.cuts)
    tasks = Tasks(calibrations, limits, job.methods, progress=progress)
    shares = job.shares or [calibration.positions for calibration in calibrations]
    mixed = tasks.robust() if job.robust else tasks.weighted(shares)
    shown = ", ".join(f"{share:.4g}" for share in mixed.shares)
    chosen_by = "robust" if job.robust else "shares"
    tree = describe(mixed.fitter, mixed.fit, task_shares=shown, chosen_by=chosen_by, engine=job.engine)
    return Built(tree, mixed.fit, tasks.joined, limits, job.nodes, mixed=mixed)


def _least(*limits: int | None) -> int | None:
    """The least of several limits, some of which are None."""
    return min((limit for limit in limits if limit is not None), default=None)


def _check_engine(nodes: int, job: BuildJob) -> None:
    """Raise E105 where the engine takes no tree of so many nodes."""
    most = ENGINES[job.engine].max_nodes if job.engine else None
    if most is not None and nodes > most:
        what = f"{ENGINES[job.engine].reader} takes {most:,} nodes at most here, not {nodes:,}"
        raise TreeoptError(Code.TREE_NOT_EXPORTABLE, what, at=f"--nodes {nodes}", fix=f"--nodes {most}")
