"""The data of a report: its inputs, and everything that the page shows, as one JSON object that is embedded in it.

`treeopt.view.report` makes the page of this object alone, so that no number on the page can differ from the data.
Inputs are checked to be of one model and its drafters, before any figure is made. Files that do not name what they were
made with, such as published trees and results of before `made_with`, pass.
"""

import contextlib
import functools
import re
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from treeopt.calibration import Calibration
from treeopt.defaults import HEADS, KINDS, NODES, ONE_NODE, PATH_TOKENS
from treeopt.errors import Code, TreeoptError, counted
from treeopt.files.calibrations import load_calibration
from treeopt.files.configurations import KEY, command_lines
from treeopt.files.profiles import load_profile
from treeopt.files.results import ComparisonResult, DecodingResult, MadeWith, ValidationResult, load_result, plain
from treeopt.files.trees import load_plan, plan_id
from treeopt.latency import LatencyProfile
from treeopt.optimize.budget import check_priced
from treeopt.optimize.curve import Curve, CurvePoint, Timing, calibration_curve
from treeopt.optimize.intervals import LEVEL
from treeopt.policy import Plan, TreePolicy
from treeopt.progress import Progress, silent
from treeopt.version import VERSION
from treeopt.view.scene import drawn_nodes

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
        "curves": [
            {"kind": kind, **vars(curve), "points": [*map(_point, curve.points)]} for kind, curve in one.curves.items()
        ],
        **_origin(one.name, vars(made), "provenance"),
    }


_INTERVALS = ("sampling", "prediction", "overhead_quartiles")  # of the points of a curve


def _point(point: CurvePoint) -> dict[str, Any]:
    """The figures of a size, with intervals as lists of their ends."""
    ends = {name: [one.low, one.high] if (one := getattr(point, name)) else None for name in _INTERVALS}
    return {**vars(point), **ends}


