"""Charts of curves, sweeps and plans: right, stable, and safe to embed."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from hand_shape import SHAPE
from looped import looped
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

import treeopt
from treeopt.latency import LatencyPoint, LatencyProfile
from treeopt.optimize.curve import Curve, CurvePoint, Timing
from treeopt.optimize.intervals import Interval
from treeopt.optimize.select_method import Method
from treeopt.plan.devices import Device
from treeopt.plan.planner import Acceptance, SpeedPlan, plan_speedup
from treeopt.plan.step_model import StepModel
from treeopt.view.charts import (
    Panel,
    Series,
    chart_figure,
    curve_panels,
    plan_panels,
    render_chart,
    render_curve,
    render_plan,
)
from treeopt.view.themed import COLORS

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
    return Curve(tuple(points), best, str(Method("independent", "uniform")))


def artist(figure: Figure, name: str) -> Any:
    """The one artist that bears the name of a figure."""
    [found] = figure.findobj(lambda each: isinstance(each, Artist) and each.get_gid() == name)
    return found


def pixels(line: Line2D) -> np.ndarray:
    """Where the points of a line stand in the picture: [n, 2]."""
    return np.asarray(line.get_transform().transform(line.get_xydata()))


def test_unit_of_sizes() -> None:
    """Sizes of a profile by path tokens are not called nodes, in any panel."""
    for unit, label in (("nodes", "nodes (root counted)"), ("path tokens", "path tokens: leaves x (depth + 1)")):
        panels = curve_panels(replace(make(SIZES, TOKENS, SPEEDUPS), unit=unit))
        assert [panel.x for panel in panels] == [label] * 3


def drawn_curve(curve: Curve) -> Figure:
    """The figure of a curve."""
    return chart_figure(curve_panels(curve), "")


def lines_of(figure: Figure) -> dict[str, Line2D]:
    """The line of each panel's curve, by the beginning of the panel's label."""
    return {axes.get_ylabel().split()[0].rstrip(":"): axes.lines[0] for axes in figure.axes}


def labels(axes: Axes) -> list[str]:
    """The entries of a panel's legend."""
    legend = axes.get_legend()
    assert legend is not None
    return [each.get_text() for each in legend.get_texts()]


def test_curve_lines_run_through_their_points() -> None:
    """The corners of each line are the figures of the points."""
    curve = make(SIZES, TOKENS, SPEEDUPS)
    figure = drawn_curve(curve)
    figures = {"tokens": TOKENS, "speedup": SPEEDUPS, "overhead": [point.overhead for point in curve.points]}
    drawn = lines_of(figure)
    assert set(drawn) == set(figures)
    for name, values in figures.items():
        assert drawn[name].get_xydata().tolist() == [list(pair) for pair in zip(SIZES, values, strict=True)]


@looped("count", [len(SIZES), 1])
def test_curve_bands_are_the_intervals(count: int) -> None:
    """Both bands reach from the lower to the upper ends; that of a single point is a bar."""
    figure = drawn_curve(make(SIZES[:count], TOKENS[:count], None))
    for kind, half in (("prediction", 0.05), ("sampling", 0.025)):
        band = artist(figure, f"cross-validated {kind} interval, 90%")
        assert isinstance(band, PolyCollection)
        corners = band.get_paths()[0].vertices
        for nodes, tau in zip(SIZES[:count], TOKENS[:count], strict=True):
            near = corners[np.abs(np.log2(corners[:, 0] / nodes)) < 0.1, 1]
            assert [near.min(), near.max()] == pytest.approx([tau - half, tau + half])
        assert np.ptp(corners[:, 0]) > 0


def test_curve_marks_the_best_size() -> None:
    """A line down each panel at the best size."""
    figure = drawn_curve(make(SIZES, TOKENS, SPEEDUPS))
    for axes in figure.axes:
        assert [list(line.get_xdata()) for line in axes.lines if line.get_gid() == "best"] == [[16, 16]]
        assert "best size" in labels(axes)


def test_quartiles_of_timed_steps_are_bands() -> None:
    """The band of overheads is that of the points, that of speedups the tokens per step over it; none at one node."""
    curve = make(SIZES, TOKENS, SPEEDUPS)
    ends = [None, *(Interval(0.9 * (one.overhead or 0), 1.2 * (one.overhead or 0), 0.5) for one in curve.points[1:])]
    points = [replace(one, overhead_quartiles=each) for one, each in zip(curve.points, ends, strict=True)]
    speedup, overhead = curve_panels(replace(curve, points=tuple(points)))[1:]
    assert list(overhead.series[0].bands["_quartiles"]) == ends
    for value, band in list(zip(SPEEDUPS, speedup.series[0].bands["_quartiles"], strict=True))[1:]:
        assert band is not None
        assert (band.low, band.high) == pytest.approx((value / 1.2, value / 0.9))


