"""`treeopt curve`: tokens per step, overhead and speedup for every size of tree."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from treeopt.cli.build_dynamic import by_one_growth, texts_of, warn_few_texts
from treeopt.cli.console import Console, command
from treeopt.cli.early_checks import check_static_only, check_suffix, given
from treeopt.cli.mismatch import warn_other_heads
from treeopt.cli.options import calibration_option, check_outputs, force_option, max_rank_option, ranks_of, step_options
from treeopt.cli.sampling_options import check_temperature_of, temperature_option
from treeopt.defaults import (
    CURVE_LARGEST,
    DEFAULT_VALUES,
    DEFAULT_WEIGHTS,
    KINDS,
    MAX_NODES,
    ONE_NODE,
    VALUES,
    WEIGHTS,
)
from treeopt.files.outputs import PICTURE, write_marked

if TYPE_CHECKING:
    from treeopt.calibration import Calibration
    from treeopt.optimize.curve import Curve, Timing
    from treeopt.optimize.intervals import Interval


_LARGEST_HELP = f"Largest tree, at most {MAX_NODES:,} nodes [default: the profile's, else {CURVE_LARGEST}]."


@command("curve")
@calibration_option
@click.option("--kind", type=click.Choice(KINDS), default=KINDS[0], show_default=True, help="Kind of the trees.")
@click.option("--profile", help="Seconds per step, from `treeopt profile`: adds overhead and speedup.")
@step_options
@click.option("--largest", type=click.IntRange(min=1), help=_LARGEST_HELP)
@click.option("--values", type=click.Choice(VALUES), default=DEFAULT_VALUES, show_default=True, help="As build.")
@click.option(
    "--weights",
    type=click.Choice(WEIGHTS),
    default=DEFAULT_WEIGHTS,
    show_default=True,
    help="As build.",
)
@max_rank_option
@temperature_option
@force_option
@click.option("-o", "--output", default="curve.svg", show_default=True, help="File to write.")
def run(console: Console, **options: Any) -> None:
    """Show tokens per step, and with a profile overhead and speedup, for trees of each size.

    Static trees are cross-validated: each text is replayed by trees that were fitted without it. The sampling interval
    is that of the expected figure, the prediction interval that of the figure on as many new prompts, both 90 %.
    Per-step trees (--kind dynamic) are not fitted to the traces.
    """
    from treeopt.files.calibrations import load_calibration
    from treeopt.optimize.budget import check_priced

    if not options["profile"] and (options["batch"] != 1 or options["context"]):
        raise click.UsageError("--batch-size and --context choose from a --profile")
    check_outputs(options, options["output"], kind=PICTURE)
    check_suffix(options["output"], ".svg")
    calibration = load_calibration(options["calibration"])
    check_temperature_of([calibration], options["temperature"])
    timing = _timing(options)
    if timing is not None:
        check_priced(timing.profile, calibration, options["kind"])
    warn_other_heads(console, calibration, timing.profile if timing else None)
    curve = _measure(console, calibration, timing, options)
    from treeopt.view.charts import render_curve

    write_marked(options["output"], render_curve(curve), PICTURE, console.configuration)
    _report(console, curve)
    console.say(f"tokens per step over {texts_of(calibration)}; {curve.method}")
    if options["kind"] == KINDS[0]:
        console.say(by_one_growth(curve.points[-1].nodes))
    warn_few_texts(console, calibration)
    console.note(f"wrote {options['output']}")
    texts = {"texts": calibration.sequences, "texts_distinct": calibration.distinct}
    console.result({**_as_dict(curve), **texts, "output": options["output"]})


command = run


def _timing(options: dict[str, Any]) -> Timing | None:
    """The profile with its batch and context, after checking that it has the step of one node."""
    from treeopt.files.profiles import load_profile
    from treeopt.optimize.curve import Timing

    if not options["profile"]:
        return None
    timing = Timing(load_profile(options["profile"]), options["batch"], options["context"])
    timing.seconds(ONE_NODE)  # speedups refer to one node: fail before any work
    return timing


def _measure(console: Console, calibration: Calibration, timing: Timing | None, options: dict[str, Any]) -> Curve:
    """The curve up to the largest size of the options and the profile."""
    from treeopt.cli.curve_figures import measured_curve
    from treeopt.optimize.select_method import candidates

    methods = None
    if options["kind"] == KINDS[1]:
        check_static_only(("values", "weights", "max_rank"))
    else:
        exactly = given("values") and given("weights")
        methods = candidates(options["values"], options["weights"], refined=False, exactly=exactly)
    more = {"kind": options["kind"], "largest": options["largest"], "top_k": ranks_of(options)}
    return measured_curve(console, calibration, timing, methods=methods, **more)


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
