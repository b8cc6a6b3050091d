"""What charts share: figures as SVG by matplotlib, legends above panels, bands, and axes of tree sizes.

Equal figures give equal bytes where the versions of matplotlib are equal.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from treeopt.optimize.intervals import Interval
from treeopt.view.words import shortened

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
    """A figure as SVG text.

    Args:
        draw: makes the figure with this heading.
        title: the heading, without characters that cannot be printed; `default` where it is empty.
        description: the figures in words, for the metadata of the file.
        settings: of matplotlib, beside those that all charts share.
        default: the heading where there is none.
    """
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
