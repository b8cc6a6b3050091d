"""The inputs of `treeopt report`: read, and checked to be of one model and its drafters, before any figure is made.

Files that do not name what they were made with, such as published trees and results of before `made_with`, pass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from treeopt.calibration import Calibration
from treeopt.cli.checks import several
from treeopt.cli.console import Console
from treeopt.cli.curve_command import measured_curve
from treeopt.cli.drafters import warn_edited
from treeopt.defaults import HEADS, KINDS, ONE_NODE
from treeopt.errors import Code, TreeoptError
from treeopt.files.calibrations import load_calibration
from treeopt.files.profiles import load_profile
from treeopt.files.results import (
    ComparisonResult,
    DecodingResult,
    MadeWith,
    ValidationResult,
    load_result,
)
from treeopt.files.trees import load_plan, plan_id
from treeopt.latency import LatencyProfile
from treeopt.optimize.budget import check_priced
from treeopt.optimize.curve import Curve, Timing
from treeopt.policy import Plan
from treeopt.view.report_data import ReportInputs, Traced

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


def load_inputs(console: Console, options: Mapping[str, Any]) -> ReportInputs:
    """Read all inputs, check that they belong together, and measure the curves.

    Raises:
        TreeoptError: of the loaders; E220, E221, E223 and E203 where inputs are of different models, drafters or trees;
            E223 where the profile is of a drafter that no calibration is of, E230 where it lacks a size.
    """
    paths = {name: [path for path in several(options[name]) if path is not None] for name in INPUTS}
    read = {name: [(path, _LOADERS[name](path)) for path in paths[name]] for name in INPUTS}
    warn_edited(console, *paths["tree"])
    _check_origins(read)
    if read["tree"] and read["validation"]:
        _check_headline(*read["tree"][0], *read["validation"][0])
    calibrations = [one for _, one in read["calibrations"]]
    timing = _checked_timing(read["profile"][0][1], calibrations) if read["profile"] else None
    # Files have their names on the page without folders, which say nothing to the reader.
    named = {name: [(Path(path).name, one) for path, one in files] for name, files in read.items()}
    plan, profile, comparison, decoding = (
        next(iter(named[name]), None) for name in ("tree", "profile", "comparison", "decoding")
    )
    return ReportInputs(
        options["title"],
        [Traced(name, one, _curves(console, one, timing, options["largest"])) for name, one in named["calibrations"]],
        plan,
        profile,
        named["validation"],
        comparison,
        decoding,
    )


def _checked_timing(profile: LatencyProfile, calibrations: Sequence[Calibration]) -> Timing:
    """The profile, after checking that it has one node and is of the drafter of a calibration."""
    timing = Timing(profile)
    timing.seconds(ONE_NODE)
    if calibrations and not any(_priced(profile, one, kind) for one in calibrations for kind in KINDS):
        check_priced(profile, calibrations[0], profile.kind or KINDS[0])
    return timing


def _priced(profile: LatencyProfile, calibration: Calibration, kind: str) -> bool:
    """Whether the profile is of trees of this kind from the calibration."""
    try:
        check_priced(profile, calibration, kind)
    except TreeoptError:
        return False
    return True


def _curves(console: Console, calibration: Calibration, timing: Timing | None, largest: int) -> dict[str, Curve]:
    """The curves of a calibration, with overhead and speedup where the profile is of its trees."""
    found = {}
    for kind in KINDS if calibration.steps is not None else KINDS[:1]:
        timed = timing if timing is not None and _priced(timing.profile, calibration, kind) else None
        found[kind] = measured_curve(console, calibration, timed, kind=kind, largest=largest)
    return found


def _made(file: str, source: Mapping[str, Any], drafter_id: str | None = None) -> Made:
    """What a file with this source was made with; older files do not state the dtype, which was float32."""
    texts = {name: str(source.get(name) or "") for name in ("model", "model_id", "dtype", "heads_id")}
    return file, MadeWith(**{**texts, "dtype": texts["dtype"] or "float32"}, drafter_id=drafter_id)


def _check_origins(read: Mapping[str, Sequence[tuple[str, Any]]]) -> None:
    """Raise E220 where a calibration holds no text, E221 and E223 where inputs are of different models or drafters."""
    traced, planned, others = [], [], []
    for path, one in read["calibrations"]:
        if not one.positions:
            raise TreeoptError(Code.CALIBRATION_INVALID, f"{path} holds no text", at=path, fix="leave it out")
        source = {**vars(one.provenance), "dtype": one.provenance.settings.get("dtype")}
        traced.append(_made(path, source, one.provenance.drafter_id))
    for path, one in read["tree"]:
        planned.append(_made(path, one.source.get("calibration") or {}, one.drafter))
    for path, one in read["profile"]:
        others += [] if one.provenance.get("modelled") else [_made(path, one.provenance)]
    results = {name: read[name] for name in ("validation", "comparison", "decoding")}
    made = {name: [(path, one.made_with) for path, one in files if one.made_with] for name, files in results.items()}
    # Validations after the first are rows of the table, which may be of other trees and drafters.
    headline = [one for one in made["validation"] if one[0] == results["validation"][0][0]]
    _check_drafters(traced, planned, [*headline, *made["comparison"], *made["decoding"]])
    sources = [one for one in (*traced, *planned, *others) if one in traced or one[1].model_id]
    _check_models(traced, sources, [one for files in made.values() for one in files])


def _check_models(traced: Sequence[Made], sources: Sequence[Made], results: Sequence[Made]) -> None:
    """Raise E221 where two inputs of one dtype are of different models, or a result is of heads that no file is of.

    The id of a base differs between dtypes, as the weights do, so only ids of the same dtype are compared; calibrations
    are of one dtype, but may be of several heads, which are then compared.
    """
    bases: dict[str, Made] = {}
    of_one = [*(("", one) for one in traced), *((one[1].dtype, one) for one in (*sources, *results))]
    for dtype, one in of_one:
        first = bases.setdefault(dtype, one)
        if one[1].model_id != first[1].model_id:
            raise _other_model(first, one, "models", "model_id")
    heads = {one[1].heads_id: one for one in sources if one[1].heads_id}
    for one in results:
        if heads and one[1].heads_id and one[1].heads_id not in heads:
            raise _other_model(next(iter(heads.values())), one, "heads", "heads_id")


def _other_model(first: Made, other: Made, what: str, name: str) -> TreeoptError:
    return TreeoptError(
        Code.CALIBRATION_MISMATCH,
        f"{first[0]} and {other[0]} are of different {what}",
        at="\n".join(f"{file}: {made.model} ({getattr(made, name)})" for file, made in (first, other)),
        why="a report is of one model",
        fix="make a report for each model",
    )


def _check_drafters(traced: Sequence[Made], planned: Sequence[Made], results: Sequence[Made]) -> None:
    """Raise E223 where the tree is of none of the calibrations' drafters, or a result of none of these and the tree."""
    known = {one.drafter_id for _, one in traced or planned}
    for file, one in (*planned, *results):
        if known and one.drafter_id is not None and one.drafter_id not in known:
            shown = ", ".join(sorted(drafter or HEADS for drafter in known))
            what = f"{file} is of drafter {one.drafter_id or HEADS}, and the other inputs are of {shown}"
            fix = "give the calibration of its drafter, or leave it out"
            raise TreeoptError(Code.DRAFTER_MISMATCH, what, at=file, fix=fix)


def _check_headline(tree: str, plan: Plan, path: str, validation: ValidationResult) -> None:
    """Raise E203 where the first validation, whose figures are beside the tree's, is of another tree."""
    found = None if validation.made_with is None else validation.made_with.tree_id
    other = validation.nodes not in (None, plan.nodes) if found is None else found != plan_id(plan)
    if other:
        sizes = f", of {validation.nodes} nodes, and {tree} has {plan.nodes}" if validation.nodes != plan.nodes else ""
        raise TreeoptError(
            Code.FILE_INVALID,
            f"{path} is of another tree than {tree}{sizes}",
            at=path,
            why="the first validation is the headline of the report, beside the figures of its tree",
            fix=f"give that of the tree first: treeopt validate --tree {tree} --json > validate.json",
        )
