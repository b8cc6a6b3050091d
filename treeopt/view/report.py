"""A report as one HTML file that needs nothing else: no network, no other file.

The page is made of its data alone (`treeopt.view.report_data`), which it contains as JSON. Its
Content-Security-Policy allows one style sheet and one script, both by their hashes; text from files and models is
escaped by jinja2. Equal data gives equal bytes where the versions of matplotlib and jinja2 are equal.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import importlib.resources
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from treeopt.defaults import HEADS, KINDS
from treeopt.errors import counted
from treeopt.optimize.intervals import Interval
from treeopt.tree import Tree
from treeopt.view.charts import AXES, Panel, Series, bar_of, render_bars, render_chart
from treeopt.view.report_data import PARTS, first_source
from treeopt.view.scene import visible
from treeopt.view.svg import STYLE, render_svg
from treeopt.view.themed import inline_svg

if TYPE_CHECKING:
    from markupsafe import Markup


HEAT_CLASSES = 10  # q0 .. q9 of the style sheet
# Sources of drafts: class of the style sheet and letter, in the order in which candidates are collected.
SOURCES = {
    "head": ("head", "H"),
    "LM head": ("lm", "M"),
    "draft model": ("draft", "D"),
    "n-gram": ("ngram", "N"),
    "frequent": ("frequent", "F"),
    "lookup": ("lookup", "L"),
    "text": ("text", "T"),
    "drafter": ("other", "P"),
    "unknown": ("other", "?"),
}


def heat(share: float) -> int:
    """The class of a share in a heat map: by the square root, which spreads small ones."""
    return min(HEAT_CLASSES - 1, int(HEAT_CLASSES * share**0.5))


def curve_svg(calibrations: Sequence[Mapping[str, Any]]) -> Markup | None:
    """Tokens per step and, where it is known, speedup by nodes: a line for each calibration and kind of tree."""
    curves = [(curve_name(one, curve), curve) for one in calibrations for curve in one["curves"]]
    if not curves:
        return None
    best = [curve["best"] for _, curve in curves if curve["best"] is not None]
    units = {curve["unit"] for _, curve in curves}
    axis = AXES[units.pop()] if len(units) == 1 else "size of the tree"
    panels = [Panel(axis, "tokens per step", list(_lines(curves, "tokens_per_step")), True, best)]
    timed = [(name, curve) for name, curve in curves if curve["best"] is not None]
    if timed:
        panels.append(Panel(axis, "speedup", list(_lines(timed, "speedup")), True, best))
    label = "Tokens per step by the size of the tree" + (", and speedup below" if timed else "")
    return _markup(render_chart(panels, "", finish=functools.partial(inline_svg, label=label)))


def curve_name(calibration: Mapping[str, Any], curve: Mapping[str, Any]) -> str:
    """`Medusa heads, static trees`."""
    return f"{calibration['label']}, {curve['kind'].replace(KINDS[1], 'per-step')} trees"


def _lines(curves: Sequence[tuple[str, Mapping[str, Any]]], figure: str) -> Iterator[Series]:
    """The lines of a figure, with intervals of tokens per step where there is one curve."""
    for name, curve in curves:
        points = [point for point in curve["points"] if point[figure] is not None]
        sizes, values = [point["nodes"] for point in points], [point[figure] for point in points]
        bands = {}
        if figure == "tokens_per_step" and len(curves) == 1:
            ends = [point["prediction"] for point in points]
            bands["_interval"] = [None if one is None else Interval(*one) for one in ends]
        yield Series(name, sizes, values, bands)


def headline(data: Mapping[str, Any]) -> dict[str, Any] | None:
    """The fastest plan of the inputs: what it is, its figures, its verdict, and how they were found.

    Measured plans come before those by replay and timed steps, lossy ones last; those of a comparison are left out.
    """
    found = [
        {**one, "plan": one["label"], "tokens": one["tokens_per_step"], "how": f"measured on {one['texts']} texts"}
        for one in data.get("validations", [])
    ]
    for row in data.get("comparison", {}).get("rows", []):
        if row["speedup"] is not None and row["lossless"] and row["nodes"] != 1:
            plan = row["method"] + ("" if row["nodes"] is None else f", {row['nodes']} nodes")
            verdict = {"lossless": True, "lossy": False, "acceptance": "greedy"}
            how = f"measured on {data['comparison']['texts']} texts"
            found.append({**row, **verdict, "plan": plan, "tokens": row["mean_acceptance_length"], "how": how})
    if all(one["speedup"] is None or one["lossless"] is False for one in found):
        how = "by replay of the texts and the profile's seconds, not decoded"
        for one in data.get("calibrations", []):
            for curve in one["curves"]:
                for point in (point for point in curve["points"] if point["nodes"] == curve["best"]):
                    size = counted(point["nodes"], curve["unit"].removesuffix("s"))
                    plan = f"{curve_name(one, curve).removesuffix('s')} of {size}"
                    verdict = {"lossless": None, "lossy": False, "acceptance": "greedy"}
                    found.append({**point, **verdict, "plan": plan, "tokens": point["tokens_per_step"], "how": how})
    return max(
        found, key=lambda one: (one["lossless"] is not False, one["speedup"] or 0.0, one["tokens"]), default=None
    )


def interval_rows(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Intervals of tokens per step: of each curve at the size of the tree, else at its best or largest size."""
    rows = []
    size = data["tree"]["nodes"] if "tree" in data else None
    for one in data.get("calibrations", []):
        for curve in one["curves"]:
            known = {point["nodes"]: point for point in curve["points"]}
            nodes = next((n for n in (size, curve["best"], max(known)) if n in known), max(known))
            if known[nodes]["prediction"] is not None:
                rows.append({"name": curve_name(one, curve), **known[nodes]})
    if rows:
        low = min(min(row["sampling"][0], row["prediction"][0]) for row in rows)
        high = max(max(row["sampling"][1], row["prediction"][1]) for row in rows)
        low, high = math.floor(low * 10) / 10, math.ceil(high * 10) / 10
        for row in rows:
            ends = {kind: [_share(end, low, high) for end in row[kind]] for kind in ("sampling", "prediction")}
            row |= {"places": {**ends, "middle": _share(row["tokens_per_step"], low, high)}}
    return rows


