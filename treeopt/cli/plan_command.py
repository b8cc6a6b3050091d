"""`treeopt plan`: overhead and speedup on a machine that need not be at hand, by the hardware model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from treeopt.cli.build_report import by_one_growth
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
from treeopt.files.outputs import PICTURE, write_marked
from treeopt.plan.devices import BYTES, DEVICES

if TYPE_CHECKING:
    from treeopt.plan.fit import EfficiencyFit
    from treeopt.plan.planner import PlanPoint, SpeedPlan


_POWERS = ",".join(str(1 << power) for power in range(10))
_MODEL = "Folder with a config.json, that file, a hub name, or a known name such as llama-7b."
_POINT = ("nodes", "batch", "context", "seconds", "overhead", "speedup")


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
@click.option("-o", "--output", help="FILE.yaml: the modelled profile, for build and curve; FILE.svg: the chart.")
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
        _report_presets(console)
        return
    for name in ("calibrations", "fit"):
        check_once(name, options[name])
    if not options["model"]:
        raise click.UsageError("Missing option '--model' (treeopt plan --presets lists known names).")
    device = chosen_device(options)
    setting = StepSetting(options["dtype"], options["kv_dtype"], options["attention"])
    _check_files(options)
    from treeopt.models.shapes import model_shape

    shape = model_shape(options["model"])
    device.peak(setting.dtype)  # fails before any work
    drafting = chosen_drafting(options, shape)
    efficiency, fit = fitted_efficiency(options["fit"], device)
    model = StepModel(shape, device, setting, drafting, efficiency)
    candidates = chosen_candidates(console, options, model)
    plan = plan_speedup(candidates, options["nodes"], options["batch"], options["context"])
    _report(console, plan, fit)
    written = _write(console, options, plan)
    console.result({**_as_dict(plan, fit), **written})


command = run


def _check_files(options: dict[str, Any]) -> None:
    """Check the outputs before any work."""
    from treeopt.files.outputs import check_distinct

    for name in ("output", "chart"):
        if options[name] is not None:
            suffixes = (".yaml", ".yml", ".svg") if name == "output" else (".svg",)
            check_suffix(options[name], *suffixes, option="-o" if name == "output" else f"--{name}")
            check_outputs(options, options[name], kind=PICTURE if _is_chart(options[name]) else None)
    check_distinct(options["output"], options["chart"])


def _is_chart(file: str) -> bool:
    return Path(file).suffix.lower() == ".svg"


def _write(console: Console, options: dict[str, Any], plan: SpeedPlan) -> dict[str, str]:
    """Write profile and chart, and return their names."""
    from treeopt.files.profiles import save_profile
    from treeopt.optimize.curve import default_sizes

    written = {name: options[name] for name in ("output", "chart") if options[name] is not None}
    for file in written.values():
        if _is_chart(file):
            from treeopt.view.charts import render_plan

            model = plan.candidates[0].model
            picture = render_plan(plan, f"{model.shape.name} on {model.device.name}, {model.setting.dtype}")
            write_marked(file, picture, PICTURE, console.configuration)
        else:
            chosen = plan.chosen(plan.best[0])
            known = {point.nodes for point in plan.points}  # and those of curves: the profile is interpolated
            sizes = known | set(default_sizes(max(known))) | {best.any_nodes for best in plan.best}
            source = profile_source(options["kind"], chosen)
            profile = chosen.model.profile(sizes, options["batch"], options["context"], source)
            save_profile(with_configuration(profile, console.configuration), file)
        console.note(f"wrote {file}")
    return written


def _report(console: Console, plan: SpeedPlan, fit: EfficiencyFit | None) -> None:
    """Print the points, the fastest size of each batch and context, and the assumptions."""
    from treeopt.plan.step_model import Efficiency

    several = len(plan.candidates) > 1
    header = ["nodes", "batch", "context", "ms per step", "overhead", "tokens/step", "speedup"]
    console.table(header + ["drafter"] * several, [_cells(plan, point, several) for point in plan.points])
    model, capacity = plan.candidates[0].model, plan.candidates[0].model.device.memory
    for best in plan.best:
        where = f"batch {best.batch}, context {best.context}"
        one, other = (f", {name}" if several else "" for name in (best.drafter, best.any_drafter))
        console.say(
            f"{where}: nodes of the fastest size: {best.nodes} of these ({best.speedup:.3f} times{one}), "
            f"{best.any_nodes} of all ({best.any_speedup:.3f} times{other})"
        )
        if capacity is not None and best.memory > capacity:
            need = f"{best.memory / 1e9:.1f} GB of weights and cache"
            console.warn(f"warning: {where}: {need} exceed the {capacity / 1e9:.0f} GB of {model.device.name}")
    longest = max(point.context for point in plan.points)
    if model.shape.context is not None and longest > model.shape.context:
        console.warn(f"warning: context {longest}: {model.shape.name} takes {model.shape.context} tokens")
    console.say(
        f"{model.shape.name}: {model.shape.parameters:,} parameters in {model.setting.dtype} on {model.device.name}: "
        f"{model.device.peak(model.setting.dtype):.4g} FLOP/s, {model.device.bandwidth:.4g} bytes/s "
        f"({model.device.source})"
    )
    for candidate in plan.candidates:
        acceptance = candidate.acceptance
        by = "1 + 0.477 ln(nodes), the Medusa paper's model of its Vicuna-7B (arXiv:2401.10774, appendix G)"
        if acceptance.sizes:
            by = f"{acceptance.name}, by its calibration of {acceptance.model}"
        console.say(f"tokens per step: {by}")
        of = f"{acceptance.name}: " if several else ""
        console.say(f"drafting: {of}{drafting_text(candidate.model.drafting)}")
    grown = [one.acceptance.largest for one in plan.candidates if one.acceptance.kind == KINDS[0]]
    for largest in sorted({size for size in grown if size is not None}):
        console.say(by_one_growth(largest))
    if fit is not None:
        _report_fit(console, fit)
    elif model.efficiency == Efficiency():
        console.say("seconds: peak figures, which no device reaches; --fit PROFILE takes measured steps into account")


def _cells(plan: SpeedPlan, point: PlanPoint, several: bool) -> list[str]:
    marked = any(
        (best.batch, best.context, best.nodes, best.drafter) == (point.batch, point.context, point.nodes, point.drafter)
        for best in plan.best
    )
    cells = [
        f"{point.nodes}{' best' if marked else ''}",
        str(point.batch),
        str(point.context),
        f"{point.seconds * 1e3:.3f}",
        f"{point.overhead:.3f}",
        f"{point.tokens_per_step:.3f}",
        f"{point.speedup:.3f}",
    ]
    return [*cells, point.drafter] if several else cells


def _report_fit(console: Console, fit: EfficiencyFit) -> None:
    """Print the fitted numbers, and the errors of steps that were fitted and left out."""
    numbers = vars(fit.efficiency)
    shares = ", ".join(f"{name} {numbers[name]:.3g}" for name in ("compute", "bandwidth"))
    times = ", ".join(f"{name} {numbers[name] * 1e6:.3g} us" for name in ("launch", "step", "tree"))
    console.say(f"efficiency, fitted to {len(fit.fitted.errors)} measured steps: {shares}; {times}")
    for one in (fit.fitted, *fit.held_out):
        left_out = "fitted steps" if one is fit.fitted else f"steps left out by {one.by}"
        errors = f"median {one.median:.1%}, largest {one.largest:.1%}" if one.errors else "none"
        skipped = ""
        if one.skipped:
            skipped = f"; not left out: {'; '.join(one.skipped)} (the other steps do not determine 5 numbers)"
        console.say(f"error of {left_out}: {errors}{skipped}")
    if all(one.by != "model" for one in fit.held_out):
        console.say("steps of one model do not separate bandwidth from launch: for another model, fit two or more")


def _as_dict(plan: SpeedPlan, fit: EfficiencyFit | None) -> dict[str, Any]:
    """The plan with the keys of `--json`; points name their drafter where there are several."""
    model, several, first = plan.candidates[0].model, len(plan.candidates) > 1, plan.best[0]
    names = (*_POINT, "drafter") if several else _POINT
    tokens: dict[str, list[list[float]]] = {one.acceptance.name: [] for one in plan.candidates}
    for point in plan.points:
        if (point.batch, point.context) == (first.batch, first.context):
            tokens[point.drafter].append([point.nodes, point.tokens_per_step])
    found: dict[str, Any] = {
        "points": [{name: getattr(point, name) for name in names} for point in plan.points],
        "best_nodes": first.nodes,
        "best": [vars(best) for best in plan.best],
        "tokens_per_step": tokens,
        "drafting": {one.acceptance.name: drafting_text(one.model.drafting) for one in plan.candidates},
        "model": {"name": model.shape.name, "parameters": model.shape.parameters, "source": model.shape.source},
        "device": {**vars(model.device), "flops": dict(model.device.flops)},
        "setting": vars(model.setting),
        "efficiency": vars(model.efficiency),
    }
    if fit is not None:
        found["fit"] = {
            one.by: {
                "median": one.median if one.errors else None,
                "largest": one.largest if one.errors else None,
                "skipped": list(one.skipped),
            }
            for one in (fit.fitted, *fit.held_out)
        }
    return found


def _report_presets(console: Console) -> None:
    """Print the known models and devices."""
    from treeopt.models.shapes import NAMED

    shapes = [NAMED[name].shape(name) for name in NAMED]
    rows = [[one.name, f"{one.parameters:,}", str(one.context), one.source] for one in shapes]
    console.table(["model", "parameters", "context", "config of"], rows)
    console.say()
    devices = [
        [
            one.name,
            " ".join(f"{dtype} {value / 1e12:g}" for dtype, value in one.flops.items() if dtype != "float16"),
            f"{one.bandwidth / 1e9:g}",
            "-" if one.memory is None else f"{one.memory / 1e9:.0f}",
            one.source,
        ]
        for one in DEVICES.values()
    ]
    console.table(["device", "dense TFLOP/s", "GB/s", "GB", "source"], devices)
    console.say("float16 is as bfloat16; int8 and int4 weights are multiplied in 16 bits")
    known = [{"name": one.name, "parameters": one.parameters, "source": one.source} for one in shapes]
    console.result({"models": known, "devices": [{**vars(one), "flops": dict(one.flops)} for one in DEVICES.values()]})
