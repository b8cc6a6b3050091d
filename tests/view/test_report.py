"""The page of a report and its figures: structure, security policy, escaping, numbers, size, bars and intervals."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from typing import Any

import pytest
from helpers import random_tree, stretches
from looped import looped
from matplotlib.figure import Figure
from report_pages import HOSTILE, VALIDATION, Page, whole_data

from treeopt.files.results import ValidationResult
from treeopt.traces import NONE
from treeopt.tree import Tree
from treeopt.view.charts import Bar, Panel, Series, bars_figure, chart_figure, set_log2, titled_figure
from treeopt.view.report import (
    decoded_tokens,
    first_source,
    headline,
    heat,
    interval_rows,
    render_report,
    source_legend,
)
from treeopt.view.report_data import PARTS, ReportInputs, report_data
from treeopt.view.svg import SHADES, render_svg, shade, style

SECTIONS = {
    "accuracy": "calibrations",
    "sizes": "calibrations",
    "intervals": "calibrations",
    "tree": "tree",
    "depth": "validations",
    "comparison": "comparison",
    "decoded": "decoding",
}


@pytest.fixture(scope="module")
def page() -> str:
    """A report of all parts."""
    return render_report(whole_data())


@pytest.fixture(scope="module")
def hostile() -> Page:
    """A report whose names and texts are hostile."""
    return Page(render_report(whole_data(HOSTILE)))


def test_page_has_all_sections_and_figures(page: str) -> None:
    """Each section has a heading; the tree has a group for each node, the heat map a cell for each rank."""
    found = Page(page)
    ids = {attributes.get("id") for attributes in found.named("section")}
    assert ids == {"summary", "provenance", *SECTIONS}
    assert len(found.texts["h2"]) == 9
    nodes = [one["data-node"] for one in found.named("g") if "node" in str(one.get("class")).split()]
    assert sorted(nodes) == ["0", "1", "2", "3", "4", "5"]
    heat = [one for one in found.named("td") if re.fullmatch(r"q\d", one.get("class") or "")]
    assert len(heat) == 10 * len(found.data["calibrations"][0]["levels"])
    assert all("of n = " in str(one["title"]) for one in heat)
    assert page.count(">best size</text>") == 2
    assert len([one for one in found.named("tr") if one.get("class") == "best"]) == 1
    assert "".join(found.texts["pre"][0].split()) == "".join(["return", "xN", "+", "xH!L"])


def test_policy_allows_the_one_style_and_script_by_their_hashes(page: str) -> None:
    """The hashes are those of the contents; no element has a style or an event handler, and nothing is loaded."""
    found = Page(page)
    [policy] = [
        str(one["content"]) for one in found.named("meta") if one.get("http-equiv") == "Content-Security-Policy"
    ]
    directives = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    assert directives["default-src"] == "'none'"
    [style], [_, script] = found.texts["style"], found.texts["script"]
    for name, content in (("style-src", style), ("script-src", script)):
        digest = base64.b64encode(hashlib.sha256(content.encode("utf-8")).digest()).decode()
        assert directives[name] == f"'sha256-{digest}'"
    for tag, attributes in found.elements:
        assert not [name for name in attributes if name == "style" or name.startswith("on")], tag
        assert tag not in ("link", "img", "iframe", "object", "base", "form")
        assert "src" not in attributes
        assert str(attributes.get("href", "#")).startswith("#")
    assert "url(" not in style
    assert "@import" not in style


@looped(("speedup", "slower"), [(0.93, True), (1.0, False), (2.16, False)])
def test_slower_is_a_verdict(speedup: float, slower: bool) -> None:
    """Below 1 the lead, the card, the table and the verdict say so; no figure looks like a win."""
    data = whole_data()
    del data["comparison"]
    data["validations"][0]["speedup"] = speedup
    summary = (
        render_report(data).split("<main")[0] + render_report(data).split('id="summary"')[1].split("</section>")[0]
    )
    assert ("slower than autoregressive decoding" in summary) is slower
    assert ("✗ slower" in summary) is slower
    assert (f'<span class="bad"><data value="{speedup}">' in summary) is slower


def test_hostile_names_and_texts_are_text(hostile: Page) -> None:
    """A model name, a prompt, a token and a source with tags are shown as they are, and make no element."""
    assert not hostile.named("img")
    assert hostile.comments == []
    assert hostile.texts["h1"] == [HOSTILE] == hostile.texts["title"][:1]
    assert HOSTILE in hostile.texts["pre"][0]
    assert len(hostile.texts["script"]) == 2
    assert hostile.data["decoding"]["prompt"] == HOSTILE
    assert hostile.data["calibrations"][0]["model"] == HOSTILE


def numbers_of(data: Any) -> set[float]:
    """All numbers in nested data."""
    if isinstance(data, dict):
        return set().union(*map(numbers_of, data.values()), set())
    if isinstance(data, list):
        return set().union(*map(numbers_of, data), set())
    return {data} if isinstance(data, (int, float)) and not isinstance(data, bool) else set()


def test_every_number_is_in_the_data(page: str) -> None:
    """Each number has an exact value that the embedded data has, and is shown rounded by at most half a digit."""
    found = Page(page)
    known = numbers_of(found.data)
    values = [float(str(one["value"])) for one in found.named("data")]
    assert len(values) == len(found.texts["data"]) > 150
    for value, shown in zip(values, found.texts["data"], strict=True):
        assert value in known
        plain, unit = re.fullmatch(r"([\d.,-]+)( %|\u00d7| ms)?", shown).groups()  # type: ignore[union-attr]
        scale = {" %": 100, " ms": 1000}.get(unit, 1)
        digits = len(plain.partition(".")[2])
        assert abs(float(plain.replace(",", "")) - scale * value) <= 0.5000001 * 10**-digits


def cells(page: str, section: str, element: str = "tr", cell: str = "t[hd]") -> list[list[str]]:
    """The cells of each row of a section: the exact value of a number, else the text without its tags."""
    [part] = re.findall(rf'<section id="{section}"(.*?)</section>', page, re.S)
    exact = re.sub(r'<data value="([^"]*)">.*?</data>', r"\1", part)
    rows = re.findall(rf"<{element}\b[^>]*>(.*?)</{element}>", exact, re.S)
    return [
        [
            " ".join(re.sub(r"<[^>]*>", "", text).split())
            for text in re.findall(rf"<{cell}\b[^>]*>(.*?)</{cell}>", row, re.S)
        ]
        for row in rows
    ]


def test_summary_has_its_figures_in_their_places(page: str) -> None:
    """The cards and the row of the validation, typed by hand."""
    assert cells(page, "summary", "div", "d[td]")[:5] == [
        ["tokens per step, measured", "2.24"],
        ["tokens per step, predicted", "2.2398"],
        ["speedup", "1.792"],
        ["verdict", "\u2713 lossless"],
        ["nodes, 3 levels deep", "6"],
    ]
    assert cells(page, "summary")[1:] == [
        ["tree of 6 nodes", "6", "2.2398", "2.24", "1.25", "1.792 (1.7 to 1.9)", "7", "\u2713 lossless"]
    ]
    [lead] = re.findall(r'<p class="lead">(.*?)</p>', page, re.S)
    assert re.findall(r'data value="([^"]*)"', lead) == ["1.792", "2.24"]
    words = " ".join(re.sub(r"<[^>]*>", "", lead).split())
    assert words == (
        "\u2713 lossless Fastest: tree of 6 nodes, 1.79\u00d7 as fast as autoregressive decoding, "
        "with 2.24 tokens per step, measured on 7 texts."
    )


def test_tables_have_their_figures_in_their_places(page: str) -> None:
    """Sizes, intervals, depths and methods, typed by hand."""
    sizes = cells(page, "sizes")
    assert sizes[2] == ["6 best", "2.231", "2.11 to 2.35", "2.02 to 2.44", "1.25", "1.7848"]
    assert sizes[3] == ["12", "2.4", "2.2 to 2.6", "2.1 to 2.7", "2.0", "1.2"]
    assert cells(page, "intervals")[1] == [
        "Medusa heads, static trees",
        "6",
        "2.231",
        "",
        "2.11 to 2.35",
        "2.02 to 2.44",
    ]
    assert cells(page, "depth")[1:] == [["1", "", "0.71", "0.7"], ["2", "", "0.36", "0.37"], ["3", "", "0.17", "0.16"]]
    bars = re.findall(r'class="fill" width="([^"]*)".*?<line x1="([^"]*)" x2="([^"]*)"', page)
    assert bars == [("71.00", "70.00", "70.00"), ("36.00", "37.00", "37.00"), ("17.00", "16.00", "16.00")]
    assert cells(page, "comparison")[1:] == [
        ["autoregressive", "1", "1.0", "91.5", "1.0", "\u2713 yes"],
        ["medusa", "16", "2.51", "91.5", "1.83 (1.7 to 1.95)", "\u2717 4 of 5"],
        ["model", "left out: no draft model was given"],
    ]
    assert cells(page, "tree")[4] == ["4", "0, 1", "0.1"]


def test_heat_map_has_its_shares_in_their_places(page: str) -> None:
    """Level by level and rank by rank the shares and counts of the traces, counted one by one."""
    calibration = stretches(1)
    maps = cells(page, "accuracy")
    shares, counts = maps[1:4], maps[5:8]
    for level in range(3):
        seen = [int(rank) for rank in calibration.ranks[:, level] if rank != NONE]
        hits = [sum(rank == one for rank in seen) for one in range(10)]
        assert shares[level][0] == counts[level][0] == str(level + 1)
        assert [float(one) for one in shares[level][1:]] == [one / len(seen) for one in hits]
        assert [int(one.split()[0]) for one in counts[level][1:]] == [len(seen), *hits]


def grown(nodes: int) -> Tree:
    """A tree of many nodes with falling values."""
    paths = random_tree(3, nodes=nodes, depth=6, ranks=12).paths
    return Tree(paths, tuple(math.prod(0.6 / (1 + rank) for rank in path) for path in paths))


@pytest.mark.slow
def test_large_tree_has_its_true_counts() -> None:
    """The picture has the 400 likeliest nodes; its heading counts all nodes, depths and leaves."""
    tree = grown(3001)
    data = json.loads(json.dumps(report_data(ReportInputs(plan=("tree.yaml", tree)))))
    page = render_report(data)
    leaves = len(set(tree.paths) - {path[:-1] for path in tree.paths})
    title = f"3,001 nodes, depth 6, {leaves:,} leaves"
    assert f"{title} (400 drawn)" in page
    figure = page[page.index('<svg xmlns="http://www.w3.org/2000/svg" class="treeopt-tree"') :].partition("</svg>")[0]
    tooltips = re.findall("path (.*?), rank .*?</title><circle", figure)
    whole = render_svg(tree, title, with_style=False, name="tree", most=400)
    assert tooltips == re.findall("path (.*?), rank .*?</title><circle", whole)
    assert len(tooltips) == 399
    assert '>The 399 likeliest of <data value="3000">3,000</data> paths.<' in page
    assert len(page.encode()) < 400_000
    assert render_report(Page(page).data) == page


def test_page_is_made_of_its_data_alone(page: str) -> None:
    """The embedded data gives the same page again, byte for byte."""
    assert render_report(Page(page).data) == page


@looped("part", PARTS)
def test_page_without_a_part_lacks_its_sections(part: str) -> None:
    """A missing input leaves out its sections, and no others."""
    data = whole_data()
    del data[part]
    ids = {str(one.get("id")) for one in Page(render_report(data)).named("section")}
    left_out = {name for name, needed in SECTIONS.items() if needed == part}
    assert ids == {"summary", "provenance", *SECTIONS} - left_out


@looped(
    ("change", "words"),
    [
        ({}, "\u2713 lossless"),
        ({"lossless": False}, "\u2717 not lossless"),
        ({"lossless": None, "acceptance": "sample"}, "not tested"),
        ({"lossless": False, "lossy": True, "acceptance": "typical"}, "lossy by design (typical acceptance)"),
    ],
)
def test_verdict(change: dict[str, Any], words: str) -> None:
    """The verdict is that of the validation."""
    result = ValidationResult.model_validate({**VALIDATION, **change})
    page = render_report(report_data(ReportInputs(validations=[("v.json", result)])))
    assert page.count(words) == 3
    assert ("equal greedy decoding token for token" in page) == (not change)


def test_page_is_small_enough_to_send() -> None:
    """The whole report has less than 200,000 bytes."""
    assert len(render_report(whole_data()).encode()) < 200_000


@looped(
    ("sources", "first"),
    [
        ({"head": 2, "n-gram": 0}, "n-gram"),
        ({"head": 0, "lookup": 0}, "head"),
        ({"draft model": None}, "draft model"),
        ({}, "unknown"),
    ],
)
def test_first_source(sources: dict[str, int | None], first: str) -> None:
    """The best place counts, then the order of collection."""
    assert first_source(sources) == first


def test_first_sources_are_counted() -> None:
    """The legend's counts are those of the accepted drafts."""
    assert whole_data()["decoding"]["first_source"] == {"n-gram": 1, "head": 1, "lookup": 1}


