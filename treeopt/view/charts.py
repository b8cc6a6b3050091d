"""Charts as SVG by matplotlib: curves, bars of a comparison, plans, in the reader's light or dark colors.

A chart has a heading, and below its panels a note: what was measured where. The description in the file's metadata
lists the figures. Equal charts give equal bytes where the versions of matplotlib are equal.
"""

from __future__ import annotations

import io
import math
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from treeopt.defaults import NODES, PATH_TOKENS
from treeopt.optimize.curve import Curve, CurvePoint
from treeopt.optimize.intervals import LEVEL, Interval
from treeopt.plan.planner import PlanPoint, SpeedPlan
from treeopt.view.scene import shortened
from treeopt.view.themed import themed

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
WIDTH, PANEL_HEIGHT = 6.6, 2.5  # inches
AXES = {NODES: "nodes (root counted)", PATH_TOKENS: "path tokens: leaves x (depth + 1)"}  # labels of sizes
_COMMON = {"svg.fonttype": "none", "font.size": 9.0}
TITLE_LENGTH, NOTE_LENGTH = 64, 96  # characters of a line of the heading and of the note
_TITLE_LINES, _LINE_HEIGHT = 2, 0.16  # of the heading that are drawn; inches
Finish = Callable[[str], str]  # what is made of the SVG of matplotlib
_LABEL_LENGTH = 40  # characters of a name that are drawn
_MOST_LABELS = 20  # sizes with a number on the x axis, about


def render_figure(
    draw: Callable[[str], Figure],
    title: str,
    description: str,
    settings: Mapping[str, Any],
    default: str = "",
    finish: Finish = themed,
) -> str:
    """A figure as SVG text."""
    from matplotlib import style
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    heading = "".join(filter(str.isprintable, title)) or default
    stream = io.StringIO()
    ids = {"svg.hashsalt": f"treeopt {description}"}  # they depend on the picture alone
    with style.context(["default", {**_COMMON, **settings, **ids}]):  # independent of the user's matplotlibrc
        figure = draw(heading)
        FigureCanvasSVG(figure)
        figure.savefig(stream, format="svg", metadata={"Date": None, "Title": heading, "Description": description})
    return finish(stream.getvalue())


def titled_figure(height: float, heading: str, note: str = "", width: float = WIDTH) -> Figure:
    """An empty figure with a heading, and a note below its panels, for which it is higher than `height`."""
    from matplotlib.figure import Figure

    words = textwrap.wrap(shortened(heading, _TITLE_LINES * TITLE_LENGTH), TITLE_LENGTH)
    notes = [line for part in note.splitlines() for line in textwrap.wrap(part, NOTE_LENGTH)]
    height += _LINE_HEIGHT * (len(words) + len(notes))
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.suptitle("\n".join(words), x=0.01, ha="left", weight="bold", size=10.0).set_parse_math(False)
    if notes:
        figure.supxlabel("\n".join(notes), x=0.01, ha="left", color=_NOTE, size=7.5).set_parse_math(False)
    return figure


def _draw_band(axes: Axes, known: Sequence[tuple[float, Interval]], **look: Any) -> None:
    """The band between the ends of intervals at their places on the x axis."""
    if len(known) == 1:  # a band needs two ends
        [(place, interval)] = known
        known = [(place / 1.03, interval), (place * 1.03, interval)]
    columns, intervals = zip(*known, strict=True)
    lows, highs = [each.low for each in intervals], [each.high for each in intervals]
    axes.fill_between(columns, lows, highs, alpha=_BAND, linewidth=0, **look)


def short_label(name: str) -> str:
    """A name without its middle where it is too long to be drawn: matplotlib would leave no room for the panel."""
    half = _LABEL_LENGTH // 2
    return name if len(name) <= _LABEL_LENGTH else f"{name[: half - 1]}…{name[-half:]}"


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
_DOTS, _BEST, _NOTE = "#9aa7b2", "#33414d", "#57606a"
_BAND = 0.16  # opacity of intervals
_ROW_LABELS, _ROW_HEIGHT = 3, 0.2  # of the legend: labels in a row, inches