def _plan(name: str, plan: Plan) -> dict[str, Any]:
    shared = {
        "file": name,
        "unit": plan.unit if isinstance(plan, TreePolicy) else NODES,
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
        "unit": PATH_TOKENS if profile.path_tokens else NODES,
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


def first_source(sources: Mapping[str, int | None]) -> str:
    """The source that has a draft at the best place of its list; of equal places the one that is collected first."""
    if not sources:
        return "unknown"
    return min(sources, key=lambda name: sources[name] or 0)  # min keeps the first of equal ones


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


_LOADERS: dict[str, Callable[[str], Any]] = {
    "calibrations": load_calibration,
    "tree": load_plan,
    "profile": load_profile,
    "validation": functools.partial(load_result, schema=ValidationResult),
    "comparison": functools.partial(load_result, schema=ComparisonResult),
    "decoding": functools.partial(load_result, schema=DecodingResult),
}
INPUTS = tuple(_LOADERS)

Made = tuple[str, MadeWith]  # a file, and what it was made with


def report_inputs(
    paths: Mapping[str, Sequence[str]], title: str = "", *, largest: int, progress: Progress = silent
) -> ReportInputs:
    """Read the files of each of `INPUTS`, check that they belong together, and measure curves up to `largest` nodes.

    Raises:
        TreeoptError: of the loaders; E220, E221, E223 and E203 where inputs are of different models, drafters or trees;
            E223 where the profile is of a drafter that no calibration is of, E230 where it lacks a size.
    """
    read = {name: [(path, load(path)) for path in paths[name]] for name, load in _LOADERS.items()}
    _check_origins(read)
    if read["tree"] and read["validation"]:
        _check_headline(*read["tree"][0], *read["validation"][0])
    timing = Timing(read["profile"][0][1]) if read["profile"] else None
    if timing is not None:
        timing.seconds(ONE_NODE)
        known = [one for _, one in read["calibrations"]]
        if known and not any(_priced(timing, one, kind) for one in known for kind in KINDS):
            check_priced(timing.profile, known[0], timing.profile.kind or KINDS[0])
    # Files have their names on the page without folders, which say nothing to the reader.
    named = {name: [(Path(path).name, one) for path, one in files] for name, files in read.items()}
    single = ("tree", "profile", "comparison", "decoding")
    plan, profile, comparison, decoding = (next(iter(named[name]), None) for name in single)
    traced = []
    for name, one in named["calibrations"]:
        curves = {}
        for kind in KINDS if one.steps is not None else KINDS[:1]:
            timed = timing if _priced(timing, one, kind) else None
            curves[kind] = calibration_curve(one, timed, kind=kind, largest=largest, progress=progress)
        traced.append(Traced(name, one, curves))
    return ReportInputs(title, traced, plan, profile, named["validation"], comparison, decoding)


def _priced(timing: Timing | None, calibration: Calibration, kind: str) -> bool:
    """Whether there is a profile, and it is of trees of this kind from the calibration."""
    with contextlib.suppress(TreeoptError):
        if timing is not None:
            check_priced(timing.profile, calibration, kind)
            return True
    return False


def _made(file: str, source: Mapping[str, Any], drafter_id: str | None = None) -> Made:
    """What a file with this source was made with; older files do not state the dtype, which was float32."""
    texts = {name: str(source.get(name) or "") for name in ("model", "model_id", "dtype", "heads_id")}
    return file, MadeWith(**{**texts, "dtype": texts["dtype"] or "float32"}, drafter_id=drafter_id)


def _check_origins(read: Mapping[str, Sequence[tuple[str, Any]]]) -> None:
    """Raise E220, E221 and E223 where a calibration holds no text, or inputs are of different models or drafters.

    The id of a base differs between dtypes, as the weights do, so only ids of the same dtype are compared. A result
    must be of the heads of a calibration, tree or profile. The tree must be of the drafter of a calibration, and a
    result of one of these, or without them of the tree's.
    """
    traced, planned = [], []
    for path, one in read["calibrations"]:
        if not one.positions:
            raise TreeoptError(Code.CALIBRATION_INVALID, f"{path} holds no text", at=path, fix="leave it out")
        source = {**vars(one.provenance), "dtype": one.provenance.settings.get("dtype")}
        traced.append(_made(path, source, one.provenance.drafter_id))
    for path, one in read["tree"]:
        planned.append(_made(path, one.source.get("calibration") or {}, one.drafter))
    timed = [_made(path, one.provenance) for path, one in read["profile"] if not one.provenance.get("modelled")]
    results = [(path, one.made_with) for name in INPUTS[3:] for path, one in read[name] if one.made_with]
    # Validations after the first are rows of the table, which may be of other trees and drafters.
    others = {path for path, _ in read["validation"][1:]}
    drafters = {made.drafter_id for _, made in traced or planned}
    heads = {made.heads_id: (file, made) for file, made in (*traced, *planned, *timed) if made.heads_id}
    bases: dict[str, Made] = {}
    for file, made in (*traced, *planned, *timed, *results):
        first = bases.setdefault(made.dtype, (file, made)) if made.model_id else (file, made)
        if made.model_id != first[1].model_id:
            raise _other_model(first, (file, made), "models", "model_id")
        if heads and made.heads_id and made.heads_id not in heads:
            raise _other_model(next(iter(heads.values())), (file, made), "heads", "heads_id")
        if drafters and made.drafter_id not in (None, *drafters) and file not in others:
            shown = ", ".join(sorted(drafter or HEADS for drafter in drafters))
            what = f"{file} is of drafter {made.drafter_id or HEADS}, and the other inputs are of {shown}"
            fix = "give the calibration of its drafter, or leave it out"
            raise TreeoptError(Code.DRAFTER_MISMATCH, what, at=file, fix=fix)


def _other_model(first: Made, other: Made, what: str, name: str) -> TreeoptError:
    return TreeoptError(
        Code.CALIBRATION_MISMATCH,
        f"{first[0]} and {other[0]} are of different {what}",
        at="\n".join(f"{file}: {made.model} ({getattr(made, name)})" for file, made in (first, other)),
        why="a report is of one model",
        fix="make a report for each model",
    )


def _check_headline(tree: str, plan: Plan, path: str, validation: ValidationResult) -> None:
    """Raise E203 where the first validation, whose figures are beside the tree's, is of another tree."""
    found = None if validation.made_with is None else validation.made_with.tree_id
    other = validation.nodes not in (None, plan.nodes) if found is None else found != plan_id(plan)
    if other:
        sizes = f", of {validation.nodes} nodes, and {tree} has {plan.nodes}" if validation.nodes != plan.nodes else ""
        what = f"{path} is of another tree than {tree}{sizes}"
        why = "the first validation is the headline of the report, beside the figures of its tree"
        fix = f"give that of the tree first: treeopt validate --tree {tree} --json > validate.json"
        raise TreeoptError(Code.FILE_INVALID, what, at=path, why=why, fix=fix)
