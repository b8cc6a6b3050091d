"""A plan as SVG: speedup and overhead by nodes, a line for each batch, context and drafter.

The charts have the axes of those in appendix G of arXiv:2401.10774. The x axis is logarithmic to base 2; overhead is on
a logarithmic axis too. The description in the file's metadata lists every point.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from treeopt.plan.planner import PlanPoint, SpeedPlan
from treeopt.view.figure import LINES, NODES, panels, render_figure, set_log2

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_LINES = 10  # with a colour of their own; matplotlib's cycle has as many
_COLUMNS = 4  # of the legend


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
    figure.legend(*upper.get_legend_handles_labels(), loc="outside lower left", ncols=_COLUMNS)
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