def _share(value: float, low: float, high: float) -> str:
    return f"{100 * (value - low) / max(high - low, 1e-9):.2f}"


def tree_svg(tree: Mapping[str, Any]) -> Markup | None:
    """The picture of a tree, for the script of the page; None for trees of each step."""
    if "paths" not in tree:
        return None
    drafter = "" if tree["drafter"] == HEADS else tree["drafter"]
    drawn = Tree(tree["paths"], tree["values"], drafter=drafter)
    title = f"{counted(tree['nodes'], 'node')}, depth {tree['depth']}, {counted(tree['leaves'], 'leaf')}"
    title += f" ({drawn.nodes:,} drawn)" if drawn.nodes < tree["nodes"] else ""
    return _markup(render_svg(drawn, title, with_style=False, name="tree"))


def bars_svg(comparison: Mapping[str, Any]) -> Markup | None:
    """Bars of the methods of a comparison that ran."""
    bars = [bar_of(row) for row in comparison["rows"] if row["mean_acceptance_length"] is not None]
    label = "Speedup of each method over autoregressive decoding"
    return _markup(render_bars(bars, "", finish=functools.partial(inline_svg, label=label))) if bars else None


def decoded_tokens(decoding: Mapping[str, Any]) -> list[list[dict[str, Any]]]:
    """The tokens of each step: text, visible text, class and letter of the source, and all sources in words."""
    return [
        [
            _token(text, token, None if i == 0 else sources)
            for i, (text, token, sources) in enumerate(zip(step["texts"], step["tokens"], step["sources"], strict=True))
        ]
        for step in decoding["steps"]
    ]


