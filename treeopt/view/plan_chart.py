"""A plan as SVG: speedup and overhead by nodes, a line for each batch, context and drafter; or its operators.

The charts have the axes of those in appendix G of arXiv:2401.10774. The x axis of nodes is logarithmic to base 2; all
others but that of speedup are logarithmic too. The description in the file's metadata lists every point.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from treeopt.latency import ONE_NODE
from treeopt.plan.operators import joined
from treeopt.plan.planner import PlanPoint, SpeedPlan
from treeopt.view.figure import LINES, NODES, panels, render_figure, set_log2, short_label

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_LINES = 10  # with a colour of their own; matplotlib's cycle has as many
_COLUMNS = 4  # of the legend
_STYLES = ("o-", "s--", "^:")  # of the first ten lines, the next ten, ...


def render_plan(plan: SpeedPlan, title: str) -> str:
    """The picture as text, with `title` as its heading."""
    described = "; ".join(
        f"{line}, {point.nodes} nodes: overhead {point.overhead:.3f}, speedup {point.speedup:.3f}"
        for line, points in lines(plan).items()
        for point in points
    )
    return render_figure(lambda heading: plan_figure(plan, heading), title, described, LINES)


def plan_figure(plan: SpeedPlan, heading: str) -> Figure:
    """Two panels. Lines carry `speedup ` or `overhead ` and their label as `gid`."""
    figure, (upper, lower) = panels(2, heading, sharex=True)
    upper.axhline(1.0, color="#9aa7b2", linestyle=":", linewidth=1.0)
    for i, (label, points) in enumerate(lines(plan).items()):
        sizes, style = [point.nodes for point in points], "o-" if i < _MOST_LINES else "s--"
        upper.plot(sizes, [point.speedup for point in points], style, label=label, gid=f"speedup {label}")
        lower.plot(sizes, [point.overhead for point in points], style, label=label, gid=f"overhead {label}")
    upper.set_ylabel("speedup over autoregressive")
    lower.set_ylabel("overhead: one node = 1")
    lower.set_yscale("log")
    handles, labels = upper.get_legend_handles_labels()
    figure.legend(handles, list(map(short_label, labels)), loc="outside lower left", ncols=_COLUMNS)
    set_log2(lower, [point.nodes for point in plan.points], NODES, plan.best[0].nodes)
    return figure


def lines(plan: SpeedPlan) -> dict[str, list[PlanPoint]]:
    """The points of each line by its label; what all lines share is not in the label."""
    several = {
        name: len({getattr(point, name) for point in plan.points}) > 1 for name in ("batch", "context", "drafter")
    }
    found: dict[str, list[PlanPoint]] = defaultdict(list)
    for point in plan.points:
        parts = [f"batch {point.batch}"] if several["batch"] or not (several["context"] or several["drafter"]) else []
        parts += [f"context {point.context}"] if several["context"] else []
        parts += [point.drafter] if several["drafter"] else []
        found[", ".join(parts)].append(point)
    return dict(found)


@dataclass(frozen=True)
class OperatorLine:
    """The figures of operators that are equal at all sizes, such as those of keys and of values; lists of equal length.

    Args:
        name: of the operators, joined by ` = `.
        dtype: in which they compute.
        nodes: sizes at which they run.
        flops: of each operator, at each size.
        intensity: FLOPs per byte.
        seconds: of each operator.
    """

    name: str
    dtype: str
    nodes: tuple[int, ...]
    flops: tuple[float, ...]
    intensity: tuple[float, ...]
    seconds: tuple[float, ...]


def render_operators(plan: SpeedPlan, title: str) -> str:
    """The picture of the operators as text, with `title` as its heading."""
    described = "; ".join(
        f"{line.name}, {nodes} nodes: {flops:.4g} FLOP, {intensity:.4g} FLOP/byte, {seconds * 1e6:.4g} us"
        for line in operator_lines(plan)
        for nodes, flops, intensity, seconds in zip(line.nodes, line.flops, line.intensity, line.seconds, strict=True)
    )
    return render_figure(lambda heading: operators_figure(plan, heading), title, described, LINES)


def operators_figure(plan: SpeedPlan, heading: str) -> Figure:
    """FLOP/s by intensity below the device's roof, and latency by nodes, at the first batch and context.

    The roof is that of the peak figures. Operators without FLOPs are in the panel of latency alone. Lines carry
    `roofline ` or `latency ` and their name as `gid`, roofs `roof ` and their dtype.
    """
    figure, (upper, lower) = panels(2, heading, sharex=False)
    found = operator_lines(plan)
    for i, line in enumerate(found):
        style = _STYLES[i // _MOST_LINES % len(_STYLES)]
        lower.plot(line.nodes, [1e6 * one for one in line.seconds], style, label=line.name, gid=f"latency {line.name}")
        if min(line.flops) > 0:
            speeds = [flops / seconds for flops, seconds in zip(line.flops, line.seconds, strict=True)]
            colour = lower.get_lines()[-1].get_color()
            upper.plot(line.intensity, speeds, style[0], color=colour, gid=f"roofline {line.name}")
    _draw_roofs(upper, plan, found)
    upper.set_xlabel("operational intensity: FLOP/byte")
    upper.set_ylabel("FLOP/s")
    lower.set_ylabel("latency: us per step")
    lower.set_yscale("log")
    figure.legend(*lower.get_legend_handles_labels(), loc="outside lower left", ncols=_COLUMNS)
    set_log2(lower, sorted({point.nodes for point in plan.points}), NODES, plan.best[0].nodes)
    return figure


def _draw_roofs(axes: Axes, plan: SpeedPlan, found: Sequence[OperatorLine]) -> None:
    """min(peak FLOP/s, bandwidth x intensity) of every dtype in which operators compute."""
    device = plan.candidates[0].model.device
    computing = [line for line in found if min(line.flops) > 0]
    known = [intensity for line in computing for intensity in line.intensity]
    peaks = {device.peak(line.dtype): line.dtype for line in computing}
    for peak, dtype in peaks.items():
        ridge = peak / device.bandwidth
        places = [min(*known, ridge) / 2, ridge, max(*known, ridge) * 2]
        roof = [min(peak, device.bandwidth * place) for place in places]
        axes.plot(places, roof, "--", color="#33414d", linewidth=1.0, gid=f"roof {dtype}")
    axes.set_xscale("log")
    axes.set_yscale("log")


def operator_lines(plan: SpeedPlan) -> list[OperatorLine]:
    """The operators of a step at all sizes of the plan, by the fastest drafter of the first batch and context."""
    first = plan.best[0]
    model = plan.chosen(first).model
    sizes = sorted({ONE_NODE, *(point.nodes for point in plan.points)})
    names: dict[OperatorLine, list[str]] = defaultdict(list)
    for one in joined(model.operators(sizes, first.batch, first.context)):
        runs = [i for i in range(len(sizes)) if one.calls[i]]
        columns = [[float(values[i]) for i in runs] for values in (one.flops, one.intensity, model.seconds_of(one))]
        line = OperatorLine("", one.dtype, tuple(sizes[i] for i in runs), *map(tuple, columns))
        if runs:
            names[line].append(one.name)
    return [dataclasses.replace(line, name=" = ".join(several)) for line, several in names.items()]
