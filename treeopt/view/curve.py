"""The curve as SVG, drawn by matplotlib: tokens per step by size and, with a profile, speedup and overhead below.

The x axis is logarithmic to base 2. The description in the file's metadata lists the figures of every point. Equal
curves give equal bytes where the versions of matplotlib are equal.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from treeopt.optimize.curve import Curve, CurvePoint
from treeopt.optimize.intervals import Interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SETTINGS = {
    "svg.hashsalt": "treeopt",  # ids of the file do not depend on the process
    "svg.fonttype": "none",
    "font.size": 9.0,
    "axes.grid": True,
    "grid.color": "#e3e8ed",
    "lines.linewidth": 1.5,
    "lines.markersize": 4.0,
    "legend.frameon": False,
}
_WIDTH, _PANEL_HEIGHT = 8.0, 3.5  # inches
_TITLE_LENGTH = 70  # characters of the heading that are drawn
_MOST_LABELS = 20  # sizes with a number on the x axis, about
_TOKENS, _SPEEDUP, _OVERHEAD = "#0b4f8a", "#0b7285", "#d9480f"
_BANDS = {"prediction": 0.17, "sampling": 0.33}  # opacity of each interval


def render_curve(curve: Curve, title: str = "") -> str:
    """The picture as text, with `title` as its heading."""
    from matplotlib import style
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    heading = "".join(filter(str.isprintable, title)) or "Tokens per step by size of the tree"
    description = "; ".join(_figures(point) for point in curve.points)
    stream = io.StringIO()
    with style.context(["default", _SETTINGS]):  # independent of the user's matplotlibrc
        figure = curve_figure(curve, heading)
        FigureCanvasSVG(figure)
        figure.savefig(stream, format="svg", metadata={"Date": None, "Title": heading, "Description": description})
    return stream.getvalue()


def curve_figure(curve: Curve, heading: str) -> Figure:
    """One panel, or two where the points have a speedup. Artists carry the names of their figures as `gid`."""
    from matplotlib.figure import Figure

    timed = [point for point in curve.points if point.speedup is not None and point.overhead is not None]
    panels = 2 if timed else 1
    figure = Figure(figsize=(_WIDTH, panels * _PANEL_HEIGHT), layout="constrained")
    shown = heading if len(heading) <= _TITLE_LENGTH else heading[: _TITLE_LENGTH - 1] + "…"
    figure.suptitle(shown, x=0.01, ha="left", weight="bold").set_parse_math(False)
    axes: Sequence[Axes] = figure.subplots(panels, sharex=True, squeeze=False)[:, 0].tolist()
    _draw_tokens(axes[0], curve.points)
    if timed:
        _draw_speedup(axes[1], timed, curve.best)
    _set_sizes(axes[-1], [point.nodes for point in curve.points], curve.best)
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
        if not known:
            continue
        if len(known) == 1:  # a band needs two ends
            [(size, interval)] = known
            known = [(size / 1.03, interval), (size * 1.03, interval)]
        columns, intervals = zip(*known, strict=True)
        lows, highs = [each.low for each in intervals], [each.high for each in intervals]
        name = f"{kind} interval, {intervals[0].level:.0%}"
        axes.fill_between(columns, lows, highs, color=_TOKENS, alpha=opacity, linewidth=0, label=name, gid=kind)
    axes.set_ylabel("tokens per step")
    _add_legend(axes, axes)


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
    _add_legend(axes, axes, right)


def _add_legend(axes: Axes, *sources: Axes) -> None:
    """One row above the panel with the labels of all these axes."""
    pairs = [pair for each in sources for pair in zip(*each.get_legend_handles_labels(), strict=True)]
    handles, labels = zip(*pairs, strict=True)
    axes.legend(handles, labels, loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=len(pairs), borderaxespad=0.2)


def _set_sizes(axes: Axes, sizes: Sequence[int], best: int | None) -> None:
    """A log2 axis; the best size, the ends, powers of two and then the rest have numbers where these do not overlap."""
    first, last = sizes[0], sizes[-1]
    gap = math.log2(last / first) / _MOST_LABELS
    labelled: list[int] = []
    for size in sorted(set(sizes), key=lambda size: (size != best, size not in (first, last), size & (size - 1), size)):
        if all(abs(math.log2(size / other)) >= gap for other in labelled):
            labelled.append(size)
    axes.set_xscale("log", base=2)
    axes.set_xlim(first / 1.12, last * 1.12)
    axes.set_xticks(sorted(labelled), [str(size) for size in sorted(labelled)])
    axes.minorticks_off()
    axes.set_xlabel("nodes (root counted)")


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
