"""The inputs of `treeopt report`: read and checked before any figure is made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from treeopt.calibration import Calibration
from treeopt.cli.console import Console
from treeopt.cli.curve_command import measured_curve
from treeopt.cli.drafters import warn_edited
from treeopt.cli.report_checks import (
    check_calibrations,
    check_drafters,
    check_headline,
    check_models,
    origins,
    result_origins,
)
from treeopt.defaults import KINDS, ONE_NODE, REPORT_INPUTS_FILE
from treeopt.errors import Code, TreeoptError
from treeopt.files.calibrations import load_calibration
from treeopt.files.policies import load_plan
from treeopt.files.profiles import load_profile
from treeopt.files.read import leaves_folder, stays_in
from treeopt.files.results import Result, load_comparison, load_decoding, load_json, load_validation
from treeopt.latency import LatencyProfile
from treeopt.optimize.budget import check_priced
from treeopt.optimize.curve import Curve, Timing
from treeopt.view.report_data import ReportInputs, Traced

INPUTS = ("calibrations", "tree", "profile", "validation", "comparison", "decoding")
_EXAMPLE = '{"tree": "tree.yaml", "validation": ["validate.json"]}'
_FORMATS = f"{REPORT_INPUTS_FILE} is a JSON object of options and files: {_EXAMPLE}"
_BESIDE = "a folder lists files of its own"
_OPTIONS = "treeopt report --help has an option for each input"


def listed_inputs(folder: str) -> dict[str, Any]:
    """The inputs that a run folder lists, as options of the command.

    Raises:
        TreeoptError: E201 where there is no listing, E203 where it is not one, or it or what it names is in another
            folder, also through links.
    """
    file = Path(folder) / REPORT_INPUTS_FILE
    _check_link(folder, REPORT_INPUTS_FILE)
    data = load_json(file, _FORMATS)
    several = ("calibrations", "validation")
    valid = (
        isinstance(data, dict)
        and any(data.values())
        and all(
            name in INPUTS and (isinstance(value, list) if name in several else isinstance(value, str))
            for name, value in data.items()
        )
    )
    if not valid or not all(
        isinstance(one, str) for value in data.values() for one in (value if isinstance(value, list) else ())
    ):
        raise TreeoptError(
            Code.FILE_INVALID, f"{file} does not list the inputs of a report", at=str(file), why=_FORMATS
        )
    names = [one for value in data.values() for one in (value if isinstance(value, list) else [value])]
    elsewhere = next(filter(leaves_folder, names), None)
    if elsewhere is not None:
        what = f"{file} names {elsewhere!r}, which is not in its folder"
        raise TreeoptError(
            Code.FILE_INVALID,
            what,
            at=str(file),
            why=_BESIDE,
            fix=_OPTIONS,
        )
    for name in names:
        _check_link(folder, name)
    found: dict[str, Any] = {name: () if name in several else None for name in INPUTS}
    for name, value in data.items():
        found[name] = tuple(str(Path(folder) / one) for one in value) if name in several else str(Path(folder) / value)
    return found


def _check_link(folder: str, name: str) -> None:
    """Raise E203 where a file of the folder is a link out of it."""
    file = Path(folder) / name
    if not stays_in(file, Path(folder)):
        what = f"{file} is a link to another folder, or not the name of a file"
        raise TreeoptError(Code.FILE_INVALID, what, at=str(file), why=_BESIDE, fix=_OPTIONS)


def load_inputs(console: Console, options: Mapping[str, Any]) -> ReportInputs:
    """Read all inputs, check that they belong together, and measure the curves.

    Raises:
        TreeoptError: as the loaders; as `treeopt.cli.report_checks`; E223 where the profile is of a drafter that no
            calibration is of, E230 where it lacks a size.
    """
    read = [(path, load_calibration(path)) for path in options["calibrations"]]
    plan = None if options["tree"] is None else load_plan(options["tree"])
    warn_edited(console, options["tree"])
    profile = None if options["profile"] is None else load_profile(options["profile"])
    validations = [(_name(path), load_validation(path)) for path in options["validation"]]
    comparison, decoding = options["comparison"], options["decoding"]
    compared = None if comparison is None else (_name(comparison), load_comparison(comparison))
    decoded = None if decoding is None else (_name(decoding), load_decoding(decoding))
    named: list[tuple[str, Result]] = [*zip(options["validation"], (one for _, one in validations), strict=True)]
    if compared is not None:
        named.append((comparison, compared[1]))
    if decoded is not None:
        named.append((decoding, decoded[1]))
    check_calibrations(read)
    later = {*options["validation"][1:]}  # rows of the table, which may be of other trees and drafters
    check_drafters(options["tree"], plan, read, [one for one in named if one[0] not in later])
    files = origins(read, options["tree"], plan, options["profile"], profile)
    check_models([*files], [*result_origins(named)])
    if plan is not None and validations:
        check_headline(options["tree"], plan, options["validation"][0], validations[0][1])
    timing = None if profile is None else _checked_timing(profile, read)
    traced = [Traced(_name(path), one, _curves(console, one, timing, options["largest"])) for path, one in read]
    return ReportInputs(
        title=options["title"],
        calibrations=traced,
        plan=None if plan is None else (_name(options["tree"]), plan),
        profile=None if profile is None else (_name(options["profile"]), profile),
        validations=validations,
        comparison=compared,
        decoding=decoded,
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
    kinds = KINDS if calibration.steps is not None else KINDS[:1]
    return {
        kind: measured_curve(
            console,
            calibration,
            timing if timing is not None and _priced(timing.profile, calibration, kind) else None,
            kind=kind,
            largest=largest,
        )
        for kind in kinds
    }
