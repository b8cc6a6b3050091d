"""Reports for tests: every part by hand, and a parser of pages by the standard library."""

from __future__ import annotations

import json
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

from helpers import stretches

from treeopt.files.results import ComparisonResult, DecodingResult, ValidationResult
from treeopt.latency import LatencyPoint, LatencyProfile
from treeopt.optimize.curve import Curve, CurvePoint
from treeopt.optimize.intervals import Interval
from treeopt.tree import Tree
from treeopt.view.report_data import ReportInputs, Traced, report_data

HOSTILE = "</script><img src=x onerror=alert(1)><!-- ' \" &lt; {{ 7 * 7 }}"
VALIDATION: dict[str, Any] = {
    "acceptance": "greedy",
    "lossy": False,
    "lossless": True,
    "nodes": 6,
    "texts": 7,
    "tokens": 448,
    "steps": 200,
    "differing": 0,
    "tokens_per_step": 2.24,
    "predicted_tokens_per_step": 2.2398,
    "expected_tokens_per_step": 2.3,
    "num_draft_tokens": 1000,
    "num_accepted_tokens": 248,
    "acceptance_by_depth": {"measured": [0.71, 0.36, 0.17], "predicted": [0.70, 0.37, 0.16]},
    "repeats": 3,
    "batch_size": 1,
    "overhead": 1.25,
    "speedup": 1.792,
    "quartiles": {"overhead": [1.2, 1.3], "speedup": [1.7, 1.9]},
    "command": "treeopt validate --tree tree.yaml --json",
    "made_by": {"device": "cpu", "threads": "1", "dtype": "float32"},
}
_ROW = {"mean_acceptance_length": 2.51, "tokens_per_second": 91.5, "speedup": 1.83, "lossless": True, "same_texts": 4}
COMPARISON: dict[str, Any] = {
    "rows": [
        {"method": "autoregressive", "nodes": 1, **_ROW, "mean_acceptance_length": 1.0, "speedup": 1.0},
        {"method": "medusa", "nodes": 16, **_ROW, "lossless": False, "quartiles": {"speedup": [1.7, 1.95]}},
        {"method": "model", "left_out": "no draft model was given"},
    ],
    "texts": 5,
    "learned": 16,
    "repeats": 3,
    "command": "treeopt compare --json",
}
DECODING: dict[str, Any] = {
    "prompt": "def f(x):",
    "model": "pocket",
    "nodes": 6,
    "acceptance": "greedy",
    "lossy": False,
    "tokens_per_step": 2.0,
    "tokens_per_second": 123.4,
    "prompt_tokens": 4,
    "command": "treeopt generate 'def f(x):' --json",
    "steps": [
        {"tokens": [5], "texts": ["\n"], "sources": [{"base": 0}]},
        {"tokens": [6, 7], "texts": ["    return", " x"], "sources": [{"base": 0}, {"head": 2, "n-gram": 0}]},
        {
            "tokens": [8, 9, 7],
            "texts": [" +", " x", "!"],
            "sources": [{"base": 0}, {"head": 0, "lookup": 0}, {"lookup": 0}],
        },
    ],
}
PROFILE = LatencyProfile((LatencyPoint(1, 1, 64, 0.01, 0.0099, 0.0101), LatencyPoint(6, 1, 64, 0.0125, 0.012, 0.013)))
CURVE = Curve(
    (
        CurvePoint(1, 1.0, Interval(1.0, 1.0), Interval(1.0, 1.0), 0.01, 1.0, 1.0),
        CurvePoint(6, 2.231, Interval(2.11, 2.35), Interval(2.02, 2.44), 0.0125, 1.25, 1.7848),
        CurvePoint(12, 2.4, Interval(2.2, 2.6), Interval(2.1, 2.7), 0.02, 2.0, 1.2),
    ),
    best=6,
    method="joint, visits",
)
TREE = Tree(((0,), (1,), (0, 0), (0, 1), (0, 0, 0)), (0.5, 0.2, 0.25, 0.1, 0.125), source={"made_by": "a test"})


def whole_inputs(text: str = "") -> ReportInputs:
    """A report of all parts; `text` replaces model name, title, prompt and a token."""
    calibration = stretches(1)
    decoding = json.loads(json.dumps(DECODING))
    if text:
        calibration = replace(calibration, provenance=replace(calibration.provenance, model=text))
        decoding |= {"prompt": text, "model": text, "command": text}
        decoding["steps"][1]["texts"][1] = text
        decoding["steps"][1]["sources"][1] = {text: 0}
    return ReportInputs(
        title=text,
        calibrations=[Traced(text or "heads.safetensors", calibration, {"static": CURVE})],
        plan=(text or "tree.yaml", TREE),
        profile=("profile.yaml", PROFILE),
        validations=[("validate.json", ValidationResult.model_validate(VALIDATION))],
        comparison=("compare.json", ComparisonResult.model_validate(COMPARISON)),
        decoding=("generate.json", DecodingResult.model_validate(decoding)),
    )


def whole_data(text: str = "") -> dict[str, Any]:
    """The data of `whole_inputs`, as a page contains it."""
    data: dict[str, Any] = json.loads(json.dumps(report_data(whole_inputs(text))))
    return data


class Page(HTMLParser):
    """The elements of a page in order, and the texts inside each of some tags."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {
            name: [] for name in ("style", "script", "data", "pre", "h1", "title", "h2")
        }
        self.comments: list[str] = []
        self._open: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag in self.texts:
            self._open.append(tag)
            self.texts[tag].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag in self._open:
            self._open.remove(tag)

    def handle_data(self, data: str) -> None:
        for tag in self._open:
            self.texts[tag][-1] += data

    def handle_comment(self, data: str) -> None:
        self.comments.append(data)

    def named(self, tag: str) -> list[dict[str, str | None]]:
        """The attributes of all elements of a tag."""
        return [attributes for name, attributes in self.elements if name == tag]

    @property
    def data(self) -> dict[str, Any]:
        """The embedded data."""
        found: dict[str, Any] = json.loads(self.texts["script"][0])
        return found