def test_quartiles_come_from_the_profile() -> None:
    """The quartiles of a step over the median of one node; steps without spread, and one node, have none."""
    points = [
        LatencyPoint(n, 1, 8, seconds, seconds * low, seconds * 1.5) for n, seconds, low in ((1, 2, 0.5), (4, 3, 0.8))
    ]
    timing = Timing(LatencyProfile.from_points(points))
    found = timing.quartiles(4)
    assert found is not None
    assert (found.low, found.high, found.level) == pytest.approx((1.2, 2.25, 0.5))
    assert timing.quartiles(1) is None
    assert (
        Timing(
            LatencyProfile.from_points([replace(one, low=one.seconds, high=one.seconds) for one in points])
        ).quartiles(4)
        is None
    )


def test_charts_have_a_note_and_both_schemes() -> None:
    """The note is drawn below the panels, with every color a variable that is defined for light and for dark."""
    text = render_curve(make(SIZES, TOKENS, SPEEDUPS), "model", "a machine\nof $two$ lines")
    drawn = [each.text for each in ElementTree.fromstring(text).iter(f"{SVG}text")]
    assert {"model", "a machine", "of $two$ lines"} <= set(drawn)
    assert " style=" not in text
    light, dark = (
        set(re.findall(r"(--[\w-]+):#", part)) for part in text.split("@media (prefers-color-scheme:dark)")[:2]
    )
    assert set(re.findall(r"var\((--[\w-]+)\)", text)) <= light
    assert light <= dark
    for color, variable in re.findall(r"(?:fill|stroke):(#\w+);(?:fill|stroke):var\(--([\w-]+)\)", text):
        assert COLORS[color][0] == variable
    assert not re.findall(r"(?:fill|stroke):#\w{6}(?!;(?:fill|stroke):var)", text), "every color follows the scheme"


def test_text_that_looks_like_a_style_stays() -> None:
    """A title that is written as an attribute is not taken for one."""
    title = 'a style="fill: #000000" of mine'
    root = ElementTree.fromstring(render_curve(make([1], [1.0], None), title))
    assert title in [each.text for each in root.iter(f"{SVG}text")]


def test_whole_numbers_have_whole_ticks() -> None:
    """An axis of levels has no tick at 1.5."""
    figure = chart_figure([Panel("levels", "tokens", [Series("t", range(1, 4), [1.0, 1.5, 1.7])])], "t")
    figure.draw_without_rendering()
    low, high = figure.axes[0].get_xlim()
    assert [one for one in figure.axes[0].get_xticks() if low <= one <= high] == [1, 2, 3]


def test_panels_of_one_axis_share_it() -> None:
    """Only the last panel has the numbers and the name of the sizes, and no two axes are on one panel."""
    figure = drawn_curve(make(SIZES, TOKENS, SPEEDUPS))
    figure.draw_without_rendering()
    assert [one.get_xlabel() for one in figure.axes] == ["", "", "nodes (root counted)"]
    assert len({one.get_xlim() for one in figure.axes}) == 1
    places = [one.get_position().bounds for one in figure.axes]
    assert len(set(places)) == len(places) == 3


def test_curve_without_a_profile_has_one_panel() -> None:
    """Without times there is neither speedup nor a best size, and the picture is shorter."""
    alone, both = (drawn_curve(make(SIZES, TOKENS, speedups)) for speedups in (None, SPEEDUPS))
    assert (len(alone.axes), len(both.axes)) == (1, 3)
    assert alone.get_figheight() < both.get_figheight()
    assert "speedup" not in render_curve(make(SIZES, TOKENS, None))


def test_curve_tells_its_figures_in_words() -> None:
    """The description lists the figures of every point, panel by panel."""
    root = ElementTree.fromstring(render_curve(make([1, 4], [1.0, 1.5], [1.0, 1.2])))
    [description] = root.iter(DESCRIPTION)
    assert (description.text or "").split("; ") == [
        "tokens per step, cross-validated: 1 at 1, 1.5 at 4",
        "tokens per step, cross-validated, prediction interval, 90%: 0.95 to 1.05 at 1, 1.45 to 1.55 at 4",
        "tokens per step, cross-validated, sampling interval, 90%: 0.975 to 1.025 at 1, 1.475 to 1.525 at 4",
        "speedup over autoregressive, median of timed steps, quartiles: 1 at 1, 1.2 at 4",
        "speedup over autoregressive, autoregressive decoding: 1 at 1, 1 at 4",
        "overhead: one node = 1, median of timed steps, quartiles: 1 at 1, 1.25 at 4",
    ]