def test_embedded_data_is_json_without_tags(page: str) -> None:
    """The data has none of the characters that HTML reads."""
    [embedded] = re.findall(r'id="report-data">(.*?)</script>', page, re.S)
    assert not set("<>&") & set(embedded)
    assert json.loads(embedded)["schema"] == "treeopt.report/1"


def point(nodes: int, value: float, sampling: Any, prediction: Any) -> dict[str, Any]:
    """A point of a curve."""
    return {"nodes": nodes, "tokens_per_step": value, "sampling": sampling, "prediction": prediction}


def test_intervals_are_on_one_axis() -> None:
    """Of a curve the size of the tree, else its best, else its largest; the axis is from 1.5 to 2.5."""
    points = [point(4, 1.6, [1.58, 1.7], [1.55, 1.8]), point(8, 2.0, [1.9, 2.1], [1.8, 2.2])]
    other = [point(2, 1.9, [1.85, 1.95], [1.8, 2.0]), point(16, 2.25, [2.2, 2.3], [2.15, 2.45])]
    curves = [{"kind": "static", "best": 4, "points": points}, {"kind": "per step", "best": None, "points": other}]
    data = {"calibrations": [{"label": "heads", "curves": curves}]}
    rows = interval_rows(data)
    assert [(row["name"], row["nodes"]) for row in rows] == [("heads, static trees", 4), ("heads, per step trees", 16)]
    assert [row["places"] for row in rows] == [
        {"sampling": ["8.00", "20.00"], "prediction": ["5.00", "30.00"], "middle": "10.00"},
        {"sampling": ["70.00", "80.00"], "prediction": ["65.00", "95.00"], "middle": "75.00"},
    ]
    assert [row["nodes"] for row in interval_rows({**data, "tree": {"nodes": 8}})] == [8, 16]
    for one in points:
        one["prediction"] = None
    assert [row["name"] for row in interval_rows(data)] == ["heads, per step trees"]
    assert interval_rows({}) == []


