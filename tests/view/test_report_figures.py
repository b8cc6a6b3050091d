"""The figures of a report from small data, by hand."""

from __future__ import annotations

from typing import Any

import pytest
from looped import looped
from matplotlib.figure import Figure

from treeopt.view.charts import Bar, Panel, Series, bars_figure, chart_figure, panels, set_log2
from treeopt.view.report_figures import (
    decoded_tokens,
    depth_rows,
    first_source,
    heat_rows,
    interval_rows,
    source_legend,
)
from treeopt.view.svg import SHADES, shade, style


def point(nodes: int, value: float, sampling: Any, prediction: Any) -> dict[str, Any]:
    """A point of a curve."""
    return {"nodes": nodes, "tokens_per_step": value, "sampling": sampling, "prediction": prediction}


def test_intervals_are_on_one_axis() -> None:
    """Of a curve the size of the tree, else its best, else its largest; the axis is from 1.5 to 2.5."""
    points = [point(4, 1.6, [1.58, 1.7], [1.55, 1.8]), point(8, 2.0, [1.9, 2.1], [1.8, 2.2])]
    other = [point(2, 1.9, [1.85, 1.95], [1.8, 2.0]), point(16, 2.25, [2.2, 2.3], [2.15, 2.45])]
    curves = [{"kind": "static", "best": 4, "points": points}, {"kind": "per step", "best": None, "points": other}]
    data = {"calibrations": [{"file": "heads.safetensors", "curves": curves}]}
    rows = interval_rows(data)
    assert [(row["name"], row["nodes"]) for row in rows] == [("heads, static", 4), ("heads, per step", 16)]
    assert [row["places"] for row in rows] == [
        {"sampling": ["8.00", "20.00"], "prediction": ["5.00", "30.00"], "middle": "10.00"},
        {"sampling": ["70.00", "80.00"], "prediction": ["65.00", "95.00"], "middle": "75.00"},
    ]
    assert [row["nodes"] for row in interval_rows({**data, "tree": {"nodes": 8}})] == [8, 16]
    for one in points:
        one["prediction"] = None
    assert [row["name"] for row in interval_rows(data)] == ["heads, per step"]
    assert interval_rows({}) == []


def test_heat_is_the_root_of_the_share() -> None:
    """Ten classes: 0, 0.01, 0.25, 0.81 and 1 are 0, 1, 5, 9 and 9."""
    level = {
        "trials": 7,
        "accuracy": [0.0, 0.01, 0.25, 0.81, 1.0],
        "hits": [1, 2, 3, 4, 5],
        "standard_error": [0.5] * 5,
    }
    [row] = heat_rows({"levels": [level]})
    assert row["trials"] == 7
    assert [cell["heat"] for cell in row["cells"]] == [0, 1, 5, 9, 9]
    assert [cell["hits"] for cell in row["cells"]] == [1, 2, 3, 4, 5]


def test_bars_and_panels_by_hand() -> None:
    """Hundredths of the shares; each panel adds its height, and long headings are cut."""
    shares = {"measured": [1.0, 0.125], "predicted": [1.0, 0.25]}
    assert depth_rows({"acceptance_by_depth": shares}) == [
        {"measured": 1.0, "predicted": 1.0, "bar": "100.00", "mark": "100.00"},
        {"measured": 0.125, "predicted": 0.25, "bar": "12.50", "mark": "25.00"},
    ]
    for count in (1, 3):
        figure, axes = panels(count, "a" * 70, sharex=False)
        assert figure.get_suptitle() == "a" * 70
        assert len(axes) == count
        assert figure.get_size_inches().tolist() == [8.0, 3.5 * count]
    assert panels(1, "a" * 71, sharex=False)[0].get_suptitle() == "a" * 69 + "…"


@looped(("rank", "place"), [
    (0, "1st"), (1, "2nd"), (2, "3rd"), (3, "4th"), (9, "10th"), (10, "11th"), (11, "12th"), (12, "13th"), (13, "14th"),
    (20, "21st"), (21, "22nd"), (100, "101st"), (110, "111th"), (112, "113th"), (121, "122nd"),
])  # fmt: skip
def test_ordinals(rank: int, place: str) -> None:
    """Of the token that a source had at a rank."""
    step = {"texts": ["a", "b"], "tokens": [1, 2], "sources": [{}, {"head": rank}]}
    [[root, draft]] = decoded_tokens({"steps": [step]})
    assert root["words"] == "the base model's own token"
    assert draft["words"] == f"accepted draft: head {place}"


