"""One build: texts held out, number of nodes, method, and one task or several."""

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
from treeopt.optimize.intervals import Interval, by_text, difference_interval, sampling_interval
from treeopt.optimize.mixtures import Mixed, TaskMatrix, Tasks
from treeopt.optimize.select_method import MEDUSA, Fitter, Limits, Method, MethodFit, candidates
from treeopt.optimize.tree_builder import check_size, describe, tree_limits
from treeopt.progress import Progress, silent
from treeopt.tree import Tree


@dataclass(frozen=True)
class BuildJob:
    """The options of a build; see also `treeopt.optimize.tree_builder.build_tree`.

    Args:
        nodes: the budget, root counted; the fastest size by `profile` where None.
        values: `independent` or `joint`.
        weights: `uniform` or `visits`.
        top_k: K, the ranks of each head that are considered.
        max_rank: the largest rank of a path; no further limit where None.
        max_depth: the length of the longest path; the number of heads where None.
        holdout: number of texts, the last ones, that are held out and judged at the end.
        profile: seconds per step.
        batch: texts decoded together, as in `profile`.
        context: cached tokens, as in `profile`; the most measured where None.
        shares: weight of each task where there are several calibrations; proportional to their tokens where None.
        robust: minimise the loss on the worst task, instead of `shares`.
        exactly: build with these values and weights, even where the Medusa tree is better in cross-validation.
        contiguous: number of first levels whose siblings have the ranks 0, 1, .. without a gap.
        engine: a name of `treeopt.engines.ENGINES`, whose limits are kept as well; none where empty.
    """

    nodes: int | None
    values: str = DEFAULT_VALUES
    weights: str = DEFAULT_WEIGHTS
    top_k: int = DEFAULT_TOP_K
    max_rank: int | None = None
    max_depth: int | None = None
    holdout: int = 0
    profile: LatencyProfile | None = None
    batch: int = 1
    context: int | None = None
    shares: Sequence[float] | None = None
    robust: bool = False
    exactly: bool = False
    contiguous: int = 0
    engine: str = ""

    @property
    def constrained(self) -> bool:
        """Whether the tree is limited for the sake of an engine, beyond size, depth and K."""
        return bool(self.engine or self.contiguous or self.max_rank is not None)

    @property
    def unconstrained(self) -> BuildJob:
        """The same job without these limits."""
        return dataclasses.replace(self, engine="", contiguous=0, max_rank=None)

    @property
    def named_limits(self) -> dict[str, str]:
        """The engine whose limits are kept, for the source of the tree."""
        return {"engine": self.engine} if self.engine else {}

    @property
    def cuts(self) -> dict[str, Any]:
        """The limits of ranks, depth and gaps, those of the engine included, for `tree_limits`."""
        engine = ENGINES[self.engine] if self.engine else None
        return {
            "top_k": self.top_k,
            "max_depth": _least(self.max_depth, engine.max_depth if engine else None),
            "max_rank": _least(self.max_rank, engine.max_rank if engine else None),
            "contiguous": max(self.contiguous, engine.contiguous if engine else 0),
        }

    @property
    def methods(self) -> list[Method]:
        """The candidate methods."""
        return candidates(self.values, self.weights, exactly=self.exactly)


@dataclass(frozen=True)
class Built:
    """A finished tree and the intermediate results.

    Args:
        tree: the tree.
        fit: how its method was chosen.
        fitted: the texts it was fitted to.
        limits: of the tree.
        budget: the number of nodes that was given, or found to be the fastest.
        choice: the fastest size, where it was searched.
        matrix: tokens per step of each task's tree on each task, where there are several.
        mixed: the fit to several tasks.
        aside: the texts held out.
        dropped: number of held-out texts that are equal to a fitted one; they are in neither part.
    """

    tree: Tree
    fit: MethodFit
    fitted: Calibration
    limits: Limits
    budget: int
    choice: SizeChoice | None
    matrix: TaskMatrix | None
    mixed: Mixed | None
    aside: Calibration | None
    dropped: int

    def judgement(self) -> Judgement | None:
        """The figures of the tree on the texts held out; None where there are none. Call it after the tree is saved."""
        if self.aside is None:
            return None
        return judge(self.tree, self.fitted, self.aside, self.dropped, self.limits)


