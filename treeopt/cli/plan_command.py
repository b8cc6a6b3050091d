"""`treeopt plan`: overhead and speedup on a machine that need not be at hand, by the hardware model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from treeopt.cli.configuration import with_configuration
from treeopt.cli.console import Console, command
from treeopt.cli.early_checks import check_alone, check_once, check_suffix
from treeopt.cli.numbers import FiniteRange, numbers_option
from treeopt.cli.options import check_outputs, force_option
from treeopt.cli.plan_inputs import (
    chosen_candidates,
    chosen_device,
    chosen_drafting,
    chosen_efficiency,
    chosen_setting,
    profile_source,
)
from treeopt.cli.plan_report import as_dict, report, report_operators, report_presets
from treeopt.defaults import ATTENTIONS, KINDS
from treeopt.files.outputs import PICTURE, write_marked
from treeopt.plan.devices import BYTES
from treeopt.version import VERSION

if TYPE_CHECKING:
    from treeopt.plan.planner import SpeedPlan


_POWERS = ",".join(str(1 << power) for power in range(10))
_MODEL = "Folder with a config.json, that file, a hub name, or a known name such as llama-7b."


@command("plan")
@click.option("--model", help=_MODEL)
@click.option("--device-preset", help="Device with published figures, such as a100-80gb-pcie.")
@click.option("--device-spec", help="Other devices: flops=312e12,bandwidth=1935e9[,memory=80e9], per second and bytes.")
@click.option("--dtype", type=click.Choice(list(BYTES)), default="bfloat16", show_default=True, help="Of the weights.")
@click.option("--kv-dtype", type=click.Choice(list(BYTES)), help="Of the KV cache [default: that of activations].")
@click.option(
    "--attention",
    type=click.Choice(ATTENTIONS),
    default=ATTENTIONS[0],
    show_default=True,
    help="eager moves the scores through memory, as in the paper; flash does not.",
)
@click.option("--bare", is_flag=True, help="The paper's operators only: no LM head, no KV writes, keys = context.")
@numbers_option("--nodes", default=[_POWERS], show_default=True, help="Sizes, root counted; 1 is always included.")
@numbers_option("--batch", default=["1"], show_default=True, help="Texts decoded together.")
@numbers_option("--context", default=["1024"], show_default=True, help="Tokens in the cache of each text.")
@click.option("--heads", help="Medusa heads whose sizes count: folder, weights file or hub name.")
@click.option("--draft-heads", type=click.IntRange(min=1), help="Number of Medusa heads [default: none].")
@click.option("--shared-lm-head", is_flag=True, help="The heads of --draft-heads share the base's LM head.")
@click.option("--draft", help="Draft model, named as --model; with --draft-levels.")
@click.option("--draft-levels", type=click.IntRange(min=1), help="Forwards of the draft model in a step.")
@click.option("--host-seconds", type=FiniteRange(min=0.0), default=0.0, help="Seconds of drafting on the host a step.")
@click.option(
    "--calibration",
    "calibrations",
    multiple=True,
    help="Tokens per step by these traces; of several drafters the fastest is found [default: 1 + 0.477 ln nodes].",
)
@click.option("--drafter", multiple=True, help="Drafter file of a calibration, where it is not where it was made.")
@click.option("--kind", type=click.Choice(KINDS), default=KINDS[0], show_default=True, help="Kind of the trees.")
@click.option("--fit", multiple=True, help="Measured profile of this device, of any model: its efficiency is fitted.")
@click.option("--efficiency", help="Or its numbers: compute=0.6,bandwidth=0.8,launch=5e-6,step=0,tree=0.")
@click.option("--operators", is_flag=True, help="Print and chart FLOPs, bytes, intensity and time of operators.")
@click.option("--presets", is_flag=True, help="List the known models and devices, with sources.")
@force_option
@click.option("--chart", help="Write a chart of speedup and overhead, or of --operators: FILE.svg.")
@click.option("-o", "--output", help="FILE.yaml: the modelled profile, for build and curve; FILE.svg: the chart.")
def run(console: Console, **options: Any) -> None:
    """Model the seconds of a decode step, overhead and speedup, by nodes, batch and context.

    Each operator takes the longer of computing and of moving its bytes. One node is autoregressive decoding without
    drafting. Speedup is tokens per step / overhead. No weights are loaded and no accelerator is needed.
    """
    from treeopt.plan.planner import plan_speedup
    from treeopt.plan.step_model import StepModel

    if options["presets"]:
        check_alone("presets", options)
        report_presets(console)
        return
    for name in ("calibrations", "fit"):
        check_once(name, options[name])
    if not options["model"]:
        raise click.UsageError("Missing option '--model' (treeopt plan --presets lists known names).")
    device, setting = chosen_device(options), chosen_setting(options)
    _check_files(options)
    from treeopt.models.shapes import model_shape

    shape = model_shape(options["model"])
    device.peak(setting.dtype)  # fails before any work
    drafting = chosen_drafting(options, shape)
    efficiency, fit = chosen_efficiency(options, device)
    model = StepModel(shape, device, setting, drafting, efficiency)
    candidates = chosen_candidates(console, options, model)
    plan = plan_speedup(candidates, options["nodes"], options["batch"], options["context"])
    report(console, plan, fit)
    if options["operators"]:
        report_operators(console, plan)
    written = _write(console, options, plan)
    console.result({**as_dict(plan, fit, operators=options["operators"]), **written})


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


def _sizes(plan: SpeedPlan) -> set[int]:
    """The sizes of a modelled profile, which is interpolated: those of the plan, of curves, and the fastest."""
    from treeopt.optimize.curve import default_sizes

    known = {point.nodes for point in plan.points}
    return known | set(default_sizes(max(known))) | {best.any_nodes for best in plan.best}


def _is_chart(file: str) -> bool:
    return Path(file).suffix.lower() == ".svg"


def _write(console: Console, options: dict[str, Any], plan: SpeedPlan) -> dict[str, str]:
    """Write profile and chart, and return their names."""
    from treeopt.files.profiles import save_profile

    written = {name: options[name] for name in ("output", "chart") if options[name] is not None}
    for file in written.values():
        if _is_chart(file):
            from treeopt.view.charts import render_operators, render_plan

            model, first = plan.candidates[0].model, plan.best[0]
            title = f"{model.shape.name} on {model.device.name}, {model.setting.dtype}"
            where = f"{title}, batch {first.batch}, context {first.context}"
            picture = render_operators(plan, where) if options["operators"] else render_plan(plan, title)
            write_marked(file, picture, PICTURE, console.configuration)
        else:
            chosen = plan.chosen(plan.best[0])
            source = profile_source(options, chosen, VERSION)
            profile = chosen.model.profile(_sizes(plan), options["batch"], options["context"], source)
            save_profile(with_configuration(profile, console.configuration), file)
        console.note(f"wrote {file}")
    return written
