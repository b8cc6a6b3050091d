"""`treeopt curve`: tokens per step, overhead and speedup for every size of tree."""

from typing import Any

import click

import treeopt
from treeopt.cli import options as shared
from treeopt.cli.checks import check_belongs, check_suffix
from treeopt.cli.console import Console, command
from treeopt.defaults import CURVE_LARGEST, KINDS, MAX_NODES, ONE_NODE
from treeopt.facts import machine
from treeopt.files.outputs import PICTURE, write_marked
from treeopt.progress import late

_LARGEST_HELP = f"Largest tree, at most {MAX_NODES:,} nodes [default: the profile's, else {CURVE_LARGEST}]."


@command("curve")
@shared.calibration_option
@click.option("--kind", type=click.Choice(KINDS), default=KINDS[0], help="Kind of the trees.")
@click.option("--profile", help="Seconds per step, from `treeopt profile`: adds overhead and speedup.")
@shared.step_options
@click.option("--largest", type=click.IntRange(min=1), help=_LARGEST_HELP)
@shared.max_rank_option
@shared.temperature_option
@shared.force_option
@click.option("-o", "--output", default="curve.svg", help="File to write.")
def run(console: Console, **options: Any) -> None:
    """Print tokens per step, and with --profile overhead and speedup, for trees of each size.

    Static trees are cross-validated: each text is replayed with trees that were built without it. The sampling interval
    is that of the expected value, the prediction interval that of the value on as many new prompts; both are 90 %.
    Per-step trees (--kind dynamic) are not fitted to the traces.
    """
    from treeopt.models.origins import profile_for_others
    from treeopt.optimize.budget import check_priced
    from treeopt.optimize.build_report import curve_report, few_texts, fitted_texts, texts_of
    from treeopt.optimize.curve import Timing, calibration_curve

    if not options["profile"] and (options["batch"] != 1 or options["context"]):
        raise click.UsageError("--batch-size and --context choose from a --profile")
    shared.check_outputs(options, options["output"], kind=PICTURE)
    check_suffix(options["output"], ".svg")
    calibration = treeopt.load_calibration(options["calibration"])
    shared.check_temperature_of([calibration], options["temperature"])
    timing = None
    if options["profile"]:
        timing = Timing(treeopt.load_profile(options["profile"]), options["batch"], options["context"])
        timing.seconds(ONE_NODE)  # speedups refer to one node: fail before any work
        check_priced(timing.profile, calibration, options["kind"])
        console.warn(*profile_for_others(timing.profile, calibration))
    more = {"kind": options["kind"], "largest": options["largest"], "top_k": shared.ranks_of(options)}
    check_belongs(("max_rank",), "--kind static", holds=options["kind"] == KINDS[0])
    with console.progress("curve") as progress:
        curve = calibration_curve(calibration, timing, **more, progress=late(progress))
    from treeopt.view.charts import render_curve
    from treeopt.view.report_data import last_name

    title = f"{last_name(calibration.provenance.model) or 'a model'}: {options['kind']} trees by size"
    note = f"Tokens per step (1 + accepted drafts): {texts_of(calibration)}."
    if timing is not None:
        of = timing.profile
        context = options["context"] or max(one.context for one in of.points if one.batch == options["batch"])
        how = "Modelled seconds of a step, not measured" if of.provenance.get("modelled") else "Seconds of a step"
        note += f"\n{how}: {machine(of.provenance)}; batch {options['batch']}"
        note += f", {context} tokens in the cache." if context > 1 else "."  # a CSV file may name none
    write_marked(options["output"], render_curve(curve, title, note), PICTURE, console.configuration)
    console.report(*curve_report(curve, calibration, options["kind"]))
    if options["kind"] == KINDS[0]:
        console.warn(*fitted_texts(calibration))
    console.warn(*few_texts(calibration))
    console.note(f"wrote {options['output']}")
    console.result({"output": options["output"]})
