"""What the options of `treeopt plan` name: shapes, devices, drafters and measured steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import click

from treeopt.cli.console import Console
from treeopt.drafter import HEADS, MODEL, MODEL_NGRAM
from treeopt.files.calibrations import load_calibration
from treeopt.files.profiles import load_profile
from treeopt.latency import LatencyProfile
from treeopt.plan.acceptance import Acceptance, calibrated_acceptance
from treeopt.plan.devices import BYTES, Device, device_of_spec, device_preset, read_numbers
from treeopt.plan.fit import EfficiencyFit, MeasuredSteps, fit_efficiency
from treeopt.plan.operators import ATTENTIONS, StepSetting
from treeopt.plan.planner import PlanCandidate
from treeopt.plan.step_model import Efficiency, StepModel
from treeopt.progress import late
from treeopt.shape import Drafting, ModelShape, shape_error

_PARTS = tuple(vars(Efficiency()))
_EXAMPLE = "compute=0.6,bandwidth=0.8,launch=5e-6"


def chosen_device(options: Mapping[str, Any]) -> Device:
    """The device of --device-preset or --device-spec; a usage error unless there is exactly one."""
    preset, spec = options["device_preset"], options["device_spec"]
    if (preset is None) == (spec is None):
        raise click.UsageError("give either --device-preset or --device-spec (--presets lists the devices)")
    return device_preset(preset) if spec is None else device_of_spec(spec)


def chosen_setting(options: Mapping[str, Any]) -> StepSetting:
    """Dtypes, attention and formulas."""
    return StepSetting(options["dtype"], options["kv_dtype"], options["attention"], options["bare"])


def chosen_efficiency(options: Mapping[str, Any], device: Device) -> tuple[Efficiency, EfficiencyFit | None]:
    """The efficiency of --efficiency, or fitted to the profiles of --fit; the bare formulas without both."""
    text = options["efficiency"]
    if options["fit"] and text:
        raise click.UsageError("give either --efficiency or --fit")
    if text:
        return Efficiency(**read_numbers(text, _PARTS, f"--efficiency {text}", _EXAMPLE)), None
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
    """The drafters of --calibration, or the paper's logarithm; all with the drafting that the options name.

    Where the options name no heads, those of a calibration count, each with an LM head of the size of the model's. The
    drafting of a calibration without heads has none.
    """
    if not options["calibrations"]:
        return [PlanCandidate(Acceptance(kind=options["kind"]), model)]
    loaded = [load_calibration(file) for file in options["calibrations"]]
    if len({one.provenance.model_id for one in loaded}) > 1:
        raise shape_error("the calibrations are of different base models", fix="one --model for all calibrations")
    largest = max(options["nodes"])
    found: list[PlanCandidate] = []
    for file, calibration in zip(options["calibrations"], loaded, strict=True):
        with console.progress("curve") as progress:
            acceptance = calibrated_acceptance(calibration, largest, kind=options["kind"], progress=late(progress))
        if any(one.acceptance.name == acceptance.name for one in found):
            acceptance = dataclasses.replace(acceptance, name=f"{acceptance.name} ({file})")
        drafting = model.drafting
        with_heads, on_host = bool(calibration.provenance.heads_id), bool(calibration.provenance.drafter_id)
        if not with_heads:
            drafting = dataclasses.replace(drafting, heads=0, head_rows=None)
        elif not drafting.heads:
            count, rows = calibration.num_heads, model.shape.lm_head.rows
            drafting = dataclasses.replace(drafting, heads=count, head_rows=rows)
            console.note(f"drafting  {acceptance.name}: {count} heads with LM heads of their own are assumed")
        if not on_host:
            drafting = dataclasses.replace(drafting, draft=None, levels=0, host_seconds=0.0)
        found.append(PlanCandidate(acceptance, dataclasses.replace(model, drafting=drafting)))
    return found


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
        "modelled": f"{formulas}; efficiency: {efficiency}",
    }
