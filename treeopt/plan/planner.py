"""The plan: overhead and speedup by nodes, batch and context, and the size and drafter with the greatest speedup."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import numpy as np

from treeopt.calibration import Calibration
from treeopt.defaults import DEFAULT_VALUES, DEFAULT_WEIGHTS, HEADS, KINDS, MAX_NODES, ONE_NODE, STEP_SIZES
from treeopt.errors import check_choice, check_counts
from treeopt.optimize.curve import default_sizes, measure_curve, policy_curve
from treeopt.optimize.select_method import Fitter, candidates
from treeopt.optimize.tree_builder import check_size, tree_limits
from treeopt.plan.operators import Floats
from treeopt.plan.step_model import StepModel, check_steps
from treeopt.progress import Progress, silent
from treeopt.shape import shape_error

PER_LOG = 0.477  # tokens per step for each natural logarithm of nodes: arXiv:2401.10774, appendix G


@dataclass(frozen=True)
class Acceptance:
    """Tokens per step of trees of any size.

    Args:
        name: of the drafter; `logarithm` for the paper's.
        sizes: the sizes with a figure, ascending from 1; empty for 1 + 0.477 ln N.
        tokens: tokens per step of each; between sizes they are interpolated linearly, as in `build --nodes auto`.
        kind: of the trees, one of `KINDS`.
        provenance: entries of a latency profile that belong to the drafter.
        model: the base model of the calibration.

    Raises:
        ValueError: where the kind is unknown.
    """

    name: str = "logarithm"
    sizes: tuple[int, ...] = ()
    tokens: tuple[float, ...] = ()
    kind: str = KINDS[0]
    provenance: tuple[tuple[str, Any], ...] = ()
    model: str = ""

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, KINDS)

    @property
    def largest(self) -> int | None:
        """The largest size with a figure; None for any."""
        return self.sizes[-1] if self.sizes else None

    def at(self, nodes: Floats) -> Floats:
        """float64 [n]: tokens per step at sizes up to `largest`; exactly 1 at one node."""
        if not self.sizes:
            return 1.0 + PER_LOG * np.log(nodes)
        found: Floats = np.interp(nodes, self.sizes, self.tokens)
        return found


def calibrated_acceptance(
    calibration: Calibration, largest: int, *, name: str = "", kind: str = KINDS[0], progress: Progress = silent
) -> Acceptance:
    """Tokens per step by a calibration: the curve of `treeopt curve`, static trees cross-validated.

    Args:
        calibration: the traces of a drafter.
        largest: the largest size.
        name: of the drafter; by default that of its file, or `heads`.
        kind: static trees, or those of each step.
        progress: called after each fold.

    Raises:
        TreeoptError: as `measure_curve` and `policy_curve`.
        ValueError: where the size is out of range, or the kind unknown.
    """
    check_counts(largest=largest)
    check_choice("kind", kind, KINDS)
    source = calibration.provenance
    shown = name or (PurePath(source.drafter).name or source.drafter_id if source.drafter_id else HEADS)
    if kind == KINDS[1]:
        curve = policy_curve(calibration, default_sizes(min(largest, STEP_SIZES[-1])))
    else:
        limits = tree_limits(calibration, min(largest, MAX_NODES))
        check_size(limits, calibration.num_heads, "--nodes")
        fitter = Fitter(calibration, limits, progress=progress)
        method = fitter.choose(candidates(DEFAULT_VALUES, DEFAULT_WEIGHTS)).method
        curve = measure_curve(fitter, method, default_sizes(limits.nodes))
    provenance = {
        "heads": source.heads,
        "heads_id": source.heads_id,
        **({"drafter": source.drafter_id} if source.drafter_id else {}),
        "drafter_name": shown,
    }
    sizes, tokens = (tuple(getattr(point, name) for point in curve.points) for name in ("nodes", "tokens_per_step"))
    return Acceptance(shown, sizes, tokens, kind, tuple(provenance.items()), source.model)


@dataclass(frozen=True)
class PlanCandidate:
    """A drafter: its tokens per step, and the model whose steps include its drafting."""

    acceptance: Acceptance
    model: StepModel


@dataclass(frozen=True)
class PlanPoint:
    """The figures of one drafter with `nodes` nodes (root counted), `batch` texts and `context` cached tokens."""

    nodes: int
    batch: int
    context: int
    seconds: float
    overhead: float
    speedup: float
    tokens_per_step: float
    drafter: str


@dataclass(frozen=True)
class PlanBest:
    """The fastest size and drafter at one batch and context.

    Args:
        batch: texts.
        context: cached tokens.
        nodes: the fastest of the sizes of the plan; the smaller of equal ones.
        speedup: of it.
        drafter: of it.
        any_nodes: the fastest of all whole sizes up to the largest of the plan.
        any_speedup: of it.
        any_drafter: of it.
        memory: bytes of weights and cache at `nodes`.
    """

    batch: int
    context: int
    nodes: int
    speedup: float
    drafter: str
    any_nodes: int
    any_speedup: float
    any_drafter: str
    memory: float


@dataclass(frozen=True)
class SpeedPlan:
    """The result of `plan_speedup`: all points, and the best one of each batch and context."""

    points: tuple[PlanPoint, ...]
    best: tuple[PlanBest, ...]
    candidates: tuple[PlanCandidate, ...]

    def chosen(self, best: PlanBest) -> PlanCandidate:
        """The candidate of a best point."""
        return next(one for one in self.candidates if one.acceptance.name == best.drafter)


def plan_speedup(
    candidates: Sequence[PlanCandidate],
    nodes: Sequence[int],
    batches: Sequence[int] = (1,),
    contexts: Sequence[int] = (1024,),
) -> SpeedPlan:
    """Overhead and speedup of each size, batch and context, by the hardware model.

    Args:
        candidates: one or more drafters with different names, with the same base model and device.
        nodes: sizes, root counted; one node is included. A drafter is left out beyond its largest size.
        batches: texts decoded together.
        contexts: tokens in the cache of each text.

    Raises:
        TreeoptError: E240 for numbers below 1 or too large, and drafters of one name.

    Examples:
        >>> import treeopt
        >>> device = treeopt.device_preset("a100-80gb-pcie")
        >>> model = treeopt.StepModel(treeopt.model_shape("llama-7b"), device)
        >>> plan = treeopt.plan_speedup([treeopt.PlanCandidate(treeopt.Acceptance(), model)], [1, 32, 64, 128, 256])
        >>> plan.best[0].nodes
        128
    """
    names = [one.acceptance.name for one in candidates]
    if not names or len(set(names)) < len(names):
        raise shape_error("a plan takes drafters with different names", at=", ".join(names) or "none")
    sizes = sorted({ONE_NODE, *nodes})
    check_steps(np.array(sizes, np.float64), batches, contexts)
    pairs = [(batch, context) for batch in sorted(set(batches)) for context in sorted(set(contexts))]
    points = [point for pair in pairs for one in candidates for point in _points(one, sizes, *pair)]
    best = tuple(_best(candidates, points, sizes[-1], *pair) for pair in pairs)
    return SpeedPlan(tuple(points), best, tuple(candidates))


def _points(one: PlanCandidate, sizes: Sequence[int], batch: int, context: int) -> Iterator[PlanPoint]:
    """The points of one drafter at one batch and context."""
    seconds, overheads, tokens = _figures(one, sizes, batch, context)
    columns = (column.tolist() for column in (seconds, overheads, tokens / overheads, tokens))
    for size, spent, overhead, speedup, tau in zip(sizes, *columns, strict=False):
        yield PlanPoint(size, batch, context, spent, overhead, speedup, tau, one.acceptance.name)


def _figures(one: PlanCandidate, sizes: Sequence[int], batch: int, context: int) -> tuple[Floats, Floats, Floats]:
    """Seconds, overhead and tokens per step at each size up to the drafter's largest, float64 [n] each."""
    known = np.array(sizes, np.float64)
    known = known[known <= (one.acceptance.largest or known[-1])]
    seconds = one.model.seconds(known, batch, context)
    return seconds, seconds / one.model.seconds([ONE_NODE], batch, context), one.acceptance.at(known)


def _best(
    candidates: Sequence[PlanCandidate], points: Sequence[PlanPoint], largest: int, batch: int, context: int
) -> PlanBest:
    """The fastest point at one batch and context, on the grid and of all whole sizes."""
    here = [point for point in points if (point.batch, point.context) == (batch, context)]
    best = max(here, key=lambda point: (point.speedup, -point.nodes))
    found = []
    for one in candidates:
        _, overheads, tokens = _figures(one, range(1, largest + 1), batch, context)
        speedups = tokens / overheads
        i = int(np.argmax(speedups))
        found.append((float(speedups[i]), -i - 1, one.acceptance.name))
    speedup, size, name = max(found)
    model = next(one.model for one in candidates if one.acceptance.name == best.drafter)
    memory = model.memory(best.nodes, batch, context)
    return PlanBest(batch, context, best.nodes, best.speedup, best.drafter, -size, speedup, name, memory)
