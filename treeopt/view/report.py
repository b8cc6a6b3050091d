"""A report as one HTML file that needs nothing else: no network, no other file.

The page is made of its data alone (`treeopt.view.report_data`), which it contains as JSON. Its
Content-Security-Policy allows one style sheet and one script, both by their hashes; text from files and models is
escaped by jinja2. Equal data gives equal bytes where the versions of matplotlib and jinja2 are equal.
"""

import base64
import hashlib
import importlib.resources
import json
from collections.abc import Mapping
from typing import Any

from treeopt.view.report_data import PARTS
from treeopt.view.report_figures import (
    FILTERS,
    bars_svg,
    curve_svg,
    decoded_tokens,
    headline,
    interval_rows,
    source_legend,
    tree_svg,
)
from treeopt.view.svg import STYLE

_TEMPLATES = "treeopt.view.templates"
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
    return importlib.resources.files(_TEMPLATES).joinpath(name).read_text(encoding="utf-8")


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
