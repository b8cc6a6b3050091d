"""What the options of `treeopt plan` name: shapes, devices, drafters and measured steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from treeopt.cli.checks import check_apart, check_belongs, given
from treeopt.cli.console import Console
from treeopt.defaults import ATTENTIONS, HEADS, MODEL, MODEL_NGRAM, ONE_NODE
from treeopt.errors import counted
from treeopt.plan.devices import BYTES, Device, device_of_spec, device_preset
from treeopt.progress import late
from treeopt.shape import Drafting, ModelShape, shape_error
from treeopt.version import VERSION

if TYPE_CHECKING:
    from treeopt.calibration import Calibration
    from treeopt.drafter import Drafter
    from treeopt.latency import LatencyProfile
    from treeopt.plan.fit import EfficiencyFit, MeasuredSteps
    from treeopt.plan.planner import PlanCandidate
    from treeopt.plan.step_model import Efficiency, StepModel


def chosen_device(options: Mapping[str, Any]) -> Device:
    """The device of --device-preset or --device-spec; a usage error unless there is exactly one."""
    preset, spec = options["device_preset"], options["device_spec"]
    if (preset is None) == (spec is None):
        raise click.UsageError("give either --device-preset or --device-spec (--presets lists the devices)")
    return device_preset(preset) if spec is None else device_of_spec(spec)


def fitted_efficiency(files: Sequence[str], device: Device) -> tuple[Efficiency, EfficiencyFit | None]:
    """The efficiency that is fitted to the profiles of --fit; the bare formulas without."""
    from treeopt.files.profiles import load_profile
    from treeopt.plan.fit import fit_efficiency
    from treeopt.plan.step_model import Efficiency

    if not files:
        return Efficiency(), None
    fit = fit_efficiency([measured(load_profile(file), file, device) for file in files])
    return fit.efficiency, fit


def measured(profile: LatencyProfile, file: str, device: Device) -> MeasuredSteps:
    """A measured profile with the model and heads that its provenance names."""
    from treeopt.models.config_shapes import heads_drafting
    from treeopt.models.shapes import model_shape
    from treeopt.plan.fit import MeasuredSteps
    from treeopt.plan.operators import StepSetting
    from treeopt.plan.step_model import StepModel

    source = profile.provenance
    fault, why = _unusable(source)
    if fault:
        fix = "--fit: a file of treeopt profile, with heads or n-grams, in one of these dtypes: " + ", ".join(BYTES)
        raise shape_error(f"{file} {fault}", at=f"--fit {file}", why=why, fix=fix)
    shape = model_shape(source["model"])
    heads = source.get("heads", "") if source.get("drafter_name", HEADS).startswith(HEADS) else ""
    drafting = heads_drafting(heads, shape) if heads else Drafting()
    attention = ATTENTIONS[0] if source.get("attention") == ATTENTIONS[0] else ATTENTIONS[1]
    setting = StepSetting(source["dtype"], attention=attention)
    return MeasuredSteps(profile, StepModel(shape, device, setting, drafting))


def _unusable(source: Mapping[str, Any]) -> tuple[str, str]:
    """Why a profile of this provenance cannot be fitted, and the reason; empty where it can."""
    if source.get("modelled"):
        return "was modelled", "the model is fitted to measured steps"
    if not source.get("model"):
        return "names no model", "the model is fitted to measured steps of a known shape"
    if source.get("drafter_name") in (MODEL, MODEL_NGRAM):
        return "is of a draft model", "the shape of the draft model, whose forwards the steps contain, is not in it"
    if source.get("dtype") not in BYTES:
        found = source.get("dtype")
        return f"has the dtype {found}" if found else "has no dtype", "FLOP/s and bytes follow from the dtype"
    return "", ""


def chosen_drafting(options: Mapping[str, Any], shape: ModelShape) -> Drafting:
    """The drafting that the options name; none by default."""
    from treeopt.models.config_shapes import heads_drafting
    from treeopt.models.shapes import model_shape

    check_apart("heads", "num_heads")
    check_belongs(("shared_lm_head",), "--num-heads", options["num_heads"] is not None)
    if (options["draft"] is None) != (options["levels"] is None):
        raise click.UsageError("--draft and --levels belong together")
    drafting = heads_drafting(options["heads"], shape) if options["heads"] else Drafting()
    if options["draft"]:
        drafting = dataclasses.replace(drafting, draft=model_shape(options["draft"]), levels=options["levels"])
    if options["num_heads"]:
        rows = None if options["shared_lm_head"] else shape.lm_head.rows
        drafting = dataclasses.replace(drafting, heads=options["num_heads"], head_rows=rows)
    return dataclasses.replace(drafting, host_seconds=options["host_seconds"])


def chosen_candidates(console: Console, options: Mapping[str, Any], model: StepModel) -> list[PlanCandidate]:
    """The drafters of --calibration, or the paper's logarithm, each with what it computes to draft.

    Medusa heads, where the options do not name them, have LM heads of the size of the model's.
    """
    from treeopt.files.calibrations import load_calibration
    from treeopt.optimize.build_report import texts_of
    from treeopt.optimize.select_method import FOLDS
    from treeopt.plan.planner import Acceptance, PlanCandidate, calibrated_acceptance

    files = options["calibrations"]
    if not files:
        check_belongs(("drafter",), "--calibration", holds=False)
        if model.drafting == Drafting() and max(options["nodes"]) > ONE_NODE and not given("host_seconds"):
            assumed = "tokens per step are those of Medusa heads, and drafting is taken as 0 seconds"
            console.warn(f"warning: {assumed}; --num-heads, --draft or --host-seconds counts it")
        return [PlanCandidate(Acceptance(kind=options["kind"]), model)]
    loaded = [load_calibration(file) for file in files]
    if len({one.provenance.model_id for one in loaded}) > 1:
        raise shape_error("the calibrations are of different base models", fix="one --model for all calibrations")
    drafters = _drafters(options["drafter"], files, loaded)
    found: list[PlanCandidate] = []
    for file, calibration, drafter in zip(files, loaded, drafters, strict=True):
        drafting = _drafting_of(file, calibration, drafter, model.drafting)
        if calibration.distinct < FOLDS:
            few = f"{file} has {texts_of(calibration)}, too few for cross-validation"
            console.warn(f"warning: {few}; tokens per step are those of the fitted texts")
        with console.progress("curve") as progress:
            kind, largest = options["kind"], max(options["nodes"])
            acceptance = calibrated_acceptance(calibration, largest, kind=kind, progress=late(progress))
        if any(one.acceptance.name == acceptance.name for one in found):
            acceptance = dataclasses.replace(acceptance, name=f"{acceptance.name} ({file})")
        if drafting.heads and not model.drafting.heads:
            drafting = dataclasses.replace(drafting, head_rows=model.shape.lm_head.rows)
            heads = counted(drafting.heads, "head")
            console.note(f"drafting  {acceptance.name}: LM heads of their own are assumed for {heads}")
        found.append(PlanCandidate(acceptance, dataclasses.replace(model, drafting=drafting)))
    return found


def _drafters(named: Sequence[str], files: Sequence[str], calibrations: Sequence[Calibration]) -> list[Drafter | None]:
    """The drafter of each calibration, from --drafter or its own file; None for the heads' guesses."""
    from treeopt.files.drafters import load_drafter

    found: list[Drafter | None] = []
    known = {drafter.id: drafter for drafter in map(load_drafter, named)}
    for file, calibration in zip(files, calibrations, strict=True):
        source = calibration.provenance
        if source.drafter_id and source.drafter_id not in known and Path(source.drafter or "").is_file():
            drafter = load_drafter(source.drafter)
            known[drafter.id] = drafter
        if source.drafter_id and source.drafter_id not in known:
            where = f"{source.drafter or 'its file'}, id {source.drafter_id}"
            why = "what drafting costs depends on its kind and heads"
            raise shape_error(f"the drafter of {file} is not found", at=where, why=why, fix="--drafter FILE")
        found.append(known.get(source.drafter_id))
    if len({drafter.draft for drafter in found if drafter is not None and drafter.draft}) > 1:
        what = "the calibrations are of different draft models, and --draft names one"
        raise shape_error(what, fix="treeopt plan for each of them")
    return found