def test_sources_of_tokens() -> None:
    """The class and the letter are those of the first source; all sources are in the words."""
    sources: list[dict[str, int | None]] = [{"head": 0}, {"text": 3, "n-gram": 1}, {}, {"other": None}]
    step = {"texts": ["a", " b", "c", "d"], "tokens": [1, 2, 3, 4], "sources": sources}
    [tokens] = decoded_tokens({"steps": [step]})
    assert [first_source(one) for one in sources[1:]] == ["n-gram", "unknown", "other"]
    assert [(one["kind"], one["letter"]) for one in tokens] == [
        ("base", ""),
        ("ngram", "N"),
        ("other", "?"),
        ("other", "?"),
    ]
    assert tokens[1]["words"] == "accepted draft: text 4th, n-gram 2nd"
    assert tokens[1]["visible"] == "␣b"
    assert tokens[2]["words"] == "accepted draft: source not known"
    assert tokens[3]["words"] == "accepted draft: other"
    legend = source_legend({"first_source": {"mine": 1, "lookup": 2, "head": 3}})
    assert [(one["name"], one["letter"], one["count"]) for one in legend] == [
        ("head", "H", 3),
        ("lookup", "L", 2),
        ("mine", "?", 1),
    ]


def test_bars_by_hand() -> None:
    """Lengths, colors and quartiles; a method that was not timed has no length."""
    bars = [Bar("a", 4, 2.0, 1.5, 1.25, 2.0, True), Bar("b", 4, 2.0, None, None, None, False)]
    [axes] = bars_figure(bars, "t").axes
    first, second = axes.patches
    assert (first.get_width(), second.get_width()) == (1.5, 0.0)
    assert first.get_facecolor() != second.get_facecolor()
    assert axes.get_xlim() == (0.0, pytest.approx(2.9))
    assert [text.get_text() for text in axes.texts] == [
        "1.50 (2.00 tokens/step)",
        "not timed (2.00 tokens/step), not lossless",
    ]
    assert [text.xy for text in axes.texts] == [(2.0, 0), (1.0, 1)]
    [errors] = [one for one in axes.collections if len(one.get_segments()) == 2]
    assert errors.get_segments()[0].tolist() == [[1.25, 0.0], [2.0, 0.0]]


def test_chart_has_lines_over_dots_in_their_colors() -> None:
    """Dots are grey and below; lines take the colors in turn, dashed ones are dashed; `best` is in the legend once."""
    series = [
        Series("dots", [1], [1.0], dots=True),
        Series("one", [1, 4], [1.0, 2.0]),
        Series("two", [1], [1.0], dashed=True),
    ]
    [axes] = chart_figure([Panel("x", "y", series, best=[4, 2, 4])], "t").axes
    lines = {str(line.get_label()): line for line in axes.lines}
    order = [lines[name].get_zorder() for name in ("dots", "one", "two")]
    assert order == [1, 2, 2]
    assert [lines[name].get_color() for name in ("dots", "one", "two")] == ["#9aa7b2", "#0b4f8a", "#d9480f"]
    assert (lines["one"].get_linestyle(), lines["two"].get_linestyle()) == ("-", "--")
    assert [list(line.get_xdata()) for line in axes.lines if line.get_gid() == "best"] == [[2, 2], [4, 4]]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["dots", "one", "two", "best size"]


def test_numbers_of_sizes_do_not_overlap() -> None:
    """The best place, the ends and powers of two come first; others only with room."""
    axes = Figure().subplots()
    set_log2(axes, [1, 2, 1023, 1000, 1024, 24, 23, 25, 600], "nodes", best=23)
    assert [text.get_text() for text in axes.get_xticklabels()] == ["1", "2", "23", "600", "1024"]
    assert axes.get_xlim() == (pytest.approx(1 / 1.12), pytest.approx(1024 * 1.12))
    assert axes.get_xlabel() == "nodes"


@looped(("theme", "colors"), [
    ("light", "ffffff 24292f 57606a 8494a4 0b4f8a 5b7083 c92a2a"),
    ("dark", "0d1117 e6edf3 9da7b1 5f7388 79c0ff 8b9daf ff7b72"),
])  # fmt: skip
def test_colors_of_themes(theme: str, colors: str) -> None:
    """The parts of a picture have the colors of the palette; shades go from low to high."""
    background, text, muted, low, high, neutral, accepted = colors.split()
    rules = style(theme)
    for part in (
        f".background{{fill:#{background}}}",
        f" text{{fill:#{text}}}",
        f".column{{fill:#{muted}}}",
        f".s0 circle{{fill:#{low}}}",
        f".s{SHADES - 1} circle{{fill:#{high}}}",
        f".s{SHADES - 1}.edge{{stroke:#{high}}}",
        f" .edge{{stroke:#{neutral}}}",
        f" .accepted circle{{fill:#{accepted}}}",
        f" .bonus circle{{fill:#{background};stroke:#{accepted}}}",
    ):
        assert part in rules
    assert (shade(0.0), shade(0.999), shade(1.0)) == (0, SHADES - 1, SHADES - 1)
