"""What the charts have in common: settings, a log2 axis of sizes, legends, and a figure as SVG.

Equal figures give equal bytes where the versions of matplotlib are equal.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

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
WIDTH, PANEL_HEIGHT = 8.0, 3.5  # inches
_TITLE_LENGTH = 70  # characters of the heading that are drawn
_MOST_LABELS = 20  # sizes with a number on the x axis, about


def svg_of(draw: Callable[[str], Figure], title: str, description: str) -> str:
    """The text of an SVG file: the figure that `draw` makes under a heading, with title and description as metadata."""
    from matplotlib import style
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    heading = "".join(filter(str.isprintable, title))
    stream = io.StringIO()
    with style.context(["default", _SETTINGS]):  # independent of the user's matplotlibrc
        figure = draw(heading)
        FigureCanvasSVG(figure)
        figure.savefig(stream, format="svg", metadata={"Date": None, "Title": heading, "Description": description})
    return stream.getvalue()


def panels(heading: str, rows: int, columns: int = 1) -> tuple[Figure, list[list[Axes]]]:
    """A figure with a heading, and its axes by row and column; panels of a column share the x axis."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, rows * PANEL_HEIGHT), layout="constrained")
    shown = heading if len(heading) <= _TITLE_LENGTH else heading[: _TITLE_LENGTH - 1] + "…"
    figure.suptitle(shown, x=0.01, ha="left", weight="bold").set_parse_math(False)
    axes: list[list[Axes]] = figure.subplots(rows, columns, sharex=True, squeeze=False).tolist()
    return figure, axes


def add_legend(axes: Axes, *sources: Axes) -> None:
    """One row above the panel with the labels of all these axes."""
    pairs = [pair for each in sources for pair in zip(*each.get_legend_handles_labels(), strict=True)]
    handles, labels = zip(*pairs, strict=True)
    axes.legend(handles, labels, loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=len(pairs), borderaxespad=0.2)


def set_sizes(axes: Axes, sizes: Sequence[int], best: int | None) -> None:
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