@dataclass(frozen=True)
class Series:
    """Figures by place."""

    name: str  # in the legend
    x: Sequence[float]  # places on the axis
    y: Sequence[float]  # the figures
    # names of intervals to those of each figure, None where unknown; a name with `_` is not in the legend
    bands: Mapping[str, Sequence[Interval | None]] = field(default_factory=dict)
    dots: bool = False  # whether the figures are dots without a line, and in grey
    dashed: bool = False  # whether the line is dashed, for figures to compare with
    best: float | None = None  # the place of the figure that has a ring around it


@dataclass(frozen=True)
class Panel:
    """Series on the same axes, whose names are `x` and `y`; an axis is logarithmic where `log2` (x) or `log` (y).

    The places `best` on the x axis have vertical lines.
    """

    x: str
    y: str
    series: Sequence[Series]
    log2: bool = False
    best: Sequence[float] = ()
    log: bool = False


def render_chart(chart: Sequence[Panel], title: str, default: str = "", note: str = "", finish: Finish = themed) -> str:
    """The picture as text: panels below each other, with `title` as the heading, or `default` for none."""
    parts = [f"{panel.y}, {words}" for panel in chart for one in panel.series for words in _in_words(one)]
    description = "; ".join(parts + note.splitlines())
    return render_figure(lambda heading: chart_figure(chart, heading, note), title, description, LINES, default, finish)