def _token(text: str, token: int, sources: Mapping[str, int | None] | None) -> dict[str, Any]:
    shared = {"text": text, "visible": visible(text), "token": token}
    if sources is None:
        return {**shared, "kind": "base", "letter": "", "words": "the base model's own token"}
    kind, letter = SOURCES.get(first_source(sources), SOURCES["unknown"])
    parts = [name if rank is None else f"{name} rank {rank}" for name, rank in sources.items()]
    words = f"accepted draft: {', '.join(parts) or 'source not known'}"  # such as `n-gram rank 0, head rank 2`
    return {**shared, "kind": kind, "letter": letter, "words": words}


def source_legend(decoding: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The sources that were first for a draft, with their numbers of drafts."""
    counts = decoding["first_source"]
    names = [name for name in SOURCES if name in counts] + [name for name in counts if name not in SOURCES]
    known = [(name, *SOURCES.get(name, SOURCES["unknown"])) for name in names]
    return [{"name": name, "kind": kind, "letter": letter, "count": counts[name]} for name, kind, letter in known]


def _markup(svg: str) -> Markup:
    from markupsafe import Markup

    return Markup(svg)


NONE = "\u2013"  # a dash


def number(value: float | None, digits: int = 3) -> Any:
    """A number with so many digits; a dash for None. Whole numbers have no digits."""
    return _data(value, digits=0 if isinstance(value, int) else digits)


def percent(value: float | None, digits: int = 1) -> Any:
    """A share in percent."""
    return _data(value, 100, digits, " %")


def _data(value: float | None, scale: int = 1, digits: int = 2, unit: str = "") -> Any:
    from markupsafe import Markup

    if value is None:
        return NONE
    return Markup('<data value="{}">{}</data>').format(repr(value), f"{scale * value:,.{digits}f}{unit}")


FILTERS: Mapping[str, Callable[..., Any]] = {
    "heat": heat,
    "number": number,
    "percent": percent,
    "times": functools.partial(_data, unit="\u00d7"),  # a speedup: `2.16x`, with the multiplication sign
    "milliseconds": functools.partial(_data, scale=1000, unit=" ms"),  # of seconds
}


_POLICY = "default-src 'none'; style-src '{style}'; script-src '{script}'; base-uri 'none'; form-action 'none'"
_ESCAPES = {ord(character): f"\\u{ord(character):04x}" for character in "<>&"}  # they would end the data's element


def render_report(data: Mapping[str, Any]) -> str:
    """The page of a report's data."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("treeopt.view", "templates")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.lstrip_blocks = environment.keep_trailing_newline = True
    environment.filters |= FILTERS
    style = _template("report.css") + STYLE + "\n"
    script = _template("report.js")
    policy = _POLICY.format(style=content_hash(style), script=content_hash(script))
    whole = {**dict.fromkeys(PARTS), **data}
    embedded = json.dumps(data, allow_nan=False, separators=(",", ":")).translate(_ESCAPES)
    head = {"style": style, "script": script, "policy": policy, "embedded": embedded}
    return environment.get_template("report.html.j2").render(data=whole, **head, **_figures(data))


def content_hash(text: str) -> str:
    """The source expression of a style sheet or a script in a Content-Security-Policy: `sha256-...`."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _template(name: str) -> str:
    return importlib.resources.files("treeopt.view.templates").joinpath(name).read_text(encoding="utf-8")


def _figures(data: Mapping[str, Any]) -> dict[str, Any]:
    """The figures and rows of the sections; None and empty lists where a section is left out."""
    calibrations, tree, decoding = data.get("calibrations", []), data.get("tree"), data.get("decoding")
    return {
        "best": headline(data),
        "curve_figure": curve_svg(calibrations),
        "intervals": interval_rows(data),
        "tree_figure": None if tree is None else tree_svg(tree),
        "bars": bars_svg(data["comparison"]) if "comparison" in data else None,
        "decoded": None if decoding is None else decoded_tokens(decoding),
        "legend": None if decoding is None else source_legend(decoding),
    }
