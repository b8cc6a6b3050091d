"""Charts of curves: right, stable, and safe to embed."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from looped import looped
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

import treeopt
from treeopt.optimize.curve import Curve, CurvePoint
from treeopt.optimize.intervals import Interval
from treeopt.optimize.select_method import Method
from treeopt.view.charts import curve_figure, render_curve

SVG = "{http://www.w3.org/2000/svg}"
DESCRIPTION = "{http://purl.org/dc/elements/1.1/}description"
SIZES = [1, 4, 8, 16, 32, 64, 128, 256]
TOKENS = [1.0, 1.5, 1.9, 2.19, 2.41, 2.61, 2.83, 3.0]
SPEEDUPS = [1.0, 1.2, 1.36, 1.4, 1.38, 1.2, 0.9, 0.5]


def make(sizes: list[int], tokens: list[float], speedups: list[float] | None, half: float = 0.05) -> Curve:
    """A curve by its figures; the sampling interval is half as wide as the prediction interval."""
    points = []
    for index, (nodes, tau) in enumerate(zip(sizes, tokens, strict=True)):
        speedup = speedups[index] if speedups else None
        overhead = tau / speedup if speedup else None
        seconds = overhead / 100 if overhead else None
        sampling, prediction = Interval(tau - half / 2, tau + half / 2), Interval(tau - half, tau + half)
        points.append(CurvePoint(nodes, tau, sampling, prediction, seconds, overhead, speedup))
    best = sizes[speedups.index(max(speedups))] if speedups else None
    return Curve(tuple(points), best, str(Method("independent", "uniform")), (1.0,))


def artist(figure: Figure, name: str) -> Any:
    """The one artist that bears the name of a figure."""
    [found] = figure.findobj(lambda each: isinstance(each, Artist) and each.get_gid() == name)
    return found


def pixels(line: Line2D) -> np.ndarray:
    """Where the points of a line stand in the picture: [n, 2]."""
    return np.asarray(line.get_transform().transform(line.get_xydata()))


def labels(axes: Axes) -> list[str]:
    """The entries of a panel's legend."""
    legend = axes.get_legend()
    assert legend is not None
    return [each.get_text() for each in legend.get_texts()]


def test_curve_points_stand_in_order_on_a_log2_axis() -> None:
    """Each doubling takes the same room, and more tokens per step stand higher."""
    figure = curve_figure(make(SIZES, TOKENS, SPEEDUPS), "")
    at = pixels(artist(figure, "tokens"))
    doubling = at[2, 0] - at[1, 0]
    assert at[:, 0] - at[0, 0] == pytest.approx([doubling * each for each in (0, 2, 3, 4, 5, 6, 7, 8)])
    assert (np.diff(at[:, 1]) > 0).all()
    for name in ("speedup", "overhead"):
        assert pixels(artist(figure, name))[:, 0] == pytest.approx(at[:, 0])


def test_curve_lines_run_through_their_points() -> None:
    """The corners of each line are the figures of the points."""
    curve = make(SIZES, TOKENS, SPEEDUPS)
    figure = curve_figure(curve, "")
    for name, values in {
        "tokens": TOKENS,
        "speedup": SPEEDUPS,
        "overhead": [point.overhead for point in curve.points],
    }.items():
        assert artist(figure, name).get_xydata().tolist() == [list(pair) for pair in zip(SIZES, values, strict=True)]


@looped("count", [len(SIZES), 1])
def test_curve_bands_are_the_intervals(count: int) -> None:
    """Both bands reach from the lower to the upper ends; that of a single point is a bar."""
    figure = curve_figure(make(SIZES[:count], TOKENS[:count], None), "")
    for kind, half in (("prediction", 0.05), ("sampling", 0.025)):
        band = artist(figure, kind)
        assert isinstance(band, PolyCollection)
        corners = band.get_paths()[0].vertices
        for nodes, tau in zip(SIZES[:count], TOKENS[:count], strict=True):
            near = corners[np.abs(np.log2(corners[:, 0] / nodes)) < 0.1, 1]
            assert [near.min(), near.max()] == pytest.approx([tau - half, tau + half])
        assert np.ptp(corners[:, 0]) > 0


def test_curve_marks_the_best_size() -> None:
    """A line down the lower panel at the best size, with its figures."""
    figure = curve_figure(make(SIZES, TOKENS, SPEEDUPS), "")
    marker = artist(figure, "best")
    assert list(marker.get_xdata()) == [16, 16]
    assert marker.axes is artist(figure, "speedup").axes
    assert "best: 16 nodes, 1.40 times" in labels(marker.axes)


def test_curve_without_a_profile_has_one_panel() -> None:
    """Without times there is neither speedup nor a best size, and the picture is shorter."""
    alone, both = (curve_figure(make(SIZES, TOKENS, speedups), "") for speedups in (None, SPEEDUPS))
    assert (len(alone.axes), len(both.axes)) == (1, 3)  # overhead has an axis of its own
    assert alone.get_figheight() < both.get_figheight()
    assert "speedup" not in render_curve(make(SIZES, TOKENS, None))


