"""Charts of sweeps: series where their figures are, stable bytes, and figures in words."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

import numpy as np
from looped import looped
from matplotlib.artist import Artist
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure

from treeopt.optimize.intervals import Interval
from treeopt.view.charts import Panel, Series, chart_figure, render_chart

DESCRIPTION = "{http://purl.org/dc/elements/1.1/}description"
LINE = Series("line", [2, 8, 64], [1.5, 2.0, 2.5], [Interval(1.4, 1.6), None, Interval(2.4, 2.6)])
DOTS = Series("dots", [3, 5, 5], [1.1, 1.3, 1.2], dots=True)
DASHED = Series("dashed", [2, 64], [1.8, 1.8], dashed=True)


def artist(figure: Figure, name: str) -> Any:
    """The one artist with the name of a series."""
    [found] = figure.findobj(lambda each: isinstance(each, Artist) and each.get_gid() == name)
    return found


def test_series_are_drawn_at_their_figures() -> None:
    """Lines have their corners at the figures, dots no line between them, and dashed lines no markers."""
    figure = chart_figure([Panel("nodes", "tokens", [DOTS, LINE, DASHED], log2=True)], "t")
    for one in (LINE, DOTS, DASHED):
        drawn = artist(figure, one.name)
        assert drawn.get_xydata().tolist() == [list(pair) for pair in zip(one.x, one.y, strict=True)]
    assert artist(figure, "dots").get_linestyle() == "None"
    assert artist(figure, "dashed").get_linestyle() == "--"
    assert artist(figure, "line").get_marker() == "o"
    assert len({artist(figure, one.name).get_color() for one in (LINE, DOTS, DASHED)}) == 3


def test_bands_are_the_known_intervals() -> None:
    """The band reaches from the lower to the upper ends; places without an interval are skipped."""
    figure = chart_figure([Panel("x", "y", [LINE, DOTS])], "t")
    band = artist(figure, "line interval")
    assert isinstance(band, PolyCollection)
    corners = band.get_paths()[0].vertices
    assert {(x, y) for x, y in corners.tolist()} == {(2, 1.4), (2, 1.6), (64, 2.4), (64, 2.6)}
    assert len(figure.findobj(PolyCollection)) == 1


def test_panels_have_their_own_axes() -> None:
    """Each panel has its names and scale; the log2 axis has the ends of all series as numbers."""
    figure = chart_figure([Panel("nodes", "tokens", [LINE, DOTS], log2=True), Panel("epsilon", "share", [DASHED])], "t")
    upper, lower = figure.axes
    assert [(one.get_xlabel(), one.get_ylabel(), one.get_xscale()) for one in (upper, lower)] == [
        ("nodes", "tokens", "log"),
        ("epsilon", "share", "linear"),
    ]
    numbers = [each.get_text() for each in upper.get_xticklabels()]
    assert {"2", "8", "64"} <= set(numbers)
    low, high = upper.get_xlim()
    assert low < 2 < 64 < high


def test_chart_is_stable_and_says_its_figures() -> None:
    """Equal charts give equal bytes; the description holds the figures of lines, and the range of dots."""
    panels = [Panel("nodes", "tokens per step", [DOTS, LINE], log2=True)]
    picture = render_chart(panels, "A <title>")
    assert picture == render_chart(panels, "A <title>")
    [description] = ElementTree.fromstring(picture).iter(DESCRIPTION)
    assert description.text == (
        "tokens per step, dots: 3 points, 1.1 to 1.3; tokens per step, line: 1.5 at 2, 2 at 8, 2.5 at 64"
    )


@looped("log2", [False, True])
def test_one_point_is_drawn(log2: bool) -> None:
    """A series of one figure, with its interval, is inside its panel."""
    one = Series("one", [16], [2.0], [Interval(1.9, 2.1)])
    figure = chart_figure([Panel("x", "y", [one], log2=log2)], "t")
    figure.draw_without_rendering()
    drawn = artist(figure, "one")
    box = drawn.axes.get_window_extent()
    [[x, y]] = np.asarray(drawn.get_transform().transform(drawn.get_xydata())).tolist()
    assert box.x0 < x < box.x1
    assert box.y0 < y < box.y1
