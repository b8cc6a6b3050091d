"""One build: number of nodes and method."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from treeopt.calibration import Calibration
from treeopt.defaults import DEFAULT_TOP_K, DEFAULT_VALUES, DEFAULT_WEIGHTS, KINDS, MAX_NODES, ONE_NODE
from treeopt.engines import ENGINES
from treeopt.errors import Code, TreeoptError
from treeopt.latency import LatencyProfile
from treeopt.optimize.budget import Budget, check_priced, step_seconds
from treeopt.optimize.curve import best_size
from treeopt.optimize.select_method import Fitter, Limits, Method, MethodFit, candidates
from treeopt.optimize.tree_builder import budget_of, check_size, describe, tree_limits
from treeopt.progress import Progress, silent
from treeopt.tree import Tree


@dataclass(frozen=True)
class BuildJob:
    """The options of a build; see also `treeopt.optimize.tree_builder.build_tree`."""

    nodes: int | None  # the budget, root counted; the fastest size by `profile` where None
    path_tokens: int | None = None  # the budget of leaves * (depth + 1), in place of nodes
    values: str = DEFAULT_VALUES  # `independent` or `joint`
    weights: str = DEFAULT_WEIGHTS  # `uniform` or `visits`
    top_k: int = DEFAULT_TOP_K  # K, the ranks of each head that are considered
    max_rank: int | None = None  # the largest rank of a path; no further limit where None
    max_depth: int | None = None  # the length of the longest path; the number of heads where None
    profile: LatencyProfile | None = None  # seconds per step
    batch: int = 1  # texts decoded together, as in `profile`
    context: int | None = None  # cached tokens, as in `profile`; the most measured where None
    exactly: bool = False  # build with these values and weights, even where the Medusa tree is better
    engine: str = ""  # a name of `treeopt.engines.ENGINES`, whose limits are kept as well; none where empty

    @property
    def constrained(self) -> bool:
        """Whether the tree is limited for the sake of an engine, beyond size, depth and K."""
        return bool(self.engine) or self.max_rank is not None

    @property
    def cuts(self) -> dict[str, Any]:
        """The limits of ranks, depth and gaps, those of the engine included, for `tree_limits`."""
        engine = ENGINES[self.engine] if self.engine else None
        return {
            "top_k": self.top_k,
            "max_depth": _least(self.max_depth, engine.max_depth if engine else None),
            "max_rank": _least(self.max_rank, engine.max_rank if engine else None),
            "contiguous": engine.contiguous if engine else 0,
            "path_tokens": self.path_tokens,
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
    budget: int | None  # the number of nodes that was given, or found to be the fastest; None of path tokens
    fastest: Budget | None = None  # the figures of the fastest size, where it was searched


def run_job(calibration: Calibration, job: BuildJob, *, progress: Progress = silent) -> Built:
    """Build the tree of a job; ValueError where the fastest size is wanted without a profile."""
    best, nodes = None, job.nodes
    if nodes is None and job.path_tokens is None:
        best = _fastest(calibration, job, progress)
        assert job.profile is not None
        found = budget_of(best.nodes, path_tokens=job.profile.path_tokens and best.nodes > ONE_NODE)
        job, nodes = dataclasses.replace(job, **found), found["nodes"]
    elif nodes is not None:
        most = ENGINES[job.engine].max_nodes if job.engine else None
        if most is not None and nodes > most:
            what = f"{ENGINES[job.engine].reader} takes {most:,} nodes at most here, not {nodes:,}"
            raise TreeoptError(Code.TREE_NOT_EXPORTABLE, what, at=f"--nodes {nodes}", fix=f"--nodes {most}")
        check_size(tree_limits(calibration, nodes, **job.cuts), calibration.num_heads, "--nodes")
    limits = tree_limits(calibration, nodes, **job.cuts)
    fitter = Fitter(calibration, limits, progress=progress)
    fit = fitter.choose(job.methods)
    return Built(describe(fitter, fit, engine=job.engine), fit, calibration, limits, nodes, best)


def _fastest(calibration: Calibration, job: BuildJob, progress: Progress) -> Budget:
    """The fastest size by the profile of a job."""
    if job.profile is None:
        raise ValueError("the fastest size needs a latency profile")
    check_priced(job.profile, calibration, KINDS[0])
    step_seconds(job.profile, ONE_NODE, job.batch, job.context)  # speedups refer to one node: fail before any work
    engine = ENGINES[job.engine].max_nodes if job.engine else None
    most = min(job.profile.largest(job.batch, job.context), engine or MAX_NODES)
    limits = tree_limits(calibration, **{**job.cuts, **budget_of(most, path_tokens=job.profile.path_tokens)})
    return best_size(Fitter(calibration, limits, progress=progress), job.methods, job.profile, job.batch, job.context)


def _least(*limits: int | None) -> int | None:
    """The least of several limits, some of which are None."""
    return min((limit for limit in limits if limit is not None), default=None)
