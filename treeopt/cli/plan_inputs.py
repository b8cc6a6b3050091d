"""What the options of `treeopt plan` name: shapes, devices, drafters and measured steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from treeopt.cli.build_dynamic import texts_of
from treeopt.cli.console import Console
from treeopt.cli.early_checks import given
from treeopt.cli.plan_report import drafting_text
from treeopt.defaults import ATTENTIONS, HEADS, KINDS, MODEL, MODEL_NGRAM, ONE_NODE
from treeopt.errors import counted
from treeopt.plan.devices import BYTES, Device, device_of_spec, device_preset, read_numbers
from treeopt.progress import late
from treeopt.shape import Drafting, ModelShape, shape_error

if TYPE_CHECKING:
    from treeopt.calibration import Calibration
    from treeopt.drafter import Drafter
    from treeopt.latency import LatencyProfile
    from treeopt.plan.fit import EfficiencyFit, MeasuredSteps
    from treeopt.plan.operators import StepSetting
    from treeopt.plan.planner import PlanCandidate
    from treeopt.plan.step_model import Efficiency, StepModel


_EXAMPLE = "compute=0.6,bandwidth=0.8,launch=5e-6"


def chosen_device(options: Mapping[str, Any]) -> Device:
    """The device of --device-preset or --device-spec; a usage error unless there is exactly one."""
    preset, spec = options["device_preset"], options["device_spec"]
    if (preset is None) == (spec is None):
        raise click.UsageError("give either --device-preset or --device-spec (--presets lists the devices)")
    return device_preset(preset) if spec is None else device_of_spec(spec)


def chosen_setting(options: Mapping[str, Any]) -> StepSetting:
    """Dtypes, attention and formulas."""
    from treeopt.plan.operators import StepSetting

    return StepSetting(options["dtype"], options["kv_dtype"], options["attention"], options["bare"])


def chosen_efficiency(options: Mapping[str, Any], device: Device) -> tuple[Efficiency, EfficiencyFit | None]:
    """The efficiency of --efficiency, or fitted to the profiles of --fit; the bare formulas without both."""
    from treeopt.files.profiles import load_profile
    from treeopt.plan.fit import fit_efficiency
    from treeopt.plan.step_model import Efficiency

    text = options["efficiency"]
    if options["fit"] and text:
        raise click.UsageError("give either --efficiency or --fit")
    if text:
        return Efficiency(**read_numbers(text, tuple(vars(Efficiency())), f"--efficiency {text}", _EXAMPLE)), None
    if not options["fit"]:
        return Efficiency(), None
    fit = fit_efficiency([measured(load_profile(file), file, device) for file in options["fit"]])
    return fit.efficiency, fit


def measured(profile: LatencyProfile, file: str, device: Device) -> MeasuredSteps:
    """A measured profile with the model and heads that its provenance names.

    Raises:
        TreeoptError: E240 where it is modelled, names no model, is of a draft model or has a dtype that is none of
            `BYTES`, and as `model_shape` and `heads_drafting`.
    """
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
    if options["heads"] and options["draft_heads"]:
        raise click.UsageError("give either --heads or --draft-heads")
    if (options["draft"] is None) != (options["draft_levels"] is None):
        raise click.UsageError("--draft and --draft-levels belong together")
    if options["shared_lm_head"] and not options["draft_heads"]:
        raise click.UsageError("--shared-lm-head belongs to --draft-heads")
    drafting = Drafting()
    if options["heads"] or options["draft"]:
        from treeopt.models.config_shapes import heads_drafting
        from treeopt.models.shapes import model_shape

        drafting = heads_drafting(options["heads"], shape) if options["heads"] else drafting
        if options["draft"]:
            draft, levels = model_shape(options["draft"]), options["draft_levels"]
            drafting = dataclasses.replace(drafting, draft=draft, levels=levels)
    if options["draft_heads"]:
        rows = None if options["shared_lm_head"] else shape.lm_head.rows
        drafting = dataclasses.replace(drafting, heads=options["draft_heads"], head_rows=rows)
    return dataclasses.replace(drafting, host_seconds=options["host_seconds"])


def chosen_candidates(console: Console, options: Mapping[str, Any], model: StepModel) -> list[PlanCandidate]:
    """The drafters of --calibration, or the paper's logarithm, each with what it computes to draft.

    Medusa heads, where the options do not name them, have LM heads of the size of the model's.
    """
    from treeopt.files.calibrations import load_calibration
    from treeopt.optimize.select_method import FOLDS
    from treeopt.plan.planner import PlanCandidate, calibrated_acceptance

    if not options["calibrations"]:
        return [_by_logarithm(console, options, model)]
    loaded = [load_calibration(file) for file in options["calibrations"]]
    for file, calibration in zip(options["calibrations"], loaded, strict=True):
        if calibration.distinct < FOLDS:
            few = f"{file} has {texts_of(calibration)}, too few for cross-validation"
            console.warn(f"warning: {few}; tokens per step are those of the fitted texts")
    if len({one.provenance.model_id for one in loaded}) > 1:
        raise shape_error("the calibrations are of different base models", fix="one --model for all calibrations")
    drafters = _drafters(options, loaded)
    files = options["calibrations"]
    draftings = [_drafting_of(*one, model.drafting) for one in zip(files, loaded, drafters, strict=True)]
    largest = max(options["nodes"])
    found: list[PlanCandidate] = []
    for file, calibration, drafter, drafting in zip(files, loaded, drafters, draftings, strict=True):
        with console.progress("curve") as progress:
            acceptance = calibrated_acceptance(calibration, largest, kind=options["kind"], progress=late(progress))
        if any(one.acceptance.name == acceptance.name for one in found):
            acceptance = dataclasses.replace(acceptance, name=f"{acceptance.name} ({file})")
        if drafting.heads and not model.drafting.heads:
            drafting = dataclasses.replace(drafting, head_rows=model.shape.lm_head.rows)
            heads = counted(drafting.heads, "head")
            console.note(f"drafting  {acceptance.name}: LM heads of their own are assumed for {heads}")
        if drafter is None:  # the heads' guesses in a static tree: nothing is computed on the host
            drafting = dataclasses.replace(drafting, host_seconds=0.0)
        elif not given("host_seconds"):
            of = f"{acceptance.name} ({drafter.name})"
            console.warn(f"warning: {of}: drafting on the host is taken as 0 seconds; --host-seconds counts it")
        found.append(PlanCandidate(acceptance, dataclasses.replace(model, drafting=drafting)))
    return found


def _by_logarithm(console: Console, options: Mapping[str, Any], model: StepModel) -> PlanCandidate:
    """The paper's logarithm with the drafting that the options name."""
    from treeopt.plan.planner import Acceptance, PlanCandidate

    if options["drafter"]:
        raise click.UsageError("--drafter belongs to --calibration")
    if options["kind"] == KINDS[1] and not given("host_seconds"):
        why = "the tokens per step of static trees are assumed, and per-step trees are drafted on the host"
        raise click.UsageError(f"--kind {KINDS[1]} without --calibration needs --host-seconds: {why}")
    if model.drafting == Drafting() and max(options["nodes"]) > ONE_NODE and not given("host_seconds"):
        assumed = "tokens per step are those of Medusa heads, and drafting is taken as 0 seconds"
        console.warn(f"warning: {assumed}; --draft-heads, --draft or --host-seconds counts it")
    return PlanCandidate(Acceptance(kind=options["kind"]), model)


