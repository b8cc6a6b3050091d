"""Pictures of curves: right, stable, and safe to embed."""

from __future__ import annotations

from itertools import pairwise
from xml.etree import ElementTree

import pytest

from treeopt.optimize.curve import Curve, CurvePoint
from treeopt.optimize.intervals import Interval
from treeopt.optimize.methods import Method
from treeopt.view.curve import render_curve

SVG = "{http://www.w3.org/2000/svg}"
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
    return Curve(tuple(points), best, Method("independent", "uniform"), (1.0,))


def parse(curve: Curve, title: str = "") -> ElementTree.Element:
    """The picture as elements."""
    return ElementTree.fromstring(render_curve(curve, title))


def places(root: ElementTree.Element, kind: str) -> list[tuple[float, float]]:
    """Where the points of one line stand."""
    dots = [dot for dot in root.iter(f"{SVG}circle") if dot.attrib["class"] == kind]
    return [(float(dot.attrib["cx"]), float(dot.attrib["cy"])) for dot in dots]


def corners(root: ElementTree.Element, kind: str) -> list[tuple[float, float]]:
    """The corners of a band: upper ends from left to right, lower ends back."""
    (band,) = [each for each in root.iter(f"{SVG}polygon") if each.attrib["class"] == kind]
    pairs = [pair.split(",") for pair in band.attrib["points"].split()]
    return [(float(x), float(y)) for x, y in pairs]


def texts(root: ElementTree.Element, kind: str) -> list[str]:
    """What is written in one role."""
    return [each.text or "" for each in root.iter(f"{SVG}text") if each.attrib["class"] == kind]


def test_curve_points_stand_in_order_on_a_log2_axis() -> None:
    """Each doubling takes the same room, and more tokens per step stand higher."""
    root = parse(make(SIZES, TOKENS, SPEEDUPS))
    at = places(root, "tokens")
    doubling = at[2][0] - at[1][0]
    assert [x - at[0][0] for x, _ in at] == pytest.approx([doubling * each for each in (0, 2, 3, 4, 5, 6, 7, 8)])
    assert [y for _, y in at] == sorted((y for _, y in at), reverse=True)
    assert [x for x, _ in places(root, "speedup")] == [x for x, _ in places(root, "overhead")] == [x for x, _ in at]


def test_curve_bands_contain_the_line_and_each_other() -> None:
    """At each size: prediction above sampling above the line, and the same below."""
    root = parse(make(SIZES, TOKENS, None))
    line, sampling, prediction = places(root, "tokens"), corners(root, "sampling"), corners(root, "prediction")
    for index, (x, y) in enumerate(line):
        assert sampling[index][0] == prediction[index][0] == sampling[-1 - index][0] == x
        assert prediction[index][1] < sampling[index][1] < y < sampling[-1 - index][1] < prediction[-1 - index][1]


def test_curve_line_runs_through_its_points() -> None:
    """The line's corners are the points."""
    root = parse(make(SIZES, TOKENS, None))
    lines = [each.attrib["points"] for each in root.iter(f"{SVG}polyline")]
    assert " ".join(f"{x:.1f},{y:.1f}" for x, y in places(root, "tokens")) in lines


def test_curve_marks_the_best_size() -> None:
    """A line down the lower panel at the best size, with its figures."""
    root = parse(make(SIZES, TOKENS, SPEEDUPS))
    (marker,) = [each for each in root.iter(f"{SVG}line") if each.attrib["class"] == "marker"]
    assert float(marker.attrib["x1"]) == float(marker.attrib["x2"]) == places(root, "speedup")[3][0]
    assert texts(root, "best") == ["best: 16 nodes, 1.40 times"]


def test_curve_without_a_profile_has_one_panel() -> None:
    """Without times there is neither speedup nor a best size, and the picture is shorter."""
    alone, both = parse(make(SIZES, TOKENS, None)), parse(make(SIZES, TOKENS, SPEEDUPS))
    assert [each.attrib["class"] for each in alone.findall(f"{SVG}g")] == ["upper"]
    assert [each.attrib["class"] for each in both.findall(f"{SVG}g")] == ["upper", "lower"]
    assert int(alone.attrib["height"]) < int(both.attrib["height"])
    assert "speedup" not in (alone.findtext(f"{SVG}desc") or "")