def test_headline_is_the_fastest_plan() -> None:
    """Of measured plans the fastest that is lossless; without any, the best size by the profile; else tokens alone."""
    data = whole_data()
    best = headline(data)
    assert best is not None
    assert (best["plan"], best["speedup"], best["tokens"]) == ("tree of 6 nodes", 1.792, 2.24)
    data["comparison"]["rows"][1]["lossless"] = True
    best = headline(data)
    assert best is not None
    assert (best["plan"], best["speedup"], best["tokens"]) == ("medusa, 16 nodes", 1.83, 2.51)
    data["validations"][0] |= {"speedup": 9.0, "lossless": False}
    best = headline(data)
    assert best is not None
    assert best["plan"] == "medusa, 16 nodes", "what is not lossless comes last"
    del data["comparison"]
    best = headline(data)
    assert best is not None
    assert "by replay" in best["how"], "a lossy plan alone is no headline where steps were timed"
    del data["validations"]
    best = headline(data)
    assert best is not None
    assert (best["plan"], best["speedup"]) == ("Medusa heads, static tree of 6 nodes", 1.7848)
    assert "not decoded" in best["how"]
    page = render_report(json.loads(json.dumps(data).replace('"unit": "nodes"', '"unit": "path tokens"')))
    assert page.count('<th scope="col">path tokens<') == len(data["calibrations"][0]["curves"]) + 1
    assert "static tree of 6 path tokens" in page
    assert best["lossless"] is None
    for part in ("calibrations", "profile"):
        del data[part]
    assert headline(data) is None
    assert 'id="verdict"' not in render_report(data)
    data["validations"] = [whole_data()["validations"][0] | {"speedup": None}]
    assert "<strong>tree of 6 nodes</strong>: a step decodes <strong>" in render_report(data)