def _drafters(options: Mapping[str, Any], calibrations: Sequence[Calibration]) -> list[Drafter | None]:
    """The drafter of each calibration, from --drafter or its own file; None for the heads' guesses.

    Raises:
        TreeoptError: E240 where a drafter's file is not found, one of --drafter is of no calibration, or two draft
            models are to have one shape; and as `load_drafter`.
        click.UsageError: where the options name heads or a draft model that no calibration drafts with.
    """
    from treeopt.files.drafters import load_drafter

    named = {file: load_drafter(file) for file in options["drafter"]}
    known = {drafter.id: drafter for drafter in named.values()}
    files = options["calibrations"]
    drafters = [_drafter_of(file, one, known) for file, one in zip(files, calibrations, strict=True)]
    used = {one.provenance.drafter_id for one in calibrations}
    for file, drafter in named.items():
        if drafter.id not in used:
            raise shape_error(f"no calibration is of the drafter {file}", at=drafter.id, fix="leave --drafter out")
    models = {drafter.draft for drafter in drafters if drafter is not None and drafter.draft}
    if len(models) > 1:
        what = "the calibrations are of different draft models, and --draft names one"
        raise shape_error(what, fix="treeopt plan for each of them")
    if options["draft"] and not models:
        raise click.UsageError("--draft belongs to calibrations of a draft model, and there is none")
    if (options["heads"] or options["draft_heads"]) and all(one is not None and not one.num_heads for one in drafters):
        raise click.UsageError("--heads and --draft-heads belong to calibrations with heads, and there is none")
    return drafters


