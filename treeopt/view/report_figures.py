"""The figures of a report, from its data: SVG for pictures and charts, rows for tables that are figures themselves."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from treeopt.optimize.intervals import Interval
from treeopt.view.bars import Bar, render_bars
from treeopt.view.chart import Panel, Series, render_chart
from treeopt.view.drawing import Drawing
from treeopt.view.inline_svg import inline_svg
from treeopt.view.report_data import first_source
from treeopt.view.svg import drawing_svg
from treeopt.view.words import visible

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
_ORDINALS = {1: "st", 2: "nd", 3: "rd"}


def heat_rows(calibration: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of a heat map: a level and its cells. Colors are by the square root, which spreads small shares."""
    return [
        {
            "trials": level["trials"],
            "cells": [
                {
                    "share": share,
                    "hits": hits,
                    "error": error,
                    "heat": min(HEAT_CLASSES - 1, int(HEAT_CLASSES * share**0.5)),
                }
                for share, hits, error in zip(level["accuracy"], level["hits"], level["standard_error"], strict=True)
            ],
        }
        for level in calibration["levels"]
    ]


def curve_svg(calibrations: Sequence[Mapping[str, Any]]) -> Markup | None:
    """Tokens per step and, where it is known, speedup by nodes: a line for each calibration and kind of tree."""
    curves = [(curve_name(one, curve), curve) for one in calibrations for curve in one["curves"]]
    if not curves:
        return None
    best = [curve["best"] for _, curve in curves if curve["best"] is not None]
    panels = [Panel("nodes (root counted)", "tokens per step", list(_lines(curves, "tokens_per_step")), True, best)]
    timed = [(name, curve) for name, curve in curves if curve["best"] is not None]
    if timed:
        panels.append(Panel("nodes (root counted)", "speedup", list(_lines(timed, "speedup")), True, best))
    label = "Tokens per step by the number of nodes" + (", and speedup below" if timed else "")
    return _markup(inline_svg(render_chart(panels, ""), "curve-", label))


def curve_name(calibration: Mapping[str, Any], curve: Mapping[str, Any]) -> str:
    """`heads-ngram, static`: the file without its suffix, and the kind of the trees."""
    return f"{calibration['file'].removesuffix('.safetensors')}, {curve['kind']}"


def _lines(curves: Sequence[tuple[str, Mapping[str, Any]]], figure: str) -> Iterator[Series]:
    """The lines of a figure, with intervals of tokens per step where there is one curve."""
    for name, curve in curves:
        points = [point for point in curve["points"] if point[figure] is not None]
        sizes, values = [point["nodes"] for point in points], [point[figure] for point in points]
        bands = [point["prediction"] for point in points] if figure == "tokens_per_step" and len(curves) == 1 else []
        yield Series(name, sizes, values, [None if band is None else Interval(*band) for band in bands])


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
    """The place of a value on an axis, in hundredths."""
    return f"{100 * (value - low) / max(high - low, 1e-9):.2f}"


def depth_rows(validation: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Share of steps that accept d drafts or more, measured and predicted, with the lengths of their bars."""
    shares = validation["acceptance_by_depth"]
    pairs = zip(shares["measured"], shares["predicted"], strict=False)
    return [
        {"measured": one, "predicted": other, "bar": f"{100 * one:.2f}", "mark": f"{100 * other:.2f}"}
        for one, other in pairs
    ]


def tree_svg(tree: Mapping[str, Any]) -> Markup | None:
    """The picture of a tree, for the script of the page; None for trees of each step."""
    if "picture" not in tree:
        return None
    return _markup(drawing_svg(Drawing.from_data(tree["picture"]), with_style=False, name="tree"))


def bars_svg(comparison: Mapping[str, Any]) -> Markup | None:
    """Bars of the methods of a comparison that ran."""
    ran = [row for row in comparison["rows"] if row["mean_acceptance_length"] is not None]
    bars = [_bar(row) for row in ran]
    label = "Speedup of each method over autoregressive decoding"
    return _markup(inline_svg(render_bars(bars, ""), "bars-", label)) if bars else None


def _bar(row: Mapping[str, Any]) -> Bar:
    low, high = row["quartiles"]["speedup"] or (row["speedup"], row["speedup"])
    figures = row["mean_acceptance_length"], row["speedup"], low, high
    return Bar(row["method"], row["nodes"] or 1, *figures, lossless=bool(row["lossless"]))


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
    name = first_source(sources)
    kind, letter = SOURCES.get(name, SOURCES["unknown"])
    return {**shared, "kind": kind, "letter": letter, "words": _in_words(sources)}


def _in_words(sources: Mapping[str, int | None]) -> str:
    """`accepted draft: n-gram 1st, head 3rd`."""
    parts = [name if rank is None else f"{name} {_ordinal(rank + 1)}" for name, rank in sources.items()]
    return f"accepted draft: {', '.join(parts) or 'source not known'}"


def _ordinal(place: int) -> str:
    suffix = "th" if place % 100 in (11, 12, 13) else _ORDINALS.get(place % 10, "th")
    return f"{place}{suffix}"


def source_legend(decoding: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The sources that were first for a draft, with their numbers of drafts."""
    counts = decoding["first_source"]
    names = [name for name in SOURCES if name in counts] + [name for name in counts if name not in SOURCES]
    known = [(name, *SOURCES.get(name, SOURCES["unknown"])) for name in names]
    return [{"name": name, "kind": kind, "letter": letter, "count": counts[name]} for name, kind, letter in known]


def _markup(svg: str) -> Markup:
    from markupsafe import Markup

    return Markup(svg)
