"""`treeopt plan`: overhead and speedup on a machine that need not be at hand, by the hardware model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import click

from treeopt.cli.checks import check_alone, check_once, check_suffix
from treeopt.cli.configuration import with_configuration
from treeopt.cli.console import Console, command
from treeopt.cli.numbers import FiniteRange, numbers_option
from treeopt.cli.options import check_outputs, force_option
from treeopt.cli.plan_inputs import (
    chosen_candidates,
    chosen_device,
    chosen_drafting,
    drafting_text,
    fitted_efficiency,
    profile_source,
)
from treeopt.defaults import ATTENTIONS, KINDS
from treeopt.facts import Column, Part, Table, picked
from treeopt.files.outputs import PICTURE, write_marked
from treeopt.plan.devices import BYTES, DEVICES

if TYPE_CHECKING:
    from treeopt.plan.fit import EfficiencyFit
    from treeopt.plan.planner import SpeedPlan


_POWERS = ",".join(str(1 << power) for power in range(10))
_MODEL = "Folder with a config.json, that file, a hub name, or a known name such as llama-7b."


@command("plan")
@click.option("--model", help=_MODEL)
@click.option("--device-preset", help="Device with published figures, such as a100-80gb-pcie.")
@click.option("--device-spec", help="Other devices: flops=312e12,bandwidth=1935e9[,memory=80e9], per second and bytes.")
@click.option("--dtype", type=click.Choice(list(BYTES)), default="bfloat16", help="Of the weights.")
@click.option("--kv-dtype", type=click.Choice(list(BYTES)), help="Of the KV cache [default: that of activations].")
@click.option(
    "--attention",
    type=click.Choice(ATTENTIONS),
    default=ATTENTIONS[0],
    help="eager moves the scores through memory, as in the paper; flash does not.",
)
@numbers_option("--nodes", default=[_POWERS], help="Sizes, root counted; 1 is always included.")
@numbers_option("--batch-size", "batch", default=["1"], help="Texts decoded together.")
@numbers_option("--context", default=["1024"], help="Tokens in the cache of each text.")
@click.option("--heads", help="Medusa heads whose sizes count: folder, weights file or hub name.")
@click.option("--num-heads", type=click.IntRange(min=1), help="Or the number of Medusa heads [default: none].")
@click.option("--shared-lm-head", is_flag=True, help="The heads of --num-heads share the base's LM head.")
@click.option("--draft", help="Draft model, named as --model; with --levels.")
@click.option("--levels", type=click.IntRange(min=1), help="Levels of the draft model: its forwards in a step.")
@click.option("--host-seconds", type=FiniteRange(min=0.0), default=0.0, help="Seconds of drafting on the host a step.")
@click.option(
    "--calibration",
    "calibrations",
    multiple=True,
    help="Tokens per step by these traces; of several drafters the fastest is found [default: 1 + 0.477 ln nodes].",
)
@click.option("--drafter", multiple=True, help="Drafter file of a calibration, where it is not where it was made.")
@click.option("--kind", type=click.Choice(KINDS), default=KINDS[0], help="Kind of the trees.")
@click.option("--fit", multiple=True, help="Measured profile of this device, of any model: its efficiency is fitted.")
@click.option("--presets", is_flag=True, help="List the known models and devices, with sources.")
@force_option
@click.option("--chart", help="Write a chart of speedup and overhead: FILE.svg.")
@click.option("-o", "--output", help="FILE.yaml: the modelled profile, for build and curve.")
def run(console: Console, **options: Any) -> None:
    """Model the seconds of a decode step, overhead and speedup, by nodes, batch and context.

    Each operator takes the longer of computing and of moving its bytes. One node is autoregressive decoding without
    drafting. Speedup is tokens per step / overhead. No weights are loaded and no accelerator is needed.

    --host-seconds is paid by each drafter but heads in static trees, which draft nothing on the host.
    """
    from treeopt.plan.operators import StepSetting
    from treeopt.plan.planner import plan_speedup
    from treeopt.plan.step_model import StepModel

    if options["presets"]:
        check_alone("presets", options)
        console.report(*_presets())
        console.result({})
        return
    for name in ("calibrations", "fit"):
        check_once(name, options[name])
    if not options["model"]:
        raise click.UsageError("Missing option '--model' (treeopt plan --presets lists known names).")
    device = chosen_device(options)
    setting = StepSetting(options["dtype"], options["kv_dtype"], options["attention"])
    for file, suffixes, option, kind in (
        (options["output"], (".yaml", ".yml"), "-o", None),
        (options["chart"], (".svg",), "--chart", PICTURE),
    ):
        if file is not None:
            check_suffix(file, *suffixes, option=option)
            check_outputs(options, file, kind=kind)
    from treeopt.models.shapes import model_shape

    shape = model_shape(options["model"])
    device.peak(setting.dtype)  # fails before any work
    drafting = chosen_drafting(options, shape)
    efficiency, fit = fitted_efficiency(options["fit"], device)
    model = StepModel(shape, device, setting, drafting, efficiency)
    candidates = chosen_candidates(console, options, model)
    plan = plan_speedup(candidates, options["nodes"], options["batch"], options["context"])
    _warn(console, plan)
    console.report(_points(plan), *_words(plan), *(_fit_words(fit) if fit is not None else ()))
    written = _write(console, options, plan)
    console.result({**_as_dict(plan, fit), **written})


command = run


def _write(console: Console, options: dict[str, Any], plan: SpeedPlan) -> dict[str, str]:
    """Write profile and chart, and return their names."""
    from treeopt.files.profiles import save_profile
    from treeopt.optimize.curve import default_sizes
    from treeopt.view.charts import render_plan

    if options["output"] is not None:
        chosen = plan.chosen(plan.best[0])
        known = {point.nodes for point in plan.points}  # and those of curves: the profile is interpolated
        sizes = known | set(default_sizes(max(known))) | {best.any_nodes for best in plan.best}
        source = profile_source(options["kind"], chosen)
        profile = chosen.model.profile(sizes, options["batch"], options["context"], source)
        save_profile(with_configuration(profile, console.configuration), options["output"])
    if options["chart"] is not None:
        model = plan.candidates[0].model
        picture = render_plan(plan, f"{model.shape.name} on {model.device.name}, {model.setting.dtype}")
        write_marked(options["chart"], picture, PICTURE, console.configuration)
    written = {name: options[name] for name in ("output", "chart") if options[name] is not None}
    for file in written.values():
        console.note(f"wrote {file}")
    return written


def _points(plan: SpeedPlan) -> Table:
    """The points; they name their drafter where there are several."""
    fastest = {(best.batch, best.context, best.nodes, best.drafter) for best in plan.best}
    columns = [
        Column(
            "nodes",
            lambda one: f"{one.nodes}{' best' * ((one.batch, one.context, one.nodes, one.drafter) in fastest)}",
        ),
        Column(None, "nodes"),
        Column("batch", "batch"),
        Column("context", "context"),
        Column("ms per step", "seconds", lambda seconds: f"{seconds * 1e3:.3f}"),
        Column("overhead", "overhead", ".3f"),
        Column("tokens/step", "tokens_per_step", ".3f", key=""),
        Column("speedup", "speedup", ".3f"),
    ]
    return Table(columns + [Column("drafter", "drafter")] * (len(plan.candidates) > 1), plan.points, "points")


def _warn(console: Console, plan: SpeedPlan) -> None:
    """Warn of what the device or the model does not take."""
    model = plan.candidates[0].model
    for best in plan.best:
        if model.device.memory is not None and best.memory > model.device.memory:
            need = f"{best.memory / 1e9:.1f} GB of weights and cache exceed the {model.device.memory / 1e9:.0f} GB"
            console.warn(f"warning: batch {best.batch}, context {best.context}: {need} of {model.device.name}")
    longest = max(point.context for point in plan.points)
    if model.shape.context is not None and longest > model.shape.context:
        console.warn(f"warning: context {longest}: {model.shape.name} takes {model.shape.context} tokens")


def _words(plan: SpeedPlan) -> Iterator[str]:
    """The fastest size of each batch and context, and the assumptions."""
    from treeopt.optimize.build_report import by_one_growth
    from treeopt.plan.step_model import Efficiency

    several = len(plan.candidates) > 1
    for best in plan.best:
        one, other = (f", {name}" if several else "" for name in (best.drafter, best.any_drafter))
        yield (
            f"batch {best.batch}, context {best.context}: nodes of the fastest size: "
            f"{best.nodes} of these ({best.speedup:.3f} times{one}), "
            f"{best.any_nodes} of all ({best.any_speedup:.3f} times{other})"
        )
    model = plan.candidates[0].model
    yield (
        f"{model.shape.name}: {model.shape.parameters:,} parameters in {model.setting.dtype} on {model.device.name}: "
        f"{model.device.peak(model.setting.dtype):.4g} FLOP/s, {model.device.bandwidth:.4g} bytes/s "
        f"({model.device.source})"
    )
    for candidate in plan.candidates:
        acceptance = candidate.acceptance
        by = "1 + 0.477 ln(nodes), the Medusa paper's model of its Vicuna-7B (arXiv:2401.10774, appendix G)"
        if acceptance.sizes:
            by = f"{acceptance.name}, by its calibration of {acceptance.model}"
        yield f"tokens per step: {by}"
        of = f"{acceptance.name}: " if several else ""
        yield f"drafting: {of}{drafting_text(candidate.model.drafting)}"
    grown = [one.acceptance.largest for one in plan.candidates if one.acceptance.kind == KINDS[0]]
    yield from (by_one_growth(largest) for largest in sorted({size for size in grown if size is not None}))
    if model.efficiency == Efficiency():
        yield "seconds: peak figures, which no device reaches; --fit PROFILE takes measured steps into account"


def _fit_words(fit: EfficiencyFit) -> Iterator[str]:
    """The fitted numbers, and the errors of steps that were fitted and left out."""
    numbers = vars(fit.efficiency)
    shares = ", ".join(f"{name} {numbers[name]:.3g}" for name in ("compute", "bandwidth"))
    times = ", ".join(f"{name} {numbers[name] * 1e6:.3g} us" for name in ("launch", "step", "tree"))
    yield f"efficiency, fitted to {len(fit.fitted.errors)} measured steps: {shares}; {times}"
    for one in (fit.fitted, *fit.held_out):
        left_out = "fitted steps" if one is fit.fitted else f"steps left out by {one.by}"
        errors = f"median {one.median:.1%}, largest {one.largest:.1%}" if one.errors else "none"
        skipped = f"; not left out: {'; '.join(one.skipped)} (the other steps do not determine 5 numbers)"
        yield f"error of {left_out}: {errors}{skipped if one.skipped else ''}"
    if all(one.by != "model" for one in fit.held_out):
        yield "steps of one model do not separate bandwidth from launch: for another model, fit two or more"


def _as_dict(plan: SpeedPlan, fit: EfficiencyFit | None) -> dict[str, Any]:
    """The plan with the keys of `--json`."""
    model, first = plan.candidates[0].model, plan.best[0]
    tokens: dict[str, list[list[float]]] = {one.acceptance.name: [] for one in plan.candidates}
    for point in plan.points:
        if (point.batch, point.context) == (first.batch, first.context):
            tokens[point.drafter].append([point.nodes, point.tokens_per_step])
    errors = () if fit is None else (fit.fitted, *fit.held_out)
    found = {one.by: picked(one if one.errors else None, "median", "largest") for one in errors}
    return {
        "best_nodes": first.nodes,
        "best": plan.best,
        "tokens_per_step": tokens,
        "drafting": {one.acceptance.name: drafting_text(one.model.drafting) for one in plan.candidates},
        "model": picked(model.shape, "name", "parameters", "source"),
        **picked(model, "device", "setting", "efficiency"),
        **({"fit": {one.by: {**found[one.by], "skipped": one.skipped} for one in errors}} if errors else {}),
    }


def _presets() -> Iterator[Part]:
    """The known models and devices."""
    from treeopt.models.shapes import NAMED

    models = (
        Column("model", "name"),
        Column("parameters", "parameters", ","),
        Column("context", "context", key=""),
        Column("config of", "source"),
    )
    yield Table(models, [NAMED[name].shape(name) for name in NAMED], "models")
    yield ""
    devices = (
        Column("device", "name"),
        Column("dense TFLOP/s", "flops", _teraflops),
        Column("GB/s", "bandwidth", lambda value: f"{value / 1e9:g}"),
        Column("GB", "memory", lambda value: f"{value / 1e9:.0f}"),
        Column("source", "source"),
    )
    yield Table(devices, list(DEVICES.values()), "devices")
    yield "float16 is as bfloat16; int8 and int4 weights are multiplied in 16 bits"


def _teraflops(flops: Mapping[str, float]) -> str:
    return " ".join(f"{dtype} {value / 1e12:g}" for dtype, value in flops.items() if dtype != "float16")
