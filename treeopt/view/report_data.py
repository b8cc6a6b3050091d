"""The data of a report: everything that the page shows, as one JSON object that is embedded in it.

`treeopt.view.report` makes the page of this object alone, so that no number on the page can differ from the data.
"""

import re
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from treeopt.calibration import Calibration
from treeopt.defaults import HEADS, KINDS
from treeopt.errors import counted
from treeopt.files.configurations import KEY, command_lines
from treeopt.files.results import ComparisonResult, DecodingResult, ValidationResult, plain
from treeopt.latency import LatencyProfile
from treeopt.optimize.curve import Curve
from treeopt.optimize.intervals import LEVEL, Interval
from treeopt.policy import Plan, TreePolicy
from treeopt.version import VERSION
from treeopt.view.layout import drawn_nodes
from treeopt.view.report_figures import first_source

SCHEMA = "treeopt.report/1"
SHOWN_RANKS = 10  # columns of a heat map
DRAWN_NODES = 400  # of a tree, the likeliest
MAX_STEPS = 400  # of a decoded text that are shown
PARTS = ("calibrations", "tree", "profile", "validations", "comparison", "decoding")  # of the data, all optional
_TITLE = "Speculative decoding with token trees"


@dataclass(frozen=True)
class Traced:
    """A calibration with the name of its file and its curves by kind of tree."""

    name: str
    calibration: Calibration
    curves: Mapping[str, Curve]


@dataclass(frozen=True)
class ReportInputs:
    """What a report is made of; every part may be missing, and at least one is there. Names are those of the files."""

    title: str = ""
    calibrations: Sequence[Traced] = ()
    plan: tuple[str, Plan] | None = None
    profile: tuple[str, LatencyProfile] | None = None
    validations: Sequence[tuple[str, ValidationResult]] = ()
    comparison: tuple[str, ComparisonResult] | None = None
    decoding: tuple[str, DecodingResult] | None = None


def report_data(inputs: ReportInputs) -> dict[str, Any]:
    """The object, in types of JSON; missing inputs have no key, and local paths are given by their last names."""
    calibrations = [_calibration(one) for one in inputs.calibrations]
    parts = (
        calibrations or None,
        None if inputs.plan is None else _plan(*inputs.plan),
        None if inputs.profile is None else _profile(*inputs.profile),
        [_result(*one) for one in inputs.validations] or None,
        None if inputs.comparison is None else _result(*inputs.comparison),
        None if inputs.decoding is None else _decoding(*inputs.decoding),
    )
    whole = {name: part for name, part in zip(PARTS, parts, strict=True) if part is not None}
    found: dict[str, Any] = without_folders(whole, commands=("command",), kept=("prompt", "steps"))
    _add_labels(found.get("calibrations", []), _drafted)
    _add_labels(found.get("validations", []), _decoded)
    return {
        "schema": SCHEMA,
        "treeopt": VERSION,
        "title": inputs.title or _title(found),
        "interval_level": LEVEL,
        **found,
    }


def _add_labels(parts: Sequence[dict[str, Any]], words: Callable[[Mapping[str, Any]], str]) -> None:
    """Add what each part is in words as its `label`, with the file where several are the same in words."""
    labels = [words(one) for one in parts]
    for one, label in zip(parts, labels, strict=True):
        one["label"] = label if labels.count(label) == 1 else f"{label} ({one['file']})"


def _drafted(calibration: Mapping[str, Any]) -> str:
    """`Medusa heads`, or `drafter ngram` by the name of its file."""
    drafter = str(calibration["provenance"].get("drafter") or calibration["drafter"])
    return "Medusa heads" if calibration["drafter"] == HEADS else f"drafter {drafter.partition('.')[0]}"


def _decoded(validation: Mapping[str, Any]) -> str:
    """`tree of 16 nodes`, with the acceptance and the batch where they are not the usual ones."""
    nodes, batch, acceptance = (validation[name] for name in ("nodes", "batch_size", "acceptance"))
    parts = ["tree" if nodes is None else f"tree of {counted(nodes, 'node')}"]
    parts += [f"{acceptance} acceptance"] * (acceptance != "greedy") + [f"batch {batch}"] * (batch > 1)
    return ", ".join(parts)


def _title(found: Mapping[str, Any]) -> str:
    """The default heading, with the model where an input names it."""
    models = [one["model"] for one in found.get("calibrations", ())]
    models += [found["decoding"]["model"]] if "decoding" in found else []
    models += [found["tree"]["source"].get("calibration", {}).get("model", "")] if "tree" in found else []
    model = next(filter(None, models), "")
    return f"{_TITLE}: {model}" if model else _TITLE