def test_curve_thins_numbers_that_would_overlap() -> None:
    """Of 40 sizes the ends, the best and the powers of two keep their numbers, and none touch."""
    sizes = list(range(1, 41))
    speedups = [1.5 if nodes == 37 else 1.0 for nodes in sizes]
    figure = drawn_curve(make(sizes, [1 + nodes / 40 for nodes in sizes], speedups))
    numbers = figure.axes[-1].get_xticklabels()
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
    figure = drawn_curve(make(sizes, tokens, speedups, half))
    figure.draw_without_rendering()
    for line in lines_of(figure).values():
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
    drawn = [each.text or "" for each in root.iter(f"{SVG}text") if "a&b" in (each.text or "")]
    assert "".join(drawn) == ("<a&b>" * 40)[:127] + "…"
    assert len(drawn) == 2, "the heading has two lines at most"


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
    """Where intervals are unknown neither bands nor their legend are drawn."""
    points = [CurvePoint(nodes, 1.0 + nodes / 8, None, None, None, None, None) for nodes in (1, 2, 8)]
    curve = Curve(tuple(points), None, "independent, uniform")
    figure = drawn_curve(curve)
    assert len(lines_of(figure)["tokens"].get_xydata()) == 3
    assert not figure.findobj(PolyCollection)
    assert labels(figure.axes[0]) == ["cross-validated"]
    assert "interval" not in render_curve(curve)


LINE = Series("line", [2, 8, 64], [1.5, 2.0, 2.5], {"_interval": [Interval(1.4, 1.6), None, Interval(2.4, 2.6)]})
DOTS = Series("dots", [3, 5, 5], [1.1, 1.3, 1.2], dots=True)
DASHED = Series("dashed", [2, 64], [1.8, 1.8], dashed=True)


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
    band = artist(figure, "line _interval")
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
        "; tokens per step, line, interval: 1.4 to 1.6 at 2, 2.4 to 2.6 at 64"
    )


MODEL = StepModel(SHAPE, Device("a device", {"any": 100.0}, 50.0))


def plan(batches: tuple[int, ...] = (1,), contexts: tuple[int, ...] = (8,)) -> SpeedPlan:
    """A drafter with two tokens per step at 16 nodes."""
    return plan_speedup(MODEL, [1, 4, 16], batches, contexts, acceptance=Acceptance("a", (1, 16), (1.0, 2.0)))


@looped(
    ("given", "labels"),
    [
        ({}, {"batch 1"}),
        ({"batches": (1, 4)}, {"batch 1", "batch 4"}),
        ({"contexts": (8, 64)}, {"context 8", "context 64"}),
        (
            {"batches": (1, 4), "contexts": (8, 64)},
            {f"batch {batch}, context {context}" for batch in (1, 4) for context in (8, 64)},
        ),
    ],
)
def test_every_line_has_the_figures_of_its_points(given: Any, labels: set[str]) -> None:
    """Both panels have a line for each label, through the points of the plan."""
    made = plan(**given)
    for axes, figure in zip(chart_figure(plan_panels(made), "title").axes, ("speedup", "overhead"), strict=True):
        lines = [line for line in axes.lines if line.get_gid() not in ("best", "autoregressive decoding")]
        assert {line.get_gid() for line in lines} == labels
        points = sorted(tuple(xy) for line in lines for xy in line.get_xydata())
        assert points == sorted((point.nodes, getattr(point, figure)) for point in made.points)


def test_plan_rings_the_fastest_size_of_each_line() -> None:
    """Each batch has its own ring in both panels, at the best of its points; one is in the legend."""
    made = plan(batches=(1, 4))
    for axes in chart_figure(plan_panels(made), "title").axes:
        rings = [line.get_xdata()[0] for line in axes.lines if line.get_gid() == "best"]
        assert rings == [best.nodes for best in made.best]
        assert labels(axes).count("best size") == 1


def test_axes_have_their_scales() -> None:
    """Nodes are on a log2 axis, all else but speedup on a logarithmic one."""
    upper, lower = chart_figure(plan_panels(plan()), "title").axes
    assert (upper.get_yscale(), lower.get_yscale(), lower.get_xscale()) == ("linear", "log", "log")
    assert lower.get_xlabel() == "nodes (root counted)"


def test_equal_plans_give_equal_bytes() -> None:
    """The title and every point are in the file."""
    text = render_plan(plan(batches=(1, 4)), "by <hand>")
    assert text == render_plan(plan(batches=(1, 4)), "by <hand>")
    assert "by &lt;hand&gt;" in text
    for name in ("speedup over autoregressive", "overhead: one node = 1"):
        for batch in (1, 4):
            assert f"{name}, batch {batch}: 1 at 1, " in text
