"""`treeopt curve`: tokens per step, overhead and speedup for every size of tree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from treeopt.cli.checks import check_static_only, check_suffix, given
from treeopt.cli.console import Console, command
from treeopt.cli.options import (
    calibration_option,
    check_outputs,
    check_temperature_of,
    force_option,
    max_rank_option,
    ranks_of,
    step_options,
    temperature_option,
)
from treeopt.defaults import (
    CURVE_LARGEST,
    DEFAULT_TOP_K,
    DEFAULT_VALUES,
    DEFAULT_WEIGHTS,
    KINDS,
    MAX_NODES,
    ONE_NODE,
    STEP_SIZES,
    VALUES,
    WEIGHTS,
)
from treeopt.facts import Column, Table
from treeopt.files.outputs import PICTURE, write_marked
from treeopt.progress import late

if TYPE_CHECKING:
    from treeopt.calibration import Calibration
    from treeopt.optimize.curve import Curve, Timing
    from treeopt.optimize.select_method import Method


_LARGEST_HELP = f"Largest tree, at most {MAX_NODES:,} nodes [default: the profile's, else {CURVE_LARGEST}]."


@command("curve")
@calibration_option
@click.option("--kind", type=click.Choice(KINDS), default=KINDS[0], help="Kind of the trees.")
@click.option("--profile", help="Seconds per step, from `treeopt profile`: adds overhead and speedup.")
@step_options
@click.option("--largest", type=click.IntRange(min=1), help=_LARGEST_HELP)
@click.option("--values", type=click.Choice(VALUES), default=DEFAULT_VALUES, help="As build.")
@click.option("--weights", type=click.Choice(WEIGHTS), default=DEFAULT_WEIGHTS, help="As build.")
@max_rank_option
@temperature_option
@force_option
@click.option("-o", "--output", default="curve.svg", help="File to write.")
def run(console: Console, **options: Any) -> None:
    """Show tokens per step, and with a profile overhead and speedup, for trees of each size.

    Static trees are cross-validated: each text is replayed by trees that were fitted without it. The sampling interval
    is that of the expected figure, the prediction interval that of the figure on as many new prompts, both 90 %.
    Per-step trees (--kind dynamic) are not fitted to the traces.
    """
    from treeopt.files.calibrations import load_calibration
    from treeopt.models.origins import profile_for_others
    from treeopt.optimize.budget import check_priced
    from treeopt.optimize.build_report import by_one_growth, few_texts, texts_of

    if not options["profile"] and (options["batch"] != 1 or options["context"]):
        raise click.UsageError("--batch-size and --context choose from a --profile")
    check_outputs(options, options["output"], kind=PICTURE)
    check_suffix(options["output"], ".svg")
    calibration = load_calibration(options["calibration"])
    check_temperature_of([calibration], options["temperature"])
    timing = _timing(options)
    if timing is not None:
        check_priced(timing.profile, calibration, options["kind"])
    console.warn(*profile_for_others(timing.profile if timing else None, calibration))
    more = {"kind": options["kind"], "largest": options["largest"], "top_k": ranks_of(options)}
    curve = measured_curve(console, calibration, timing, methods=_methods(options), **more)
    from treeopt.view.charts import render_curve

    write_marked(options["output"], render_curve(curve), PICTURE, console.configuration)
    columns = (
        Column("nodes", lambda point: f"{point.nodes} best" if point.nodes == curve.best else point.nodes),
        Column("tokens/step", "tokens_per_step", ".3f"),
        Column("new prompts, 90 %", "prediction", ".3f"),
        Column("overhead", "overhead", ".2f"),
        Column("speedup", "speedup", ".2f"),
    )
    console.report(
        Table(columns, curve.points),
        f"tokens per step over {texts_of(calibration)}; {curve.method}",
        by_one_growth(curve.points[-1].nodes) if options["kind"] == KINDS[0] else None,
    )
    console.warn(*few_texts(calibration))
    console.note(f"wrote {options['output']}")
    texts = {"texts": calibration.sequences, "texts_distinct": calibration.distinct}
    console.result({**vars(curve), **texts, "output": options["output"]})


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


def _methods(options: dict[str, Any]) -> Sequence[Method] | None:
    """The methods of static trees to choose from."""
    from treeopt.optimize.select_method import candidates

    if options["kind"] == KINDS[1]:
        check_static_only(("values", "weights", "max_rank"))
        return None
    return candidates(options["values"], options["weights"], exactly=given("values") and given("weights"))


def measured_curve(
    console: Console,
    calibration: Calibration,
    timing: Timing | None,
    *,
    kind: str = KINDS[0],
    largest: int | None = None,
    methods: Sequence[Method] | None = None,
    top_k: int = DEFAULT_TOP_K,
) -> Curve:
    """The curve of trees of a kind up to the largest size that is given, and that of the profile.

    Static trees are those of the best of `methods`, by default of the defaults.
    """
    from treeopt.optimize.curve import default_sizes, measure_curve, policy_curve
    from treeopt.optimize.select_method import Fitter, candidates
    from treeopt.optimize.tree_builder import check_size, tree_limits

    bounds = [] if largest is None else [largest]
    bounds += [min(timing.largest, MAX_NODES)] if timing else []
    most = min(bounds, default=CURVE_LARGEST)
    if kind == KINDS[1]:
        return policy_curve(calibration, default_sizes(min(most, STEP_SIZES[-1])), timing)
    limits = tree_limits(calibration, most, top_k=top_k)
    check_size(limits, calibration.num_heads, "--largest")
    chosen = candidates(DEFAULT_VALUES, DEFAULT_WEIGHTS, exactly=False) if methods is None else methods
    with console.progress("curve") as progress:
        fitter = Fitter(calibration, limits, progress=late(progress))
        curve = measure_curve(fitter, fitter.choose(chosen).method, default_sizes(most), timing)
    if not fitter.can_leave_out:
        console.warn("warning: too few different texts for cross-validation; the figures are of the fitted texts")
    return curve
