"""The plan: overhead and speedup by nodes, batch and context, and the size with the greatest speedup."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import numpy as np

from treeopt.calibration import Calibration
from treeopt.defaults import HEADS, KINDS, MAX_NODES, ONE_NODE
from treeopt.errors import check_choice, check_counts
from treeopt.facts import Column, Part, Table, for_programs, picked
from treeopt.latency import LatencyProfile
from treeopt.optimize.build_report import by_one_growth
from treeopt.optimize.curve import calibration_curve, default_sizes
from treeopt.plan.operators import Floats
from treeopt.plan.step_model import Efficiency, StepModel, check_steps
from treeopt.progress import Progress, silent
from treeopt.version import VERSION

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
        return np.interp(nodes, self.sizes, self.tokens)


LOGARITHM = Acceptance()


def calibrated_acceptance(
    calibration: Calibration, largest: int, *, kind: str = KINDS[0], progress: Progress = silent
) -> Acceptance:
    """Tokens per step by a calibration: the curve of `treeopt curve`, static trees cross-validated.

    Args:
        calibration: the traces of a drafter.
        largest: the largest size.
        kind: static trees, or those of each step.
        progress: called after each fold.

    Raises:
        TreeoptError: as `measure_curve` and `policy_curve`.
        ValueError: where the size is out of range, or the kind unknown.
    """
    check_counts(largest=largest)
    check_choice("kind", kind, KINDS)
    source = calibration.provenance
    name = PurePath(source.drafter).name or source.drafter_id or HEADS
    most = min(largest, MAX_NODES)
    curve = calibration_curve(calibration, kind=kind, largest=most, option="--nodes", progress=progress)
    provenance = {
        "heads": source.heads,
        "heads_id": source.heads_id,
        **({"drafter": source.drafter_id} if source.drafter_id else {}),
        "drafter_name": name,
    }
    sizes, tokens = (tuple(getattr(point, name) for point in curve.points) for name in ("nodes", "tokens_per_step"))
    return Acceptance(name, sizes, tokens, kind, tuple(provenance.items()), source.model)


@dataclass(frozen=True)
class PlanPoint:
    """The figures of trees of `nodes` nodes (root counted), for `batch` texts and `context` cached tokens."""

    nodes: int
    batch: int
    context: int
    seconds: float
    overhead: float
    speedup: float
    tokens_per_step: float


@dataclass(frozen=True)
class PlanBest:
    """The fastest size at one batch and context."""

    batch: int  # texts
    context: int  # cached tokens
    nodes: int  # the fastest of the sizes of the plan; the smaller of equal ones
    speedup: float  # of it
    any_nodes: int  # the fastest of all whole sizes up to the largest of the plan
    any_speedup: float  # of it
    memory: float  # bytes of weights and cache at `nodes`


@dataclass(frozen=True)
class SpeedPlan:
    """The result of `plan_speedup`: all points, and the best one of each batch and context."""

    points: tuple[PlanPoint, ...]
    best: tuple[PlanBest, ...]
    model: StepModel
    acceptance: Acceptance

    def profile(self) -> LatencyProfile:
        """The modelled steps of the plan and of the sizes of curves, which `build --nodes auto` interpolates."""
        known = {point.nodes for point in self.points}
        sizes = known | set(default_sizes(max(known))) | {best.any_nodes for best in self.best}
        model = self.model
        efficiency = ", ".join(f"{name} {value:.4g}" for name, value in vars(model.efficiency).items())
        source = {
            "made_by": f"treeopt {VERSION}",
            "model": model.shape.name,
            "kind": self.acceptance.kind,
            **dict(self.acceptance.provenance),
            "device": model.device.name,
            "dtype": model.setting.dtype,
            "attention": model.setting.attention,
            "modelled": f"treeopt plan; efficiency: {efficiency}; drafting: {model.drafting}",
        }
        batches, contexts = {best.batch for best in self.best}, {best.context for best in self.best}
        return model.profile(sizes, batches, contexts, source)

    def warnings(self) -> Iterator[str]:
        """What the device or the model does not take."""
        device, shape = self.model.device, self.model.shape
        for best in self.best:
            if device.memory is not None and best.memory > device.memory:
                need = f"{best.memory / 1e9:.1f} GB of weights and cache exceed the {device.memory / 1e9:.0f} GB"
                yield f"warning: batch {best.batch}, context {best.context}: {need} of {device.name}"
        longest = max(point.context for point in self.points)
        if shape.context is not None and longest > shape.context:
            yield f"warning: context {longest}: {shape.name} takes {shape.context} tokens"

    def _table(self) -> Table:
        fastest = {(best.batch, best.context, best.nodes) for best in self.best}

        def marked(point: PlanPoint) -> str:
            return f"{point.nodes}{' best' * ((point.batch, point.context, point.nodes) in fastest)}"

        columns = (
            Column("nodes", marked),
            Column(None, "nodes"),
            Column("batch", "batch"),
            Column("context", "context"),
            Column("ms per step", "seconds", lambda seconds: f"{seconds * 1e3:.3f}"),
            Column("overhead", "overhead", ".3f"),
            Column("tokens/step", "tokens_per_step", ".3f", key=""),
            Column("speedup", "speedup", ".3f"),
        )
        return Table(columns, self.points, "points")

    def parts(self) -> Iterator[Part]:
        """The points, the fastest size of each batch and context, and the assumptions."""
        yield self._table()
        first, model, acceptance = self.best[0], self.model, self.acceptance
        here = [point for point in self.points if (point.batch, point.context) == (first.batch, first.context)]
        shape = picked(model.shape, "name", "parameters", "source")
        tokens = [[point.nodes, point.tokens_per_step] for point in here]
        found = {"best_nodes": first.nodes, "best": self.best, "tokens_per_step": tokens, "model": shape}
        made = picked(model, "device", "setting", "efficiency")
        yield from for_programs({**found, "drafting": str(model.drafting), **made})
        for best in self.best:
            yield (
                f"batch {best.batch}, context {best.context}: nodes of the fastest size: {best.nodes} of these "
                f"({best.speedup:.3f} times), {best.any_nodes} of all ({best.any_speedup:.3f} times)"
            )
        yield from self.assumptions()
        if acceptance.largest is not None and acceptance.kind == KINDS[0]:
            yield by_one_growth(acceptance.largest)

    def assumptions(self) -> Iterator[str]:
        """The model and the device, where tokens per step are from, what drafting is counted, and the seconds."""
        model, acceptance = self.model, self.acceptance
        yield (
            f"{model.shape.name}: {model.shape.parameters:,} parameters in {model.setting.dtype} on "
            f"{model.device.name}: {model.device.peak(model.setting.dtype):.4g} FLOP/s, "
            f"{model.device.bandwidth:.4g} bytes/s ({model.device.source})"
        )
        by = "1 + 0.477 ln(nodes), the Medusa paper's model of its Vicuna-7B (arXiv:2401.10774, appendix G)"
        if acceptance.sizes:
            by = f"{acceptance.name}, by its calibration of {acceptance.model}"
        yield f"tokens per step: {by}"
        yield f"drafting: {model.drafting}"
        if model.efficiency == Efficiency():
            yield "seconds: peak figures, which no device reaches; --fit PROFILE takes measured steps into account"


def plan_speedup(
    model: StepModel,
    nodes: Sequence[int],
    batches: Sequence[int] = (1,),
    contexts: Sequence[int] = (1024,),
    *,
    acceptance: Acceptance = LOGARITHM,
) -> SpeedPlan:
    """Overhead and speedup by the hardware model; of each size, batch and context.

    Args:
        model: a model on a device, with its drafting.
        nodes: sizes, root counted; one node is included. Sizes beyond the largest of `acceptance` are left out.
        batches: texts decoded together.
        contexts: tokens in the cache of each text.
        acceptance: tokens per step; the paper's logarithm by default.

    Raises:
        TreeoptError: E240 for numbers below 1 or too large.

    Examples:
        >>> import treeopt
        >>> device = treeopt.device_preset("a100-80gb-pcie")
        >>> model = treeopt.StepModel(treeopt.model_shape("llama-7b"), device)
        >>> plan = treeopt.plan_speedup(model, [1, 32, 64, 128, 256])
        >>> plan.best[0].nodes
        128
    """
    sizes = np.array(sorted({ONE_NODE, *nodes}), np.float64)
    check_steps(sizes, batches, contexts)
    largest = min(sizes[-1], acceptance.largest or sizes[-1])
    sizes, every = sizes[sizes <= largest], np.arange(1, largest + 1)
    points, fastest = [], []
    for batch, context in itertools.product(sorted(set(batches)), sorted(set(contexts))):
        alone = model.seconds([ONE_NODE], batch, context)
        seconds, tokens = model.seconds(sizes, batch, context), acceptance.at(sizes)
        overheads = seconds / alone
        speedups = tokens / overheads
        for size, *figures in np.stack([sizes, seconds, overheads, speedups, tokens], axis=1).tolist():
            points.append(PlanPoint(int(size), batch, context, *figures))
        best, of_all = int(np.argmax(speedups)), acceptance.at(every) / (model.seconds(every, batch, context) / alone)
        at, memory = int(sizes[best]), model.memory(int(sizes[best]), batch, context)
        any_nodes = int(np.argmax(of_all)) + 1
        fastest.append(PlanBest(batch, context, at, float(speedups[best]), any_nodes, float(of_all.max()), memory))
    return SpeedPlan(tuple(points), tuple(fastest), model, acceptance)
