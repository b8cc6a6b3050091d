"""`treeopt plan`: overhead and speedup on a machine that need not be at hand, by the hardware model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import treeopt
from treeopt.cli.checks import check_apart, check_belongs, check_once, check_suffix, given
from treeopt.cli.configuration import with_configuration
from treeopt.cli.console import Console, command
from treeopt.cli.numbers import COUNT, FiniteRange, numbers_option
from treeopt.cli.options import check_outputs, force_option
from treeopt.defaults import ATTENTIONS, HEADS, KINDS, MODEL, MTP, ONE_NODE
from treeopt.errors import Code, TreeoptError, counted
from treeopt.files.outputs import PICTURE, write_marked
from treeopt.plan.devices import BYTES, Device, device_of_spec, device_preset, presets
from treeopt.progress import late
from treeopt.shape import Drafting, ModelShape, shape_error

if TYPE_CHECKING:
    from treeopt.plan.fit import EfficiencyFit
    from treeopt.plan.planner import SpeedPlan

_POWERS = ",".join(str(1 << power) for power in range(10))
_MODEL = "Folder with a config.json, that file, a hub name, or a known name such as llama-7b."
_ATTENTION = "eager moves the scores through memory, as in the paper; flash does not."


@command("plan")
@click.option("--model", help=_MODEL)
@click.option("--device-preset", help="Device with published figures, such as a100-80gb-pcie.")
@click.option("--device-spec", help="Other devices: flops=312e12,bandwidth=1935e9[,memory=80e9], per second and bytes.")
@click.option("--dtype", type=click.Choice(list(BYTES)), default="bfloat16", help="Dtype of the weights.")
@click.option("--kv-dtype", type=click.Choice(list(BYTES)), help="Of the KV cache [default: that of activations].")
@click.option("--attention", type=click.Choice(ATTENTIONS), default=ATTENTIONS[0], help=_ATTENTION)
@numbers_option("--nodes", default=[_POWERS], help="Sizes, root counted; 1 is always included.")
@numbers_option("--batch-size", "batch", default=["1"], help="Texts decoded together.")
@numbers_option("--context", default=["1024"], help="Tokens in the KV cache of each text.")
@click.option("--heads", help="Medusa heads, of which only sizes are read: folder, weights file or hub name.")
@click.option("--num-heads", type=COUNT, help="Or the number of Medusa heads [default: none].")
@click.option("--shared-lm-head", is_flag=True, help="The heads of --num-heads share the base's LM head.")
@click.option("--draft", help="Draft model, named as --model; with --levels.")
@click.option("--levels", type=COUNT, help="Levels of the draft model: its forwards in a step.")
@click.option("--host-seconds", type=FiniteRange(min=0.0), default=0.0, help="Drafting on the host, in a step.")
@click.option("--calibration", help="Traces to take tokens per step from [default: 1 + 0.477 ln nodes].")
@click.option("--kind", type=click.Choice(KINDS), default=KINDS[0], help="Kind of the trees.")
@click.option("--fit", multiple=True, help="Measured profile of this device, of any model: its efficiency is fitted.")
@click.option("--presets", is_flag=True, help="List the known models and devices, with sources.")
@force_option
@click.option("--chart", help="Write a chart of speedup and overhead: FILE.svg.")
@click.option("-o", "--output", help="FILE.yaml: the modelled profile, for build and curve.")
def run(console: Console, **options: Any) -> None:
    """Model the seconds of a decoding step, overhead and speedup, by nodes, batch size and context.

    Each operator takes the longer of its computation and of moving its bytes (a roofline model). One node is
    autoregressive decoding without drafting. Speedup is tokens per step divided by overhead. No weights are loaded and
    no accelerator is needed.

    With --calibration the heads are those of its drafter, where no option names them.
    """
    from treeopt.files.profiles import save_profile
    from treeopt.models.shapes import NAMED

    if options["presets"]:
        check_apart(*options)
        console.report(*presets([NAMED[name].shape(name) for name in NAMED]))
        console.result({})
        return
    check_once("fit", options["fit"])
    if not options["model"]:
        raise click.UsageError("Missing option '--model' (treeopt plan --presets lists known names).")
    device = _device(options)
    setting = treeopt.StepSetting(options["dtype"], options["kv_dtype"], options["attention"])
    if options["output"] is not None:
        check_outputs(options, options["output"], suffixes=(".yaml", ".yml"))
    if options["chart"] is not None:
        check_outputs(options, options["chart"], kind=PICTURE)
        check_suffix(options["chart"], ".svg", option="--chart")
    shape = treeopt.model_shape(options["model"])
    calibration = treeopt.load_calibration(options["calibration"]) if options["calibration"] else None
    drafting = _drafting(console, options, shape, calibration)
    fit = _fit(options["fit"], device) if options["fit"] else None
    model = treeopt.StepModel(shape, device, setting, drafting, fit.efficiency if fit else treeopt.Efficiency())
    acceptance = _acceptance(console, options, calibration)
    plan = treeopt.plan_speedup(model, options["nodes"], options["batch"], options["context"], acceptance=acceptance)
    console.warn(*plan.warnings())
    console.report(*plan.parts(), *(fit.parts() if fit else ()))
    if options["output"] is not None:
        save_profile(with_configuration(plan.profile(), console.configuration), options["output"])
    if options["chart"] is not None:
        write_marked(options["chart"], _chart(plan), PICTURE, console.configuration)
    written = {name: options[name] for name in ("output", "chart") if options[name] is not None}
    for file in written.values():
        console.note(f"wrote {file}")
    console.result(written)


def _chart(plan: SpeedPlan) -> str:
    """The chart, which says that it is modelled, and by what."""
    from treeopt.view.charts import render_plan
    from treeopt.view.report_data import last_name

    model, setting = plan.model, plan.model.setting
    title = f"{last_name(model.shape.name)} on {model.device.name}, {setting.dtype}: modelled, not measured"
    found = [sorted({getattr(best, name) for best in plan.best}) for name in ("batch", "context")]
    batches, contexts = (", ".join(map(str, each)) for each in found)
    of = f"batch {batches}; {contexts} tokens in the cache; {setting.attention} attention"
    return render_plan(plan, title, "\n".join([f"Modelled by treeopt plan: {of}.", *plan.assumptions()]))


def _device(options: Mapping[str, Any]) -> Device:
    """The device that the options name, which has a figure for the dtype."""
    preset, spec = options["device_preset"], options["device_spec"]
    if (preset is None) == (spec is None):
        raise click.UsageError("give either --device-preset or --device-spec (--presets lists the devices)")
    device = device_preset(preset) if spec is None else device_of_spec(spec)
    device.peak(options["dtype"])  # fails before any work
    return device


def _fit(files: Sequence[str], device: Device) -> EfficiencyFit:
    """The efficiency of the device by measured profiles, each with the model and heads that its provenance names."""
    from treeopt.models.config_shapes import heads_drafting
    from treeopt.plan.fit import check_fittable

    found = []
    for file in files:
        profile = treeopt.load_profile(file)
        source = profile.provenance
        check_fittable(source, file)
        shape = treeopt.model_shape(source["model"])
        heads = source.get("heads", "") if source.get("drafter_name", HEADS).startswith(HEADS) else ""
        drafting = heads_drafting(heads, shape) if heads else Drafting()
        attention = ATTENTIONS[0] if source.get("attention") == ATTENTIONS[0] else ATTENTIONS[1]
        setting = treeopt.StepSetting(source["dtype"], attention=attention)
        found.append(treeopt.MeasuredSteps(profile, treeopt.StepModel(shape, device, setting, drafting)))
    return treeopt.fit_efficiency(found)


def _check_draft(name: str) -> None:
    """Raise E240 for a folder of an EAGLE head, whose config describes a model that it is not."""
    from treeopt.models.hub import built_in, here

    if name == MTP or here(name) is not None or built_in(name) is not None:
        from treeopt.models.draft_files import kind_in_files

        if (kind := kind_in_files(name)) != MODEL:
            what = f"the hardware model has no formula for {name}, a drafter of the kind {kind}"
            raise TreeoptError(Code.PLAN_INVALID, what, fix="a draft model, or --host-seconds with its measured time")


def _drafting(
    console: Console, options: Mapping[str, Any], shape: ModelShape, calibration: treeopt.Calibration | None
) -> Drafting:
    """The drafting that the options name; the heads of a calibration where they name none."""
    from treeopt.models.config_shapes import heads_drafting

    check_apart("heads", "num_heads")
    check_belongs(("shared_lm_head",), "--num-heads", options["num_heads"] is not None)
    if (options["draft"] is None) != (options["levels"] is None):
        raise click.UsageError("--draft and --levels belong together")
    drafting = heads_drafting(options["heads"], shape) if options["heads"] else Drafting()
    if options["num_heads"]:
        rows = None if options["shared_lm_head"] else shape.lm_head.rows
        drafting = Drafting(options["num_heads"], head_rows=rows)
    if options["draft"]:
        _check_draft(options["draft"])
        drafting = dataclasses.replace(drafting, draft=treeopt.model_shape(options["draft"]), levels=options["levels"])
    drafting = dataclasses.replace(drafting, host_seconds=options["host_seconds"])
    if calibration is not None:
        heads = _heads(console, options, calibration)
        if drafting.heads not in (0, heads) and not calibration.provenance.drafter_id:
            what = f"the calibration has {heads} heads, and the options name {drafting.heads}"
            raise shape_error(what, fix="leave --num-heads and --heads out, or name its own heads")
        if heads and not drafting.heads:
            drafting = dataclasses.replace(drafting, heads=heads, head_rows=shape.lm_head.rows)
            console.note(f"drafting  LM heads of their own are assumed for {counted(heads, 'head')}")
        if calibration.provenance.drafter_id and not given("host_seconds"):
            console.warn("warning: what the drafter does on the host is taken as 0 seconds; --host-seconds counts it")
    elif drafting == Drafting() and max(options["nodes"]) > ONE_NODE and not given("host_seconds"):
        assumed = "tokens per step are those of Medusa heads, and drafting is taken as 0 seconds"
        console.warn(f"warning: {assumed}; --num-heads, --draft or --host-seconds counts it")
    return drafting


def _heads(console: Console, options: Mapping[str, Any], calibration: treeopt.Calibration) -> int:
    """The number of heads of a calibration's drafter; E240 where it has a draft model and the options name none."""
    source = calibration.provenance
    here = source.drafter_id and Path(source.drafter or "").is_file()
    drafter = treeopt.load_drafter(source.drafter) if here else None
    if drafter is not None and drafter.id == source.drafter_id:
        if drafter.draft and options["draft"] is None:
            what = "the drafter of the calibration has a draft model, whose time is a part of each step"
            fix = f"--draft {drafter.source.get('draft') or 'MODEL'} --levels {drafter.depth}"
            raise shape_error(what, fix=fix)
        return drafter.num_heads
    if source.drafter_id:
        missing = f"the drafter of the calibration, {source.drafter or source.drafter_id}, is not found"
        console.warn(f"warning: {missing}; a draft model is counted by --draft alone, heads best by --num-heads")
    return calibration.num_heads if source.heads_id or not source.drafter_id else 0


def _acceptance(
    console: Console, options: Mapping[str, Any], calibration: treeopt.Calibration | None
) -> treeopt.Acceptance:
    """Tokens per step by the calibration, or the paper's logarithm."""
    from treeopt.optimize.build_report import fitted_texts

    if calibration is None:
        return treeopt.Acceptance(kind=options["kind"])
    if options["kind"] == KINDS[0]:
        console.warn(*fitted_texts(calibration))
    with console.progress("curve") as progress:
        largest = max(options["nodes"])
        return treeopt.calibrated_acceptance(calibration, largest, kind=options["kind"], progress=late(progress))