def test_curve_tells_its_figures_in_words() -> None:
    """The text alternative and the hover title of a point say the same."""
    root = parse(make([1, 4], [1.0, 1.5], [1.0, 1.2]))
    said = "4 nodes: 1.500 tokens per step, sampling 1.475 to 1.525, prediction 1.450 to 1.550"
    said += ", overhead 1.250, speedup 1.200"
    titles = [each.text for each in root.iter(f"{SVG}title")]
    assert titles.count(said) == 3  # at its tokens per step, its overhead and its speedup
    assert (root.findtext(f"{SVG}desc") or "").split("; ")[1] == said


def test_curve_has_round_ticks_and_names_its_axes() -> None:
    """Ticks are multiples of 1, 2 or 5, in values between the ends."""
    root = parse(make(SIZES, TOKENS, SPEEDUPS))
    upper, lower = root.findall(f"{SVG}g")
    assert texts(upper, "y") == ["1.0", "1.5", "2.0", "2.5", "3.0"]
    assert texts(lower, "y") == ["0.6", "0.8", "1.0", "1.2", "1.4"]
    assert texts(root, "name") == ["tokens per step", "speedup over one by one", "nodes (root counted)"]


def test_curve_thins_numbers_that_would_overlap() -> None:
    """Of 40 sizes the ends, the best and the powers of two keep their numbers, and none touch."""
    sizes = list(range(1, 41))
    speedups = [1.5 if nodes == 37 else 1.0 for nodes in sizes]
    (upper, _) = parse(make(sizes, [1 + nodes / 40 for nodes in sizes], speedups)).findall(f"{SVG}g")
    labels = [each for each in upper.iter(f"{SVG}text") if each.attrib["class"] == "x"]
    assert {"1", "2", "4", "8", "16", "32", "37"} <= {each.text for each in labels}
    at = [float(each.attrib["x"]) for each in labels]
    assert all(right - left > 11 for left, right in pairwise(at))


@pytest.mark.parametrize(
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
    upper, lower = parse(make(sizes, tokens, speedups, half)).findall(f"{SVG}g")
    for panel, kinds in ((upper, ["tokens"]), (lower, ["speedup", "overhead"])):
        (frame,) = [each for each in panel.iter(f"{SVG}rect") if each.attrib["class"] == "frame"]
        left, top, width, height = (float(frame.attrib[name]) for name in ("x", "y", "width", "height"))
        for x, y in (place for kind in kinds for place in places(panel, kind)):
            assert left < x < left + width
            assert top < y < top + height
        labels = texts(panel, "y")
        assert 2 <= len(labels) == len(set(labels)) <= 9


def test_curve_escapes_and_cuts_its_title() -> None:
    """Markup stays text, control characters go, and a long title is cut where it is drawn only."""
    assert parse(make([1], [1.0], None), '<b>&"\x00').findtext(f"{SVG}title") == '<b>&"'
    root = parse(make([1], [1.0], None), "<a&b>" * 40)
    assert root.findtext(f"{SVG}title") == "<a&b>" * 40
    assert texts(root, "title") == ["<a&b>" * 13 + "<a&b…"]


def test_curve_bytes_are_stable() -> None:
    """Equal curves give equal bytes."""
    assert render_curve(make(SIZES, TOKENS, SPEEDUPS)) == render_curve(make(SIZES, TOKENS, SPEEDUPS))


def test_curve_without_intervals_has_no_bands() -> None:
    """Where intervals are unknown neither bands nor their legend are drawn, and the text says so."""
    points = [CurvePoint(nodes, 1.0 + nodes / 8, None, None, None, None, None) for nodes in (1, 2, 8)]
    picture = render_curve(Curve(tuple(points), None, "independent, uniform", (1.0,)))
    root = ElementTree.fromstring(picture)
    assert len(places(root, "tokens")) == 3
    assert not list(root.iter(f"{SVG}polygon"))
    assert texts(root, "legend") == ["tokens per step, unseen texts"]
    assert "sampling unknown, prediction unknown" in picture