def _calibration(one: Traced) -> dict[str, Any]:
    found, made = one.calibration, one.calibration.provenance
    shown = min(SHOWN_RANKS, found.top_k)
    errors = found.standard_error(shown)
    levels = [
        {
            "trials": int(found.trials[level]),
            "hits": found.hits[level, :shown].tolist(),
            "accuracy": found.accuracy[level, :shown].tolist(),
            "standard_error": [None if error != error else error for error in errors[level].tolist()],
        }
        for level in range(found.num_heads)
    ]
    return {
        "file": one.name,
        "model": made.model,
        "heads": made.heads,
        "drafter": made.drafter_id or HEADS,
        "texts": found.sequences,
        "distinct_texts": found.distinct,
        "positions": found.positions,
        "top_k": found.top_k,
        "levels": levels,
        "curves": [{"kind": kind, **_curve(curve)} for kind, curve in one.curves.items()],
        **_origin(one.name, vars(made), "provenance"),
    }


_INTERVALS = ("sampling", "prediction", "overhead_quartiles")  # of the points of a curve


def _curve(curve: Curve) -> dict[str, Any]:
    points = [{**vars(point), **{name: _ends(getattr(point, name)) for name in _INTERVALS}} for point in curve.points]
    return {"method": curve.method, "best": curve.best, "points": points}


def _ends(interval: Interval | None) -> list[float] | None:
    return None if interval is None else [interval.low, interval.high]


def _plan(name: str, plan: Plan) -> dict[str, Any]:
    shared = {
        "file": name,
        "nodes": plan.nodes,
        "depth": plan.depth,
        "drafter": plan.drafter or HEADS,
        "expected": None if plan.expected is None else asdict(plan.expected),
        **_origin(name, plan.source, "source"),
    }
    if isinstance(plan, TreePolicy):
        return {**shared, "kind": KINDS[1], "size_cost": [list(pair) for pair in plan.size_cost]}
    drawn = [node - 1 for node in drawn_nodes(plan, DRAWN_NODES)[1:]]
    return {
        **shared,
        "kind": KINDS[0],
        "leaves": len(plan.leaves),
        "paths": [list(plan.paths[i]) for i in drawn],
        "values": None if plan.values is None else [plan.values[i] for i in drawn],
    }


def _profile(name: str, profile: LatencyProfile) -> dict[str, Any]:
    return {
        "file": name,
        "points": [asdict(point) for point in profile.points],
        **_origin(name, profile.provenance, "provenance"),
    }


def _result(name: str, found: ValidationResult | ComparisonResult | DecodingResult) -> dict[str, Any]:
    return {"file": name, **found.model_dump(mode="json")}


def _decoding(name: str, found: DecodingResult) -> dict[str, Any]:
    """The first steps of the text, the number of all, and how many drafts each source had first."""
    dumped = _result(name, found)
    steps = dumped.pop("steps")
    tokens = sum(len(step["tokens"]) for step in steps)
    firsts = [first_source(sources) for step in steps for sources in step["sources"][1:]]
    counts = {source: firsts.count(source) for source in dict.fromkeys(firsts)}
    return {
        **dumped,
        "num_steps": len(steps),
        "num_tokens": tokens,
        "num_accepted": tokens - len(steps),
        "first_source": counts,
        "steps": steps[:MAX_STEPS],
    }


def _origin(file: str, source: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Where a file comes from, under `name`, and the command that made it, if it stores one."""
    found: dict[str, Any] = plain(source)
    commands = command_lines(found.pop(KEY, {}), "-o", file)
    if found.get("drafter"):
        found["drafter"] = Path(found["drafter"]).name
    return {name: found, **({"command": commands[0]} if commands else {})}


_PART = r"[^\s'\"/\\]+"
_IN_TEXT = re.compile(
    rf"(?<![\w.~:<>/\\])(?:(?:[A-Za-z]:)?[/\\](?:{_PART}[/\\])+|(?:~\w*|\.\.)[/\\](?:{_PART}[/\\])*)({_PART})[/\\]?"
)
_WHOLE = re.compile(r"(?:[A-Za-z]:)?[/\\]|(?:~\w*|\.\.)(?:[/\\]|$)")


def without_folders(data: Any, *, commands: Collection[str] = (), kept: Collection[str] = ()) -> Any:
    """Nested data with the last names of local paths, in `commands` of each word; values of `kept` stay as they are."""
    if isinstance(data, str):
        return last_name(data)
    if isinstance(data, list):
        return [without_folders(one, commands=commands, kept=kept) for one in data]
    if not isinstance(data, Mapping):
        return data
    found = {}
    for key, value in data.items():
        if key in commands and isinstance(value, str):
            value = _command(value)
        elif key not in kept:
            value = without_folders(value, commands=commands, kept=kept)
        found[last_name(key)] = value
    return found


def _command(line: str) -> str:
    try:
        return shlex.join(map(last_name, shlex.split(line)))
    except ValueError:  # not a command line: files of results are read as they are
        return last_name(line)


def last_name(text: str) -> str:
    """The last name of a local path; of other text, the text with the last names of the local paths in it."""
    name, equals, path = ("", "", text) if _WHOLE.match(text) else text.partition("=")
    if _WHOLE.match(path) and "\n" not in text and not _IN_TEXT.search(name):
        return f"{name}{equals}" + re.split(r"[/\\]", path.rstrip("/\\"))[-1]
    return _IN_TEXT.sub(r"\1", text)