def chart_figure(chart: Sequence[Panel], heading: str, note: str = "") -> Figure:
    """The figure; artists carry the names of their series as `gid`. The last of the panels with one x axis names it."""
    rows = sum(-(-(len(panel.series) + bool(panel.best)) // _ROW_LABELS) for panel in chart)
    figure = titled_figure(len(chart) * PANEL_HEIGHT + rows * _ROW_HEIGHT, heading, note)
    axes: Sequence[Axes] = figure.subplots(len(chart), squeeze=False)[:, 0].tolist()
    for i, (panel, place) in enumerate(zip(chart, axes, strict=True)):
        _draw(place, panel)
        if panel.log2 and (panel.x, True) in [(one.x, one.log2) for one in chart[i + 1 :]]:
            place.tick_params(labelbottom=False)
            place.set_xlabel("")
    return figure


def _draw(axes: Axes, panel: Panel) -> None:
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

    lines = 0
    for one in panel.series:
        color = _DOTS if one.dots else _COLORS[lines % len(_COLORS)]
        style = "." if one.dots else "--" if one.dashed else ("o-", "s-")[lines // len(_COLORS) % 2]
        lines += not one.dots
        axes.plot(one.x, one.y, style, color=color, label=one.name, gid=one.name, zorder=1 if one.dots else 2)
        for band, known in _known(one):
            _draw_band(axes, known, color=color, label=band, gid=f"{one.name} {band}")
    for one, line in list(zip(panel.series, list(axes.lines), strict=True)):
        if one.best is not None:
            at = one.y[list(one.x).index(one.best)]
            label = "best size" if one is panel.series[0] else "_"
            ring: dict[str, Any] = {"markersize": 11.0, "markerfacecolor": "none", "markeredgewidth": 1.5}
            axes.plot([one.best], [at], "o", color=line.get_color(), label=label, gid="best", **ring)
    for i, place in enumerate(sorted(set(panel.best))):
        label = "_" if i else "best size"  # once in the legend
        axes.axvline(place, color=_BEST, linestyle="--", linewidth=1.0, label=label, gid="best")
    axes.set_ylabel(panel.y)
    axes.set_xlabel(panel.x)
    if panel.log:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
    if panel.log2:
        best = int(panel.best[0]) if len(panel.best) == 1 else None
        set_log2(axes, [int(x) for one in panel.series for x in one.x], panel.x, best)
    elif all(isinstance(x, int) for one in panel.series for x in one.x):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))  # there are no 1.5 levels
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(
        handles,
        list(map(short_label, labels)),
        loc="lower left",
        bbox_to_anchor=(0.0, 1.0),
        ncols=min(len(labels), _ROW_LABELS),
        borderaxespad=0.2,
    )


def _known(one: Series) -> Iterator[tuple[str, list[tuple[float, Interval]]]]:
    for band, intervals in one.bands.items():
        known = [(x, each) for x, each in zip(one.x, intervals, strict=True) if each is not None]
        if known:
            yield band, known


def _in_words(one: Series) -> Iterator[str]:
    if one.dots:
        yield f"{one.name}: {len(one.y)} points, {min(one.y):.4g} to {max(one.y):.4g}"
        return
    yield f"{one.name}: " + ", ".join(f"{y:.4g} at {x:g}" for x, y in zip(one.x, one.y, strict=True))
    for band, known in _known(one):
        ends = ", ".join(f"{each.low:.4g} to {each.high:.4g} at {x:g}" for x, each in known)
        yield f"{one.name}, {band.lstrip('_')}: {ends}"


_AUTOREGRESSIVE = "autoregressive decoding"


def render_curve(curve: Curve, title: str = "", note: str = "") -> str:
    """The picture as text, with `title` as its heading."""
    return render_chart(curve_panels(curve), title, "Tokens per step by size of the tree", note)


def curve_panels(curve: Curve) -> list[Panel]:
    """Tokens per step, and speedup and overhead with the quartiles of timed steps where they are known."""
    points, sizes = curve.points, [point.nodes for point in curve.points]
    bands = {
        f"{kind} interval, {LEVEL:.0%}": [getattr(point, kind) for point in points]
        for kind in ("prediction", "sampling")
    }
    tokens = Series("cross-validated", sizes, [point.tokens_per_step for point in points], bands)
    best = [] if curve.best is None else [curve.best]
    timed = [point for point in points if point.speedup is not None and point.overhead is not None]
    panels = [Panel(AXES[curve.unit], "tokens per step", [tokens], log2=True, best=best)]
    return panels + _costs({"median of timed steps, quartiles": timed}, best, curve.unit) if timed else panels


def _costs(
    points: Mapping[str, Sequence[CurvePoint | PlanPoint]],
    best: Sequence[float],
    unit: str = NODES,
    *,
    log: bool = False,
) -> list[Panel]:
    """Panels of speedup and overhead, with a line for each name; with `log` rings mark the best size of each."""
    sizes = [point.nodes for of in points.values() for point in of]

    def lines(figure: str) -> Iterator[Series]:
        for (name, of), fastest in zip(points.items(), best, strict=True):
            bands = {"_quartiles": [getattr(point, f"{figure}_quartiles", None) for point in of]}
            values = [getattr(point, figure) for point in of]
            yield Series(name, [point.nodes for point in of], values, bands, best=fastest if log else None)

    level = Series(_AUTOREGRESSIVE, [min(sizes), max(sizes)], [1.0, 1.0], dashed=True)
    marked = [] if log else best
    return [
        Panel(AXES[unit], "speedup over autoregressive", [*lines("speedup"), level], log2=True, best=marked),
        Panel(AXES[unit], "overhead: one node = 1", [*lines("overhead")], log2=True, best=marked, log=log),
    ]


_SETTINGS = {"axes.spines.top": False, "axes.spines.right": False}
_BAR_HEIGHT, _MARGIN, _BARS_WIDTH = 0.3, 0.7, 8.0  # inches
_CHARACTER, _BESIDE = 0.075, 0.4  # estimates of the width of a character and of what else is beside bars, inches
_COLOR, _LOSSY, _SLOWER, _LINE = "#0b7285", "#d9480f", "#9aa7b2", "#33414d"


@dataclass(frozen=True)
class Bar:
    """One method."""

    name: str  # of the method
    tokens_per_step: float  # its mean acceptance length
    speedup: float | None  # median over the repeats; None where nothing was timed
    low: float | None  # lower quartile; None as `speedup`
    high: float | None  # upper quartile; None as `speedup`
    lossless: bool  # whether all texts are those of greedy decoding

    @property
    def slower(self) -> bool:
        """Whether autoregressive decoding is faster."""
        return self.speedup is not None and self.speedup < 1


def bar_of(row: Mapping[str, Any], name: str = "") -> Bar:
    """The bar of a row of a comparison's JSON."""
    low, high = (row["quartiles"] or {}).get("speedup") or (row["speedup"], row["speedup"])
    figures = row["mean_acceptance_length"], row["speedup"], low, high
    return Bar(name or row["method"], *figures, lossless=bool(row["lossless"]))


def render_bars(bars: Sequence[Bar], title: str, note: str = "", finish: Finish = themed) -> str:
    """The picture as text, the first method on top."""
    description = "; ".join([f"{bar.name}, {_bar_figures(bar)}" for bar in bars] + note.splitlines())
    return render_figure(lambda heading: bars_figure(bars, heading, note), title, description, _SETTINGS, "", finish)


def bars_figure(bars: Sequence[Bar], heading: str, note: str = "") -> Figure:
    """A horizontal bar a method, its figures beside it, whiskers to its quartiles; dotted: autoregressive decoding."""
    figure = titled_figure(_MARGIN + _BAR_HEIGHT * len(bars), heading, note, _BARS_WIDTH)
    axes = figure.subplots()
    lengths = [bar.speedup or 0.0 for bar in bars]
    places = list(range(len(bars)))
    colors = [_LOSSY if not bar.lossless else _SLOWER if bar.slower else _COLOR for bar in bars]
    below = [length - (bar.low or length) for bar, length in zip(bars, lengths, strict=True)]
    above = [(bar.high or length) - length for bar, length in zip(bars, lengths, strict=True)]
    whiskers: dict[str, Any] = {"xerr": (below, above), "ecolor": _LINE, "capsize": 3.0}
    axes.barh(places, lengths, color=colors, height=0.7, gid="speedup", **whiskers)
    axes.axvline(1.0, color=_LINE, linestyle=":", linewidth=1.0)
    ends = [length + more for length, more in zip(lengths, above, strict=True)]
    for place, end, bar in zip(places, ends, bars, strict=True):
        right = max(end, 1.0)  # beside the dotted line, not across it
        axes.annotate(_bar_figures(bar), (right, place), xytext=(4, 0), textcoords="offset points", va="center")
    names = [short_label(bar.name) for bar in bars]
    room = _BARS_WIDTH - _BESIDE - _CHARACTER * max(map(len, names))
    free = [1 - _CHARACTER * len(_bar_figures(bar)) / room for bar in bars]  # the share left of the figures
    axes.set_xlim(0, max(max(end, 1.0) / share for end, share in zip(ends, free, strict=True)))
    axes.set_yticks(places, names)
    axes.invert_yaxis()
    spread = any(bar.low != bar.high for bar in bars)
    axes.set_xlabel("speedup over autoregressive decoding" + (": median and quartiles" if spread else ""))
    return figure


def _bar_figures(bar: Bar) -> str:
    speed = "not timed" if bar.speedup is None else f"{bar.speedup:.2f}{', slower' if bar.slower else ''}"
    return f"{speed} ({bar.tokens_per_step:.2f} tokens/step)" + ("" if bar.lossless else ", not lossless")


def render_plan(plan: SpeedPlan, title: str, note: str = "") -> str:
    """The picture as text, with `title` as its heading."""
    return render_chart(plan_panels(plan), title, note=note)


def plan_panels(plan: SpeedPlan) -> list[Panel]:
    """Speedup and overhead, with a line for each batch and context; what all lines share is not in their labels."""
    contexts = {best.context for best in plan.best}
    batches = {best.batch for best in plan.best}
    found: dict[str, list[PlanPoint]] = defaultdict(list)
    for point in plan.points:
        batch, context = f"batch {point.batch}", f"context {point.context}"
        parts = [batch] * (len(batches) > 1) + [context] * (len(contexts) > 1)
        found[", ".join(parts) or batch].append(point)
    return _costs(found, [best.nodes for best in plan.best], log=True)