def test_labels_are_words() -> None:
    """Names of files are in the provenance alone, and where two inputs are the same in words."""
    page = render_report(whole_data())
    shown = re.sub(r"<(script|style).*?</\1>", "", page.split('id="provenance"')[0], flags=re.S)
    assert not re.findall(r"\w+\.(?:safetensors|yaml|json)", shown)
    validation = ValidationResult.model_validate(VALIDATION)
    other = validation.model_copy(update={"acceptance": "typical", "batch_size": 8})
    given = [("a.json", validation), ("b.json", validation), ("c.json", other)]
    labels = [one["label"] for one in report_data(ReportInputs(validations=given))["validations"]]
    assert labels == [
        "tree of 6 nodes (a.json)",
        "tree of 6 nodes (b.json)",
        "tree of 6 nodes, typical acceptance, batch 8",
    ]


def test_heat_is_the_root_of_the_share() -> None:
    """Ten classes: 0, 0.01, 0.25, 0.81 and 1 are 0, 1, 5, 9 and 9."""
    assert [heat(share) for share in (0.0, 0.01, 0.25, 0.81, 1.0)] == [0, 1, 5, 9, 9]


def test_panels_by_hand() -> None:
    """Each panel adds its height, and long headings are cut."""
    for count in (1, 3):
        figure = chart_figure([Panel("x", "y", [Series("one", [1], [1.0])])] * count, "a" * 64)
        assert figure.get_suptitle() == "a" * 64
        assert len(figure.axes) == count
        assert figure.get_size_inches().tolist() == pytest.approx([6.6, (2.5 + 0.2) * count + 0.16])
    assert titled_figure(3.5, "a" * 129).get_suptitle() == "a" * 64 + "\n" + "a" * 63 + "…"
    assert titled_figure(3.5, "a", "b\n" + "c " * 60).get_supxlabel().count("\n") == 2, "the note is wrapped"


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
    assert tokens[0]["words"] == "the base model's own token"
    assert tokens[1]["words"] == "accepted draft: text rank 3, n-gram rank 1"
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
    bars = [Bar("a", 2.0, 1.5, 1.25, 2.0, True), Bar("b", 2.0, None, None, None, False)]
    [axes] = bars_figure(bars, "t").axes
    first, second = axes.patches
    assert (first.get_width(), second.get_width()) == (1.5, 0.0)
    assert first.get_facecolor() != second.get_facecolor()
    assert axes.get_xlim() == (0.0, pytest.approx(2 / (1 - 23 * 0.075 / (8.0 - 0.4 - 0.075))))  # room for 23 characters
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
