"""`treeopt curve`: tokens per step, overhead and speedup for every size of tree."""

from __future__ import annotations

from typing import Any

import click

from treeopt.calibration import Calibration
from treeopt.cli.build_dynamic import texts_of, warn_few_texts
from treeopt.cli.console import Console, command
from treeopt.cli.early_checks import check_static_only, check_suffix, given
from treeopt.cli.mismatch import warn_other_heads
from treeopt.cli.options import calibration_option, check_outputs, force_option
from treeopt.cli.sampling_options import check_temperature_of, temperature_option
from treeopt.drafter import KINDS
from treeopt.files.calibrations import load_calibration
from treeopt.files.marks import PICTURE, write_marked
from treeopt.files.profiles import load_profile
from treeopt.latency import ONE_NODE
from treeopt.optimize.budget import check_priced
from treeopt.optimize.curve import Curve, Timing, default_sizes, measure_curve, policy_curve
from treeopt.optimize.intervals import Interval
from treeopt.optimize.methods import VALUES, WEIGHTS, candidates
from treeopt.optimize.select_method import Fitter
from treeopt.optimize.tree_builder import DEFAULT_TOP_K, MAX_NODES, check_size, tree_limits
from treeopt.policy import STEP_SIZES
from treeopt.progress import late

_LARGEST = 256
_LARGEST_HELP = f"Largest tree, at most {MAX_NODES:,} nodes [default: the profile's, else {_LARGEST}]."


@command("curve")
@calibration_option
@click.option("--kind", type=click.Choice(KINDS), default=KINDS[0], show_default=True, help="Kind of the trees.")
@click.option("--profile", help="Seconds per step, by `treeopt profile`: adds overhead and speedup.")
@click.option("--batch", type=click.IntRange(min=1), default=1, show_default=True, help="Batch of the profile.")
@click.option("--context", type=click.IntRange(min=1), help="Context of the profile [default: its longest].")
@click.option("--largest", type=click.IntRange(min=1), help=_LARGEST_HELP)
@click.option("--values", type=click.Choice(VALUES), default="joint", show_default=True)
@click.option("--weights", type=click.Choice(WEIGHTS), default="visits", show_default=True)
@click.option("--top-k", type=click.IntRange(min=1), default=DEFAULT_TOP_K, show_default=True, help="Ranks per level.")
@temperature_option
@force_option
@click.option("-o", "--output", default="curve.svg", show_default=True)
def run(console: Console, **options: Any) -> None:
    """Show tokens per step, and with a profile overhead and speedup, for trees of each size.

    Static trees are cross-validated: each text is replayed by trees that were fitted without it. The sampling interval
    is that of the expected figure, the prediction interval that of the figure on as many new prompts, both 90 %.
    Per-step trees (--kind dynamic) are not fitted to the traces.
    """
    if not options["profile"] and (options["batch"] != 1 or options["context"]):
        raise click.UsageError("--batch and --context choose from a --profile")
    check_outputs(options, options["output"], kind=PICTURE)
    check_suffix(options["output"], ".svg")
    calibration = load_calibration(options["calibration"])
    check_temperature_of([calibration], options["temperature"])
    timing = _timing(options)
    if timing is not None:
        check_priced(timing.profile, calibration, options["kind"])
    warn_other_heads(console, calibration, timing.profile if timing else None)
    curve = _measure(console, calibration, timing, options)
    from treeopt.view.curve import render_curve

    write_marked(options["output"], render_curve(curve), PICTURE)
    _report(console, curve)
    console.say(f"tokens per step over {texts_of(calibration)}")
    warn_few_texts(console, calibration)
    console.note(f"wrote {options['output']}")
    texts = {"texts": calibration.sequences, "texts_distinct": calibration.distinct}
    console.result({**_as_dict(curve), **texts, "output": options["output"]})


command = run


def _timing(options: dict[str, Any]) -> Timing | None:
    """The profile with its batch and context, after checking that it has the step of one node."""
    if not options["profile"]:
        return None
    timing = Timing(load_profile(options["profile"]), options["batch"], options["context"])
    timing.seconds(ONE_NODE)  # speedups refer to one node: fail before any work
    return timing


def _measure(console: Console, calibration: Calibration, timing: Timing | None, options: dict[str, Any]) -> Curve:
    """The curve up to the largest size of the options and the profile."""
    bounds = [options["largest"]] if options["largest"] else []
    bounds += [min(timing.largest, MAX_NODES)] if timing else []
    largest = min(bounds, default=_LARGEST)
    if options["kind"] == "dynamic":
        check_static_only(("values", "weights", "top_k"))
        return policy_curve(calibration, default_sizes(min(largest, STEP_SIZES[-1])), timing)
    exactly = given("values") and given("weights")
    methods = candidates(options["values"], options["weights"], refined=False, exactly=exactly)
    limits = tree_limits(calibration, largest, top_k=options["top_k"])
    check_size(limits, calibration.num_heads, "--largest")
    with console.progress("curve") as progress:
        fitter = Fitter(calibration, limits, progress=late(progress))
        curve = measure_curve(fitter, fitter.choose(methods).method, default_sizes(largest), timing)
    if not fitter.can_leave_out:
        console.warn("warning: too few different texts for cross-validation; the figures are of the fitted texts")
    return curve


def _report(console: Console, curve: Curve) -> None:
    rows = []
    for point in curve.points:
        speed = ["-", "-"] if point.speedup is None else [f"{point.overhead:.2f}", f"{point.speedup:.2f}"]
        interval = point.prediction
        shown = "-" if interval is None else f"{interval.low:.3f}-{interval.high:.3f}"
        mark = " best" if point.nodes == curve.best else ""
        rows.append([f"{point.nodes}{mark}", f"{point.tokens_per_step:.3f}", shown, *speed])
    console.table(["nodes", "tokens/step", "new prompts, 90 %", "overhead", "speedup"], rows)


def _as_dict(curve: Curve) -> dict[str, Any]:
    """The curve with the keys of `--json`."""
    points = [
        {**vars(point), "sampling": _ends(point.sampling), "prediction": _ends(point.prediction)}
        for point in curve.points
    ]
    return {"points": points, "best": curve.best, "method": curve.method, "expected": curve.expected}


def _ends(interval: Interval | None) -> dict[str, float] | None:
    return None if interval is None else vars(interval)