def test_curve_tells_its_figures_in_words() -> None:
    """The description lists the figures of every point."""
    root = ElementTree.fromstring(render_curve(make([1, 4], [1.0, 1.5], [1.0, 1.2])))
    said = "4 nodes: 1.500 tokens per step, sampling 1.475 to 1.525, prediction 1.450 to 1.550"
    said += ", overhead 1.250, speedup 1.200"
    [description] = root.iter(DESCRIPTION)
    assert (description.text or "").split("; ")[1] == said


def test_curve_thins_numbers_that_would_overlap() -> None:
    """Of 40 sizes the ends, the best and the powers of two keep their numbers, and none touch."""
    sizes = list(range(1, 41))
    speedups = [1.5 if nodes == 37 else 1.0 for nodes in sizes]
    figure = curve_figure(make(sizes, [1 + nodes / 40 for nodes in sizes], speedups), "")
    numbers = figure.axes[-2].get_xticklabels()
    assert {"1", "2", "4", "8", "16", "37"} <= {each.get_text() for each in numbers}
    figure.draw_without_rendering()
    boxes = [each.get_window_extent() for each in numbers]
    assert all(one.x1 < other.x0 for one, other in pairwise(boxes))


@looped(
    ("sizes", "tokens", "speedups", "half"),
    [
        ([7], [1.7], [0.9], 0.05),
        ([1], [1.0], [1.0], 0.0),
        ([1, 2, 4], [1.0, 1.0, 1.0], [1.0, 1.0, 1.0], 0.0),
        ([1, 2, 3], [1.0, 1.2, 1.3], [1.0, 0.6, 0.05], 0.3),
        ([1, 3, 4096], [1.0, 1.00001, 40.0], [1.0, 7.0, 39.0], 0.0),
    ],
)
def test_curve_stays_inside_its_picture(
    sizes: list[int], tokens: list[float], speedups: list[float], half: float
) -> None:
    """One point, equal values, speedups below one and wide ranges keep to their panels, with two ticks or more."""
    figure = curve_figure(make(sizes, tokens, speedups, half), "")
    figure.draw_without_rendering()
    for name in ("tokens", "speedup", "overhead"):
        line = artist(figure, name)
        box = line.axes.get_window_extent()
        for x, y in pixels(line):
            assert box.x0 < x < box.x1
            assert box.y0 < y < box.y1
        low, high = line.axes.get_ylim()
        assert 2 <= sum(low <= tick <= high for tick in line.axes.get_yticks()) <= 12


def test_curve_escapes_and_cuts_its_title() -> None:
    """Markup and dollar signs stay text, control characters go, and a long title is cut where it is drawn only."""
    root = ElementTree.fromstring(render_curve(make([1], [1.0], None), '<b>&"\x00 $\\frac$'))
    assert root.findtext(f"{SVG}title") == '<b>&" $\\frac$'
    root = ElementTree.fromstring(render_curve(make([1], [1.0], None), "<a&b>" * 40))
    assert root.findtext(f"{SVG}title") == "<a&b>" * 40
    assert "<a&b>" * 13 + "<a&b…" in [each.text for each in root.iter(f"{SVG}text")]


@pytest.mark.slow
def test_curve_bytes_are_equal_in_another_process(tmp_path: Path) -> None:
    """Neither the process, its hash seed nor the user's matplotlibrc changes the picture; pyplot is not imported."""
    (tmp_path / "matplotlibrc").write_text("lines.linewidth: 9\nsvg.fonttype: path\naxes.facecolor: red\n")
    script = (
        "import pickle, sys; from treeopt.view.charts import render_curve\n"
        "curve = pickle.load(sys.stdin.buffer); assert 'matplotlib' not in sys.modules\n"
        "print(end=render_curve(curve)); assert 'matplotlib.pyplot' not in sys.modules"
    )
    given = {"MATPLOTLIBRC": str(tmp_path), "PYTHONHASHSEED": "7", "PYTHONPATH": str(Path(treeopt.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | given,
        input=pickle.dumps(make(SIZES, TOKENS, SPEEDUPS)),
        capture_output=True,
        check=True,
    )
    here = [render_curve(make(SIZES, TOKENS, SPEEDUPS)) for _ in range(2)]
    assert here[0] == here[1] == done.stdout.decode()


def test_drawing_leaves_the_settings_of_matplotlib_alone() -> None:
    """The settings of the process are the same before and after."""
    import matplotlib

    before = dict(matplotlib.rcParams)
    render_curve(make(SIZES, TOKENS, SPEEDUPS))
    assert dict(matplotlib.rcParams) == before


def test_curve_without_intervals_has_no_bands() -> None:
    """Where intervals are unknown neither bands nor their legend are drawn, and the text says so."""
    points = [CurvePoint(nodes, 1.0 + nodes / 8, None, None, None, None, None) for nodes in (1, 2, 8)]
    curve = Curve(tuple(points), None, "independent, uniform", (1.0,))
    figure = curve_figure(curve, "")
    assert len(artist(figure, "tokens").get_xydata()) == 3
    assert not figure.findobj(PolyCollection)
    assert labels(figure.axes[0]) == ["tokens per step, cross-validated"]
    assert "sampling unknown, prediction unknown" in render_curve(curve)