def _drafter_of(file: str, calibration: Calibration, known: Mapping[str, Drafter]) -> Drafter | None:
    """The drafter of a calibration, by its id; None for the heads' guesses."""
    from treeopt.files.drafters import load_drafter

    source = calibration.provenance
    if not source.drafter_id or source.drafter_id in known:
        return known.get(source.drafter_id)
    if source.drafter and Path(source.drafter).is_file():
        drafter = load_drafter(source.drafter)
        if drafter.id == source.drafter_id:
            return drafter
    where = f"{source.drafter or 'its file'}, id {source.drafter_id}"
    why = "what drafting costs depends on its kind and heads"
    raise shape_error(f"the drafter of {file} is not found", at=where, why=why, fix="--drafter FILE")


def _drafting_of(file: str, calibration: Calibration, drafter: Drafter | None, options: Drafting) -> Drafting:
    """What a drafter computes: its number of heads, and the draft model of the options where it has one.

    Raises:
        TreeoptError: E240 where the options name another number of heads, or no draft model for one that needs it.
    """
    heads = calibration.num_heads if drafter is None else drafter.num_heads
    if heads and options.heads not in (0, heads):
        what = f"the drafter of {file} has {heads} heads, and the options name {options.heads}"
        raise shape_error(what, fix="leave --draft-heads and --heads out, or name its own heads")
    drafting = dataclasses.replace(options, heads=heads, head_rows=options.head_rows if heads else None)
    if drafter is None or not drafter.draft:
        return dataclasses.replace(drafting, draft=None, levels=0)
    if drafting.draft is None:
        name = drafter.source.get("draft") or "MODEL"
        what = f"the drafter of {file} has a draft model, whose time is a part of each step"
        raise shape_error(what, fix=f"--draft {name} --draft-levels {drafter.depth}")
    return drafting


def profile_source(options: Mapping[str, Any], candidate: PlanCandidate, version: str) -> dict[str, Any]:
    """The provenance of a modelled profile."""
    model, acceptance = candidate.model, candidate.acceptance
    efficiency = ", ".join(f"{name} {value:.4g}" for name, value in vars(model.efficiency).items())
    formulas = "table 5 of arXiv:2401.10774, appendix G" if model.setting.bare else "treeopt plan"
    return {
        "made_by": f"treeopt {version}",
        "model": model.shape.name,
        "kind": options["kind"],
        **dict(acceptance.provenance),
        "device": model.device.name,
        "dtype": model.setting.dtype,
        "attention": model.setting.attention,
        "modelled": f"{formulas}; efficiency: {efficiency}; drafting: {drafting_text(model.drafting)}",
    }
