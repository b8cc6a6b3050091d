"""The inputs of `treeopt report`: read, and checked to be of one model and its drafters, before any figure is made.

Files that do not name what they were made with, such as published trees and results of before `made_with`, pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treeopt.calibration import Calibration
from treeopt.cli.console import Console
from treeopt.cli.curve_command import measured_curve
from treeopt.cli.drafters import warn_edited
from treeopt.defaults import HEADS, KINDS, ONE_NODE, REPORT_INPUTS_FILE
from treeopt.errors import Code, TreeoptError
from treeopt.files.calibrations import load_calibration
from treeopt.files.profiles import load_profile
from treeopt.files.read import leaves_folder, stays_in
from treeopt.files.results import (
    ComparisonResult,
    DecodingResult,
    Result,
    ValidationResult,
    load_json,
    load_result,
)
from treeopt.files.trees import load_plan, plan_id
from treeopt.latency import LatencyProfile
from treeopt.optimize.budget import check_priced
from treeopt.optimize.curve import Curve, Timing
from treeopt.policy import Plan
from treeopt.view.report_data import ReportInputs, Traced

SEVERAL = ("calibrations", "validation")
INPUTS = ("calibrations", "tree", "profile", "validation", "comparison", "decoding")
_FORMATS = (
    f"{REPORT_INPUTS_FILE} is a JSON object of options and files: "
    '{"tree": "tree.yaml", "validation": ["validate.json"]}'
)


def listed_inputs(folder: str) -> dict[str, Any]:
    """The inputs that a run folder lists, as options of the command.

    Raises:
        TreeoptError: E201 where there is no listing, E203 where it is not one, or it or what it names is in another
            folder, also through links.
    """
    file = Path(folder) / REPORT_INPUTS_FILE
    _check_inside(folder, REPORT_INPUTS_FILE, file)
    data = load_json(file, _FORMATS)
    if not (isinstance(data, dict) and any(data.values()) and all(map(_is_listed, data.items()))):
        what = f"{file} does not list the inputs of a report"
        raise TreeoptError(Code.FILE_INVALID, what, at=str(file), why=_FORMATS)
    found: dict[str, Any] = {name: () if name in SEVERAL else None for name in INPUTS}
    for name, value in data.items():
        names = value if name in SEVERAL else [value]
        for one in names:
            _check_inside(folder, one, file)
        paths = tuple(str(Path(folder) / one) for one in names)
        found[name] = paths if name in SEVERAL else paths[0]
    return found


def _is_listed(item: tuple[str, Any]) -> bool:
    name, value = item
    if name in SEVERAL:
        return isinstance(value, list) and all(isinstance(one, str) for one in value)
    return name in INPUTS and isinstance(value, str)


def _check_inside(folder: str, name: str, listing: Path) -> None:
    """Raise E203 where a name leaves the folder, by itself or through links."""
    file, what = Path(folder) / name, ""
    if leaves_folder(name):
        what = f"{listing} names {name!r}, which is not in its folder"
    elif not stays_in(file, Path(folder)):
        what = f"{file} is a link to another folder, or not the name of a file"
    if what:
        why, fix = "a folder lists files of its own", "treeopt report --help has an option for each input"
        raise TreeoptError(Code.FILE_INVALID, what, at=str(file), why=why, fix=fix)


def load_inputs(console: Console, options: Mapping[str, Any]) -> ReportInputs:
    """Read all inputs, check that they belong together, and measure the curves.

    Raises:
        TreeoptError: of the loaders; E220, E221, E223 and E203 where inputs are of different models, drafters or trees;
            E223 where the profile is of a drafter that no calibration is of, E230 where it lacks a size.
    """
    tree, profile_file, comparison, decoding = (options[name] for name in ("tree", "profile", "comparison", "decoding"))
    read = [(path, load_calibration(path)) for path in options["calibrations"]]
    plan = None if tree is None else load_plan(tree)
    warn_edited(console, tree)
    profile = None if profile_file is None else load_profile(profile_file)
    validations = [(path, load_result(path, ValidationResult)) for path in options["validation"]]
    compared = None if comparison is None else (comparison, load_result(comparison, ComparisonResult))
    decoded = None if decoding is None else (decoding, load_result(decoding, DecodingResult))
    single: list[tuple[str, Result]] = [one for one in (compared, decoded) if one is not None]
    _check_calibrations(read)
    # Validations after the first are rows of the table, which may be of other trees and drafters.
    _check_drafters(tree, plan, read, [*validations[:1], *single])
    _check_models([*_origins(read, tree, plan, profile_file, profile)], [*validations, *single])
    if plan is not None and validations:
        _check_headline(tree, plan, *validations[0])
    timing = None if profile is None else _checked_timing(profile, read)
    return ReportInputs(
        title=options["title"],
        calibrations=[
            Traced(_name(path), one, _curves(console, one, timing, options["largest"])) for path, one in read
        ],
        plan=None if plan is None else (_name(tree), plan),
        profile=None if profile is None else (_name(profile_file), profile),
        validations=[(_name(path), one) for path, one in validations],
        comparison=None if compared is None else (_name(comparison), compared[1]),
        decoding=None if decoded is None else (_name(decoding), decoded[1]),
    )


def _name(path: str) -> str:
    """The name of a file on the page, without its folders: they say nothing to the reader."""
    return Path(path).name


def _checked_timing(profile: LatencyProfile, read: Sequence[tuple[str, Calibration]]) -> Timing:
    """The profile, after checking that it has one node and is of the drafter of a calibration."""
    timing = Timing(profile)
    timing.seconds(ONE_NODE)
    if read and not any(_priced(profile, one, kind) for _, one in read for kind in KINDS):
        check_priced(profile, read[0][1], profile.kind or KINDS[0])
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


@dataclass(frozen=True)
class Origin:
    """The models that a file was made with. The id of a base is that of its weights in `dtype`; heads may be empty."""

    file: str
    model: str
    model_id: str
    dtype: str
    heads_id: str

    @classmethod
    def of(cls, file: str, source: Mapping[str, Any]) -> Origin:
        """That of a file with this source; older files do not state the dtype, which was float32."""
        texts = (str(source.get(name) or "") for name in ("model", "model_id", "dtype", "heads_id"))
        model, model_id, dtype, heads_id = texts
        return cls(file, model, model_id, dtype or "float32", heads_id)


def _origins(
    read: Sequence[tuple[str, Calibration]],
    tree: str | None,
    plan: Plan | None,
    profile_file: str | None,
    profile: LatencyProfile | None,
) -> Iterator[Origin]:
    """The models of the calibrations, of the tree and of the profile, where they name them."""
    for path, one in read:
        yield Origin.of(path, {**vars(one.provenance), "dtype": one.provenance.settings.get("dtype")})
    sources = [] if plan is None else [(str(tree), plan.source.get("calibration") or {})]
    if profile is not None and not profile.provenance.get("modelled"):
        sources.append((str(profile_file), profile.provenance))
    yield from (Origin.of(name, source) for name, source in sources if source.get("model_id"))


def _check_calibrations(read: Sequence[tuple[str, Calibration]]) -> None:
    """Raise E220 or E221 where a calibration holds no text, or they are of different models in any dtypes."""
    for path, one in read:
        if not one.positions:
            raise TreeoptError(Code.CALIBRATION_INVALID, f"{path} holds no text", at=path, fix="leave it out")
        first, made = (Origin.of(name, vars(of.provenance)) for name, of in (read[0], (path, one)))
        if made.model_id != first.model_id:
            raise _other_model(first, made, "models")


def _check_models(files: Sequence[Origin], named: Sequence[tuple[str, Result]]) -> None:
    """Raise E221 where two inputs of one dtype are of different models, or a result is of heads that no file is of.

    The id of a base differs between dtypes, as the weights do, so only ids of the same dtype are compared. Calibrations
    may be of several heads, which are then compared.
    """
    results = [Origin.of(path, one.made_with.model_dump()) for path, one in named if one.made_with is not None]
    bases: dict[str, Origin] = {}
    for one in (*files, *results):
        first = bases.setdefault(one.dtype, one)
        if one.model_id != first.model_id:
            raise _other_model(first, one, "models")
    heads = {one.heads_id: one for one in files if one.heads_id}
    for one in results:
        if heads and one.heads_id and one.heads_id not in heads:
            raise _other_model(next(iter(heads.values())), one, "heads")


def _other_model(first: Origin, other: Origin, what: str) -> TreeoptError:
    ids = [(one.model, one.heads_id if what == "heads" else one.model_id) for one in (first, other)]
    return TreeoptError(
        Code.CALIBRATION_MISMATCH,
        f"{first.file} and {other.file} are of different {what}",
        at="\n".join(f"{one.file}: {name} ({found})" for one, (name, found) in zip((first, other), ids, strict=True)),
        why="a report is of one model",
        fix="make a report for each model",
    )


def _check_drafters(
    tree: str | None, plan: Plan | None, read: Sequence[tuple[str, Calibration]], results: Sequence[tuple[str, Result]]
) -> None:
    """Raise E223 where the tree is of none of the calibrations' drafters, or a result of none of these and the tree."""
    known = {one.provenance.drafter_id for _, one in read}
    if plan is not None:
        _check_drafter(str(tree), plan.drafter, known, "the calibrations are")
        known.add(plan.drafter)
    for path, one in results:
        if one.made_with is not None and one.made_with.drafter_id is not None:
            _check_drafter(path, one.made_with.drafter_id, known, "the tree and the calibrations are")


def _check_drafter(name: str, drafter: str, known: set[str], others: str) -> None:
    if known and drafter not in known:
        shown = ", ".join(sorted(one or HEADS for one in known))
        what = f"{name} is of drafter {drafter or HEADS}, and {others} of {shown}"
        fix = "give the calibration of its drafter, or leave it out"
        raise TreeoptError(Code.DRAFTER_MISMATCH, what, at=name, fix=fix)


def _check_headline(tree: str, plan: Plan, path: str, validation: Any) -> None:
    """Raise E203 where the first validation, whose figures are beside the tree's, is of another tree."""
    made_with = validation.made_with
    found = None if made_with is None else made_with.tree_id
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
