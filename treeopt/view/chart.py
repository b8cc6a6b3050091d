"""Lines and dots as SVG, drawn by matplotlib: the panels of sweeps.

The description in the file's metadata lists the figures of every line; of dots it lists the number and the range.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from treeopt.optimize.intervals import Interval
from treeopt.view.figure import LINES, add_legend, draw_band, panels, render_figure, set_log2

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLORS = ("#0b4f8a", "#d9480f", "#2b8a3e", "#862e9c", "#0b7285", "#c2255c", "#5c940d", "#33414d")
_DOTS, _BEST = "#9aa7b2", "#33414d"
_BAND = 0.15  # opacity of intervals
_MOST_LABELS = 3  # in a row of the legend


@dataclass(frozen=True)
class Series:
    """Figures by place.

    Args:
        name: in the legend.
        x: places on the axis.
        y: the figures.
        intervals: of each figure, None where unknown; empty without intervals.
        dots: whether the figures are dots without a line, and in grey.
        dashed: whether the line is dashed, for figures to compare with.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    intervals: Sequence[Interval | None] = ()
    dots: bool = False
    dashed: bool = False


@dataclass(frozen=True)
class Panel:
    """Series on the same axes, whose names are `x` and `y`; the x axis is logarithmic to base 2 where `log2`.

    The places `best` on the x axis have vertical lines.
    """

    x: str
    y: str
    series: Sequence[Series]
    log2: bool = False
    best: Sequence[float] = ()


def render_chart(chart: Sequence[Panel], title: str) -> str:
    """The picture as text: panels below each other."""
    description = "; ".join(f"{panel.y}, {_in_words(one)}" for panel in chart for one in panel.series)
    return render_figure(lambda heading: chart_figure(chart, heading), title, description, LINES)


def chart_figure(chart: Sequence[Panel], heading: str) -> Figure:
    """The figure; artists carry the names of their series as `gid`."""
    figure, axes = panels(len(chart), heading, sharex=False)
    for panel, place in zip(chart, axes, strict=True):
        _draw(place, panel)
    return figure


def _draw(axes: Axes, panel: Panel) -> None:
    lines = 0
    for one in panel.series:
        color = _DOTS if one.dots else _COLORS[lines % len(_COLORS)]
        lines += not one.dots
        style = "." if one.dots else "--" if one.dashed else "o-"
        axes.plot(one.x, one.y, style, color=color, label=one.name, gid=one.name, zorder=1 if one.dots else 2)
        known = [(x, each) for x, each in zip(one.x, one.intervals, strict=False) if each is not None]
        draw_band(axes, known, opacity=_BAND, color=color, gid=f"{one.name} interval")
    for i, place in enumerate(sorted(set(panel.best))):
        label = "_" if i else "best size"  # one line of the legend
        axes.axvline(place, color=_BEST, linestyle="--", linewidth=1.0, label=label, gid="best")
    axes.set_ylabel(panel.y)
    axes.set_xlabel(panel.x)
    if panel.log2:
        set_log2(axes, [int(x) for one in panel.series for x in one.x], panel.x)
    add_legend(axes, axes, most=_MOST_LABELS)


def _in_words(one: Series) -> str:
    if one.dots:
        return f"{one.name}: {len(one.y)} points, {min(one.y):.4g} to {max(one.y):.4g}"
    return f"{one.name}: " + ", ".join(f"{y:.4g} at {x:g}" for x, y in zip(one.x, one.y, strict=True))
