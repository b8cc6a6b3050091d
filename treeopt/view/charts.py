"""Charts as SVG by matplotlib: curves, bars of a comparison, plans.

The description in the file's metadata lists the figures. Equal charts give equal bytes where the versions of
matplotlib are equal.
"""

from __future__ import annotations

import io
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from treeopt.optimize.curve import Curve, CurvePoint
from treeopt.optimize.intervals import LEVEL, Interval
from treeopt.plan.planner import PlanPoint, SpeedPlan
from treeopt.view.scene import shortened

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


LINES: Mapping[str, Any] = {  # settings of charts with lines
    "axes.grid": True,
    "grid.color": "#e3e8ed",
    "lines.linewidth": 1.5,
    "lines.markersize": 4.0,
    "legend.frameon": False,
}
WIDTH, PANEL_HEIGHT = 8.0, 3.5  # inches
NODES = "nodes (root counted)"  # the label of an axis of sizes
_COMMON = {
    "svg.hashsalt": "treeopt",  # ids of the file do not depend on the process
    "svg.fonttype": "none",
    "font.size": 9.0,
}
TITLE_LENGTH = 70  # characters of the heading that are drawn
_LABEL_LENGTH = 40  # characters of a name that are drawn
_MOST_LABELS = 20  # sizes with a number on the x axis, about


def render_figure(
    draw: Callable[[str], Figure], title: str, description: str, settings: Mapping[str, Any], default: str = ""
) -> str:
    """A figure as SVG text."""
    from matplotlib import style
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    heading = "".join(filter(str.isprintable, title)) or default
    stream = io.StringIO()
    with style.context(["default", {**_COMMON, **settings}]):  # independent of the user's matplotlibrc
        figure = draw(heading)
        FigureCanvasSVG(figure)
        figure.savefig(stream, format="svg", metadata={"Date": None, "Title": heading, "Description": description})
    return stream.getvalue()


def panels(count: int, heading: str, *, sharex: bool) -> tuple[Figure, Sequence[Axes]]:
    """A figure with a heading, and panels below each other."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, count * PANEL_HEIGHT), layout="constrained")
    figure.suptitle(shortened(heading, TITLE_LENGTH), x=0.01, ha="left", weight="bold").set_parse_math(False)
    axes: Sequence[Axes] = figure.subplots(count, sharex=sharex, squeeze=False)[:, 0].tolist()
    return figure, axes


def draw_band(axes: Axes, known: Sequence[tuple[float, Interval]], *, opacity: float, **look: Any) -> None:
    """The band between the ends of intervals at their places on the x axis."""
    if not known:
        return
    if len(known) == 1:  # a band needs two ends
        [(place, interval)] = known
        known = [(place / 1.03, interval), (place * 1.03, interval)]
    columns, intervals = zip(*known, strict=True)
    lows, highs = [each.low for each in intervals], [each.high for each in intervals]
    axes.fill_between(columns, lows, highs, alpha=opacity, linewidth=0, **look)


def short_label(name: str) -> str:
    """A name without its middle where it is too long to be drawn: matplotlib would leave no room for the panel."""
    half = _LABEL_LENGTH // 2
    return name if len(name) <= _LABEL_LENGTH else f"{name[: half - 1]}…{name[-half:]}"


def add_legend(axes: Axes, *sources: Axes, most: int = 0) -> None:
    """Rows above the panel with the labels of all these axes: one row, or rows of `most` labels."""
    pairs = [pair for each in sources for pair in zip(*each.get_legend_handles_labels(), strict=True)]
    handles, labels = zip(*pairs, strict=True)
    columns = min(len(pairs), most or len(pairs))
    axes.legend(
        handles,
        list(map(short_label, labels)),
        loc="lower left",
        bbox_to_anchor=(0.0, 1.0),
        ncols=columns,
        borderaxespad=0.2,
    )


def set_log2(axes: Axes, places: Sequence[int], label: str, best: int | None = None) -> None:
    """A log2 axis; the best place, the ends, powers of two and then the others have numbers that do not overlap."""
    first, last = min(places), max(places)
    gap = math.log2(last / first) / _MOST_LABELS
    labelled: list[int] = []
    for place in sorted(set(places), key=lambda one: (one != best, one not in (first, last), one & (one - 1), one)):
        if all(abs(math.log2(place / other)) >= gap for other in labelled):
            labelled.append(place)
    axes.set_xscale("log", base=2)
    axes.set_xlim(first / 1.12, last * 1.12)
    axes.set_xticks(sorted(labelled), [str(place) for place in sorted(labelled)])
    axes.minorticks_off()
    axes.set_xlabel(label)


_COLORS = ("#0b4f8a", "#d9480f", "#2b8a3e", "#862e9c", "#0b7285", "#c2255c", "#5c940d", "#33414d")
_DOTS, _BEST = "#9aa7b2", "#33414d"
_BAND = 0.15  # opacity of intervals
_ROW_LABELS = 3  # in a row of the legend


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
    add_legend(axes, axes, most=_ROW_LABELS)


def _in_words(one: Series) -> str:
    if one.dots:
        return f"{one.name}: {len(one.y)} points, {min(one.y):.4g} to {max(one.y):.4g}"
    return f"{one.name}: " + ", ".join(f"{y:.4g} at {x:g}" for x, y in zip(one.x, one.y, strict=True))


_TOKENS, _SPEEDUP, _OVERHEAD = "#0b4f8a", "#0b7285", "#d9480f"
_BANDS = {"prediction": 0.17, "sampling": 0.33}  # opacity of each interval


def render_curve(curve: Curve, title: str = "") -> str:
    """The picture as text, with `title` as its heading."""
    description = "; ".join(_point_figures(point) for point in curve.points)
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


def _point_figures(point: CurvePoint) -> str:
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


_SETTINGS = {"axes.spines.top": False, "axes.spines.right": False}
_BAR_HEIGHT, _MARGIN = 0.32, 1.0  # inches
_COLOR, _LOSSY, _SLOWER, _LINE = "#0b7285", "#d9480f", "#9aa7b2", "#33414d"


@dataclass(frozen=True)
class Bar:
    """One method.

    Args:
        name: of the method.
        nodes: that it verifies in a step at most.
        tokens_per_step: its mean acceptance length.
        speedup: median over the repeats; None where nothing was timed.
        low: lower quartile; None as `speedup`.
        high: upper quartile; None as `speedup`.
        lossless: whether all texts are those of greedy decoding.
    """

    name: str
    nodes: int
    tokens_per_step: float
    speedup: float | None
    low: float | None
    high: float | None
    lossless: bool

    @property
    def slower(self) -> bool:
        """Whether autoregressive decoding is faster."""
        return self.speedup is not None and self.speedup < 1


def bar_of(row: Mapping[str, Any], name: str = "") -> Bar:
    """The bar of a row of a comparison's JSON."""
    low, high = (row["quartiles"] or {}).get("speedup") or (row["speedup"], row["speedup"])
    figures = row["mean_acceptance_length"], row["speedup"], low, high
    return Bar(name or row["method"], row["nodes"] or 1, *figures, lossless=bool(row["lossless"]))


