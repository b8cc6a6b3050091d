"""The curve as SVG, drawn by matplotlib: tokens per step by size and, with a profile, speedup and overhead below.

The x axis is logarithmic to base 2. The description in the file's metadata lists the figures of every point. Equal
curves give equal bytes where the versions of matplotlib are equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from treeopt.optimize.curve import Curve, CurvePoint
from treeopt.optimize.intervals import LEVEL, Interval
from treeopt.view.figure import LINES, NODES, add_legend, draw_band, panels, render_figure, set_log2

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_TOKENS, _SPEEDUP, _OVERHEAD = "#0b4f8a", "#0b7285", "#d9480f"
_BANDS = {"prediction": 0.17, "sampling": 0.33}  # opacity of each interval


def render_curve(curve: Curve, title: str = "") -> str:
    """The picture as text, with `title` as its heading."""
    description = "; ".join(_figures(point) for point in curve.points)
    default = "Tokens per step by size of the tree"
    return render_figure(lambda heading: curve_figure(curve, heading), title, description, LINES, default)


def curve_figure(curve: Curve, heading: str) -> Figure:
    """One panel, or two where the points have a speedup. Artists carry the names of their figures as `gid`."""
    timed = [point for point in curve.points if point.speedup is not None and point.overhead is not None]
    figure, axes = panels(2 if timed else 1, heading, sharex=True)
    _draw_tokens(axes[0], curve.points)
    if timed:
        _draw_speedup(axes[1], timed, curve.best)
    set_log2(axes[-1], [point.nodes for point in curve.points], NODES, curve.best)
    return figure


def _draw_tokens(axes: Axes, points: Sequence[CurvePoint]) -> None:
    """Tokens per step, on the bands of their intervals."""
    sizes = [point.nodes for point in points]
    label = "tokens per step, cross-validated"
    axes.plot(sizes, [point.tokens_per_step for point in points], "o-", color=_TOKENS, label=label, gid="tokens")
    for kind, opacity in _BANDS.items():
        known: list[tuple[float, Interval]] = [
            (point.nodes, interval) for point in points if (interval := getattr(point, kind)) is not None
        ]
        name = f"{kind} interval, {LEVEL:.0%}"
        draw_band(axes, known, opacity=opacity, color=_TOKENS, label=name, gid=kind)
    axes.set_ylabel("tokens per step")
    add_legend(axes, axes)


def _draw_speedup(axes: Axes, points: Sequence[CurvePoint], best: int | None) -> None:
    """Speedup on the left axis, overhead on the right one, and a line at the best size."""
    sizes = [point.nodes for point in points]
    right = axes.twinx()
    right.grid(visible=False)
    axes.axhline(1.0, color="#9aa7b2", linestyle=":", linewidth=1.0)
    speedups, overheads = ([getattr(point, name) for point in points] for name in ("speedup", "overhead"))
    axes.plot(sizes, speedups, "o-", color=_SPEEDUP, label="speedup (left)", gid="speedup")
    [line] = right.plot(sizes, overheads, "o--", color=_OVERHEAD, label="overhead (right)", gid="overhead")
    line.set_markerfacecolor("white")
    for point in points:
        if point.nodes == best:
            name = f"best: {_nodes(point)}, {point.speedup:.2f} times"
            axes.axvline(point.nodes, color="#33414d", linestyle="--", linewidth=1.0, label=name, gid="best")
    axes.set_ylabel("speedup over autoregressive")
    right.set_ylabel("overhead: one node = 1", color=_OVERHEAD)
    add_legend(axes, axes, right)


def _figures(point: CurvePoint) -> str:
    """The figures of a point in words."""
    text = (
        f"{_nodes(point)}: {point.tokens_per_step:.3f} tokens per step, "
        f"sampling {_between(point.sampling)}, prediction {_between(point.prediction)}"
    )
    return text if point.speedup is None else f"{text}, overhead {point.overhead:.3f}, speedup {point.speedup:.3f}"


def _between(interval: Interval | None) -> str:
    return "unknown" if interval is None else f"{interval.low:.3f} to {interval.high:.3f}"


def _nodes(point: CurvePoint) -> str:
    return f"{point.nodes} node{'s' if point.nodes != 1 else ''}"
