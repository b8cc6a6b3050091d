"""The tables and the JSON of `treeopt plan`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from treeopt.cli.build_dynamic import by_one_growth
from treeopt.cli.console import Console
from treeopt.defaults import KINDS, ONE_NODE
from treeopt.errors import counted
from treeopt.plan.devices import DEVICES
from treeopt.shape import Drafting

if TYPE_CHECKING:
    from treeopt.plan.fit import EfficiencyFit, HeldOut
    from treeopt.plan.operators import Floats, Operator
    from treeopt.plan.planner import Acceptance, PlanBest, PlanPoint, SpeedPlan
    from treeopt.plan.step_model import StepModel


_POINT = ("nodes", "batch", "context", "seconds", "overhead", "speedup")
_BY_MODEL = "model"  # of `HeldOut.by`


def report(console: Console, plan: SpeedPlan, fit: EfficiencyFit | None) -> None:
    """Print the points, the fastest size of each batch and context, and the assumptions."""
    from treeopt.plan.step_model import Efficiency

    several = len(plan.candidates) > 1
    rows = [_cells(plan, point, several) for point in plan.points]
    header = ["nodes", "batch", "context", "ms per step", "overhead", "tokens/step", "speedup"]
    console.table(header + ["drafter"] * several, rows)
    model = plan.candidates[0].model
    for best in plan.best:
        console.say(_best_line(best, several))
        capacity = model.device.memory
        if capacity is not None and best.memory > capacity:
            need = f"{best.memory / 1e9:.1f} GB of weights and cache"
            where = f"batch {best.batch}, context {best.context}"
            console.warn(f"warning: {where}: {need} exceed the {capacity / 1e9:.0f} GB of {model.device.name}")
    longest = max(point.context for point in plan.points)
    if model.shape.context is not None and longest > model.shape.context:
        console.warn(f"warning: context {longest}: {model.shape.name} takes {model.shape.context} tokens")
    console.say(
        f"{model.shape.name}: {model.shape.parameters:,} parameters in {model.setting.dtype} on {model.device.name}: "
        f"{model.device.peak(model.setting.dtype):.4g} FLOP/s, {model.device.bandwidth:.4g} bytes/s "
        f"({model.device.source})"
    )
    for one in plan.candidates:
        console.say(f"tokens per step: {_tokens_by(one.acceptance)}")
        of = f"{one.acceptance.name}: " if several else ""
        console.say(f"drafting: {of}{drafting_text(one.model.drafting)}")
    grown = [one.acceptance.largest for one in plan.candidates if one.acceptance.kind == KINDS[0]]
    for largest in sorted({size for size in grown if size is not None}):
        console.say(by_one_growth(largest))
    if model.efficiency == Efficiency():
        console.say("seconds: peak figures, which no device reaches; --fit PROFILE takes measured steps into account")
    if fit is not None:
        _report_fit(console, fit)


def _cells(plan: SpeedPlan, point: PlanPoint, several: bool) -> list[str]:
    marked = any(
        (best.batch, best.context, best.nodes, best.drafter) == (point.batch, point.context, point.nodes, point.drafter)
        for best in plan.best
    )
    cells = [
        f"{point.nodes}{' best' if marked else ''}",
        str(point.batch),
        str(point.context),
        f"{point.seconds * 1e3:.3f}",
        f"{point.overhead:.3f}",
        f"{point.tokens_per_step:.3f}",
        f"{point.speedup:.3f}",
    ]
    return [*cells, point.drafter] if several else cells


def _best_line(best: PlanBest, several: bool) -> str:
    drafter = f", {best.drafter}" if several else ""
    other = f", {best.any_drafter}" if several else ""
    return (
        f"batch {best.batch}, context {best.context}: nodes of the fastest size: {best.nodes} of these "
        f"({best.speedup:.3f} times{drafter}), {best.any_nodes} of all ({best.any_speedup:.3f} times{other})"
    )


def _tokens_by(acceptance: Acceptance) -> str:
    if acceptance.sizes:
        return f"{acceptance.name}, by its calibration of {acceptance.model}"
    return "1 + 0.477 ln(nodes), the Medusa paper's model of its Vicuna-7B (arXiv:2401.10774, appendix G)"


def drafting_text(drafting: Drafting) -> str:
    """What drafts, in words, with the seconds on the host."""
    parts = []
    if drafting.heads:
        lm_head = "LM heads of their own" if drafting.head_rows else "the base's LM head"
        parts.append(f"{counted(drafting.heads, 'head')} with {lm_head}")
    if drafting.draft is not None:
        parts.append(f"draft model {drafting.draft.name}, {counted(drafting.levels, 'level')}")
    return f"{', '.join(parts) or 'none'}, {drafting.host_seconds:g} host seconds"


def _report_fit(console: Console, fit: EfficiencyFit) -> None:
    """Print the fitted numbers, and the errors of steps that were fitted and left out."""
    numbers = vars(fit.efficiency)
    shares = ", ".join(f"{name} {numbers[name]:.3g}" for name in ("compute", "bandwidth"))
    times = ", ".join(f"{name} {numbers[name] * 1e6:.3g} us" for name in ("launch", "step", "tree"))
    console.say(f"efficiency, fitted to {len(fit.fitted.errors)} measured steps: {shares}; {times}")
    for one in (fit.fitted, *fit.held_out):
        left_out = "fitted steps" if one is fit.fitted else f"steps left out by {one.by}"
        errors = f"median {one.median:.1%}, largest {one.largest:.1%}" if one.errors else "none"
        console.say(f"error of {left_out}: {errors}{_skipped(one)}")
    if all(one.by != _BY_MODEL for one in fit.held_out):
        console.say("steps of one model do not separate bandwidth from launch: for another model, fit two or more")


def _skipped(errors: HeldOut) -> str:
    """What was not left out, with the reason."""
    if not errors.skipped:
        return ""
    from treeopt.plan.step_model import Efficiency

    numbers = len(vars(Efficiency()))
    return f"; not left out: {'; '.join(errors.skipped)} (the other steps do not determine {numbers} numbers)"


def report_operators(console: Console, plan: SpeedPlan) -> None:
    """Print FLOPs, bytes, intensity and time of each operator, for prefill, one node and a tree."""
    header = ["phase", "operator", "GFLOP", "MB", "FLOP/byte", "us", "bound by"]
    rows = [
        [
            row["phase"],
            row["operator"],
            f"{row['flops'] / 1e9:.4g}",
            f"{row['bytes'] / 1e6:.4g}",
            f"{row['intensity']:.4g}",
            f"{row['seconds'] * 1e6:.4g}",
            row["bound_by"],
        ]
        for row in operator_rows(plan)
    ]
    console.table(header, rows)
    first, model = plan.best[0], plan.candidates[0].model
    console.say(f"operators: batch {first.batch}, context {first.context}; prefill reads the whole context")
    for best in plan.best:
        seconds = model.prefill_seconds(best.batch, best.context)
        console.say(f"prefill: batch {best.batch}, context {best.context}: {seconds * 1e3:.3f} ms, without drafting")


def operator_rows(plan: SpeedPlan) -> Iterator[dict[str, Any]]:
    """A dict for each operator of prefill, one node and a tree, at the first batch and context.

    The tree has the fastest size, or the largest where no tree is faster than one node.
    """
    from treeopt.plan.operators import joined

    first = plan.best[0]
    largest = max(point.nodes for point in plan.points)
    nodes = first.nodes if first.nodes > ONE_NODE else largest
    model, at = plan.chosen(first).model, (first.batch, first.context)
    phases = {"prefill": model.prefill_operators(*at), "decode": model.operators([ONE_NODE], *at)}
    if nodes > ONE_NODE:
        phases[f"tree of {nodes}"] = model.operators([nodes], *at)
    for phase, operators in phases.items():
        for one in joined(operators):
            if float(one.calls[0]):
                yield _operator_row(model, phase, one)


def _operator_row(model: StepModel, phase: str, one: Operator) -> dict[str, Any]:
    computing, moving = model.times(one)
    return {
        "phase": phase,
        "operator": one.name,
        "flops": _first(one.flops),
        "bytes": _first(one.bytes),
        "intensity": _first(one.intensity),
        "seconds": _first(model.seconds_of(one)),
        "bound_by": "compute" if _first(computing) > _first(moving) else "bandwidth",
    }


def _first(values: Floats) -> float:
    return float(values[0])


def as_dict(plan: SpeedPlan, fit: EfficiencyFit | None, *, operators: bool) -> dict[str, Any]:
    """The plan with the keys of `--json`; points name their drafter where there are several."""
    model, several = plan.candidates[0].model, len(plan.candidates) > 1
    names = (*_POINT, "drafter") if several else _POINT
    tokens = {one.acceptance.name: _tokens(plan, one.acceptance.name) for one in plan.candidates}
    errors = {} if fit is None else {one.by: _errors(one) for one in (fit.fitted, *fit.held_out)}
    return {
        "points": [{name: getattr(point, name) for name in names} for point in plan.points],
        "best_nodes": plan.best[0].nodes,
        "best": [vars(best) for best in plan.best],
        "tokens_per_step": tokens,
        "drafting": {one.acceptance.name: drafting_text(one.model.drafting) for one in plan.candidates},
        "prefill_seconds": [
            {"batch": best.batch, "context": best.context, "seconds": model.prefill_seconds(best.batch, best.context)}
            for best in plan.best
        ],
        "model": {"name": model.shape.name, "parameters": model.shape.parameters, "source": model.shape.source},
        "device": {**vars(model.device), "flops": dict(model.device.flops)},
        "setting": vars(model.setting),
        "efficiency": vars(model.efficiency),
        **({"fit": errors} if fit is not None else {}),
        **({"operators": list(operator_rows(plan))} if operators else {}),
    }


def _tokens(plan: SpeedPlan, drafter: str) -> list[list[float]]:
    """Pairs of nodes and tokens per step of a drafter."""
    key = (plan.best[0].batch, plan.best[0].context, drafter)
    points = [point for point in plan.points if (point.batch, point.context, point.drafter) == key]
    return [[point.nodes, point.tokens_per_step] for point in points]


def _errors(one: HeldOut) -> dict[str, Any]:
    figures = {"median": one.median, "largest": one.largest} if one.errors else {"median": None, "largest": None}
    return {**figures, "skipped": list(one.skipped)}


def report_presets(console: Console) -> None:
    """Print the known models and devices."""
    from treeopt.models.shapes import NAMED

    shapes = [NAMED[name].shape(name) for name in NAMED]
    rows = [[one.name, f"{one.parameters:,}", str(one.context), one.source] for one in shapes]
    console.table(["model", "parameters", "context", "config of"], rows)
    console.say()
    devices = [
        [
            one.name,
            " ".join(f"{dtype} {value / 1e12:g}" for dtype, value in one.flops.items() if dtype != "float16"),
            f"{one.bandwidth / 1e9:g}",
            "-" if one.memory is None else f"{one.memory / 1e9:.0f}",
            one.source,
        ]
        for one in DEVICES.values()
    ]
    console.table(["device", "dense TFLOP/s", "GB/s", "GB", "source"], devices)
    console.say("float16 is as bfloat16; int8 and int4 weights are multiplied in 16 bits")
    known = [{"name": one.name, "parameters": one.parameters, "source": one.source} for one in shapes]
    console.result({"models": known, "devices": [{**vars(one), "flops": dict(one.flops)} for one in DEVICES.values()]})