def render_bars(bars: Sequence[Bar], title: str) -> str:
    """The picture as text, the first method on top."""
    description = "; ".join(f"{bar.name}, {_bar_figures(bar)}" for bar in bars)
    return render_figure(lambda heading: bars_figure(bars, heading), title, description, _SETTINGS)


def bars_figure(bars: Sequence[Bar], heading: str) -> Figure:
    """One horizontal bar a method, its figures beside it; the dotted line is autoregressive decoding."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, _MARGIN + _BAR_HEIGHT * len(bars)), layout="constrained")
    figure.suptitle(shortened(heading, TITLE_LENGTH), x=0.01, ha="left", weight="bold").set_parse_math(False)
    axes = figure.subplots()
    lengths = [bar.speedup or 0.0 for bar in bars]
    places = list(range(len(bars)))
    colors = [_LOSSY if not bar.lossless else _SLOWER if bar.slower else _COLOR for bar in bars]
    below = [length - (bar.low or length) for bar, length in zip(bars, lengths, strict=True)]
    above = [(bar.high or length) - length for bar, length in zip(bars, lengths, strict=True)]
    axes.barh(places, lengths, color=colors, height=0.7, xerr=(below, above), ecolor=_LINE, gid="speedup")
    axes.axvline(1.0, color=_LINE, linestyle=":", linewidth=1.0)
    ends = [length + more for length, more in zip(lengths, above, strict=True)]
    for place, end, bar in zip(places, ends, bars, strict=True):
        right = max(end, 1.0)  # beside the dotted line, not across it
        axes.annotate(_bar_figures(bar), (right, place), xytext=(4, 0), textcoords="offset points", va="center")
    axes.set_xlim(0, 1.45 * max([1.0, *ends]))  # room for the figures
    axes.set_yticks(places, [short_label(bar.name) for bar in bars])
    axes.invert_yaxis()
    axes.set_xlabel("speedup over autoregressive decoding")
    return figure


def _bar_figures(bar: Bar) -> str:
    """The figures of a bar in words."""
    speed = "not timed" if bar.speedup is None else f"{bar.speedup:.2f}{', slower' if bar.slower else ''}"
    return f"{speed} ({bar.tokens_per_step:.2f} tokens/step)" + ("" if bar.lossless else ", not lossless")


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