def run_job(calibrations: Sequence[Calibration], job: BuildJob, *, progress: Progress = silent) -> Built:
    """Build the tree of a job from one calibration, or from one for each task.

    Args:
        calibrations: one, or one for each task.
        job: the options.
        progress: called after each fold.

    Raises:
        ValueError: where numbers are out of range, or options for one and for several tasks are mixed.
        TreeoptError: E105 where the engine takes no tree of this size; E204 where no file could hold the tree; E221
            where the tasks' calibrations cannot be compared; E223 and E230 as `best_size`.
    """
    if job.shares is not None and len(job.shares) != len(calibrations):
        raise ValueError(f"{len(job.shares)} shares for {len(calibrations)} calibrations")
    if len(calibrations) > 1:
        return _several(calibrations, job, progress)
    if job.robust or not calibrations:
        raise ValueError("a robust tree needs several calibrations, any tree at least one")
    if job.nodes is not None:
        _check_engine(job.nodes, job)
        check_size(tree_limits(calibrations[0], job.nodes, **job.cuts), calibrations[0].num_heads, "--nodes")
    fitted, aside, dropped = calibrations[0], None, 0
    if job.holdout:
        fitted, aside, dropped = split(calibrations[0], job.holdout)
    choice, nodes = None, job.nodes
    if nodes is None:
        if job.profile is None:
            raise ValueError("the fastest size needs a latency profile")
        check_priced(job.profile, calibrations[0], KINDS[0])
        step_seconds(job.profile, ONE_NODE, job.batch, job.context)  # speedups refer to one node: fail before any work
        most = min(job.profile.largest(job.batch, job.context), MAX_NODES)
        sizing = Fitter(fitted, tree_limits(fitted, most, **job.cuts), progress=progress)
        choice = best_size(sizing, job.methods, job.profile, job.batch, job.context)
        nodes = choice.best.nodes
    limits = tree_limits(fitted, nodes, **job.cuts)
    fitter = Fitter(fitted, limits, progress=progress)
    fit = fitter.choose(job.methods)
    return Built(
        describe(fitter, fit, **job.named_limits), fit, fitted, limits, nodes, choice, None, None, aside, dropped
    )


def _several(calibrations: Sequence[Calibration], job: BuildJob, progress: Progress) -> Built:
    if job.holdout or job.nodes is None:
        raise ValueError("a holdout and the fastest size take one calibration")
    _check_engine(job.nodes, job)
    limits = tree_limits(calibrations[0], job.nodes, **job.cuts)
    check_size(limits, calibrations[0].num_heads, "--nodes")
    tasks = Tasks(calibrations, limits, job.methods, progress=progress)
    matrix = tasks.matrix()
    shares = job.shares or [calibration.positions for calibration in calibrations]
    mixed = tasks.robust() if job.robust else tasks.weighted(shares)
    shown = ", ".join(f"{share:.4g}" for share in mixed.shares)
    chosen_by = "robust" if job.robust else "shares"
    tree = describe(mixed.fitter, mixed.fit, task_shares=shown, chosen_by=chosen_by, **job.named_limits)
    return Built(tree, mixed.fit, tasks.joined, limits, job.nodes, None, matrix, mixed, None, 0)


def _least(*limits: int | None) -> int | None:
    """The least of several limits, some of which are None."""
    return min((limit for limit in limits if limit is not None), default=None)


def _check_engine(nodes: int, job: BuildJob) -> None:
    """Raise E105 where the engine takes no tree of so many nodes."""
    most = ENGINES[job.engine].max_nodes if job.engine else None
    if most is not None and nodes > most:
        what = f"{ENGINES[job.engine].reader} takes {most:,} nodes at most here, not {nodes:,}"
        raise TreeoptError(Code.TREE_NOT_EXPORTABLE, what, at=f"--nodes {nodes}", fix=f"--nodes {most}")


@dataclass(frozen=True)
class Judgement:
    """Tokens per step on the texts held out, of the tree and of the Medusa tree of the same size and the same fit.

    `dropped` held-out texts were equal to a fitted one. `gain` is the paired interval of the difference. Intervals are
    None below two different texts.
    """

    texts: int
    distinct: int
    dropped: int
    tokens_per_step: float
    interval: Interval | None
    medusa_tokens_per_step: float
    medusa_interval: Interval | None
    gain: Interval | None


def split(calibration: Calibration, last: int) -> tuple[Calibration, Calibration, int]:
    """The fitted sequences, the last ones (held out), and the number of these that equal a fitted text and are dropped.

    Raises:
        TreeoptError: E303 where no text would be left to fit, or to judge.
    """
    texts = calibration.sequences
    if last >= texts:
        what = f"{last} of {texts} texts cannot be held out"
        why = "one text or more must remain to fit"
        raise TreeoptError(Code.PROMPTS_EMPTY, what, at=f"--holdout {last}", why=why, fix="a smaller --holdout")
    fitted = calibration.select(range(texts - last))
    known = set(fitted.token_hashes)
    fresh = [s for s in range(texts - last, texts) if calibration.token_hashes[s] not in known]
    if not fresh:
        what = f"each of the last {last} texts is equal to one of the others"
        raise TreeoptError(Code.PROMPTS_EMPTY, what, at=f"--holdout {last}", fix="calibrate on more different prompts")
    return fitted, calibration.select(fresh), last - len(fresh)


def judge(tree: Tree, fitted: Calibration, aside: Calibration, dropped: int, limits: Limits) -> Judgement:
    """Replay a finished tree, and the Medusa tree fitted to the same texts, over the texts held out."""
    medusa = Fitter(fitted, limits).build(MEDUSA).tree()
    judged = Fitter(aside, limits)
    sums, medusa_sums = judged.sums(tree), judged.sums(medusa)
    by_tree = by_text(aside.token_hashes, sums.tokens, sums.steps)
    by_medusa = by_text(aside.token_hashes, medusa_sums.tokens, medusa_sums.steps)
    return Judgement(
        texts=aside.sequences,
        distinct=aside.distinct,
        dropped=dropped,
        tokens_per_step=sums.tokens_per_step,
        interval=sampling_interval(*by_tree),
        medusa_tokens_per_step=medusa_sums.tokens_per_step,
        medusa_interval=sampling_interval(*by_medusa),
        gain=difference_interval(by_tree[0], by_tree[1], by_medusa[1], by_medusa[0]),
    )