def _drafting_of(file: str, calibration: Calibration, drafter: Drafter | None, options: Drafting) -> Drafting:
    """What a drafter computes: its number of heads, and the draft model of the options where it has one."""
    heads = calibration.num_heads if drafter is None else drafter.num_heads
    if heads and options.heads not in (0, heads):
        what = f"the drafter of {file} has {heads} heads, and the options name {options.heads}"
        raise shape_error(what, fix="leave --num-heads and --heads out, or name its own heads")
    drafting = dataclasses.replace(options, heads=heads, head_rows=options.head_rows if heads else None)
    if drafter is None or not drafter.draft:  # the heads' guesses in a static tree take no time on the host
        host = 0.0 if drafter is None else options.host_seconds
        return dataclasses.replace(drafting, draft=None, levels=0, host_seconds=host)
    if drafting.draft is None:
        name = drafter.source.get("draft") or "MODEL"
        what = f"the drafter of {file} has a draft model, whose time is a part of each step"
        raise shape_error(what, fix=f"--draft {name} --levels {drafter.depth}")
    return drafting


def drafting_text(drafting: Drafting) -> str:
    """What drafts, in words, with the seconds on the host."""
    parts = []
    if drafting.heads:
        lm_head = "LM heads of their own" if drafting.head_rows else "the base's LM head"
        parts.append(f"{counted(drafting.heads, 'head')} with {lm_head}")
    if drafting.draft is not None:
        parts.append(f"draft model {drafting.draft.name}, {counted(drafting.levels, 'level')}")
    return f"{', '.join(parts) or 'none'}, {drafting.host_seconds:g} host seconds"


def profile_source(kind: str, candidate: PlanCandidate) -> dict[str, Any]:
    """The provenance of a modelled profile."""
    model = candidate.model
    efficiency = ", ".join(f"{name} {value:.4g}" for name, value in vars(model.efficiency).items())
    return {
        "made_by": f"treeopt {VERSION}",
        "model": model.shape.name,
        "kind": kind,
        **dict(candidate.acceptance.provenance),
        "device": model.device.name,
        "dtype": model.setting.dtype,
        "attention": model.setting.attention,
        "modelled": f"treeopt plan; efficiency: {efficiency}; drafting: {drafting_text(model.drafting)}",
    }
