"""The inputs of a report: read, and checked to be of one model and its drafters, before any figure is made.

Files that do not name what they were made with, such as published trees and results of before `made_with`, pass.
"""

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from treeopt.calibration import Calibration
from treeopt.defaults import HEADS, KINDS, ONE_NODE
from treeopt.errors import Code, TreeoptError
from treeopt.files.calibrations import load_calibration
from treeopt.files.profiles import load_profile
from treeopt.files.results import ComparisonResult, DecodingResult, MadeWith, ValidationResult, load_result
from treeopt.files.trees import load_plan, plan_id
from treeopt.optimize.budget import check_priced
from treeopt.optimize.curve import Timing, calibration_curve
from treeopt.policy import Plan
from treeopt.progress import Progress, silent
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
    plan, profile, comparison, decoding = (
        next(iter(named[name]), None) for name in ("tree", "profile", "comparison", "decoding")
    )
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
        raise TreeoptError(
            Code.FILE_INVALID,
            f"{path} is of another tree than {tree}{sizes}",
            at=path,
            why="the first validation is the headline of the report, beside the figures of its tree",
            fix=f"give that of the tree first: treeopt validate --tree {tree} --json > validate.json",
        )
