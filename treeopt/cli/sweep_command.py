"""`treeopt sweep`: the ablations of the Medusa paper on any model and prompts, as a table, a picture and a CSV."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from treeopt.cli.build_dynamic import warn_few_texts
from treeopt.cli.console import Console, command
from treeopt.cli.early_checks import check_belongs, check_once, check_suffix, given
from treeopt.cli.following import follows
from treeopt.cli.mismatch import warn_other_heads
from treeopt.cli.numbers import SEED, Temperature, numbers_option, shares_option
from treeopt.cli.options import (
    calibrations_option,
    check_outputs,
    chosen_prompts,
    force_option,
    model_options,
    prompt_options,
)
from treeopt.cli.processes import division_of, nproc_option
from treeopt.cli.sweep_dense_report import of_dense
from treeopt.cli.sweep_epsilon_report import of_epsilon
from treeopt.cli.sweep_report import Report, as_csv, print_report
from treeopt.cli.sweep_traces_report import of_levels, of_sizes, of_texts
from treeopt.cli.tree_options import chosen_plan, load_with_prompts, plan_options
from treeopt.cli.work_options import not_resumable
from treeopt.defaults import (
    DEFAULT_TOP_K,
    DENSE_TREES,
    EPSILON_TEMPERATURE,
    EPSILONS,
    FEWEST_DENSE,
    LARGEST_DENSE,
    LEVELS_SIZES,
    MAX_NODES,
    ONE_NODE,
    SIZES_SIZES,
    SWEEP_DRAWS,
    SWEEP_NODES,
)
from treeopt.files.atomic import write_text
from treeopt.files.configurations import write_note
from treeopt.files.marks import PICTURE, write_marked
from treeopt.progress import late

if TYPE_CHECKING:
    from treeopt.calibration import Calibration


_DENSE, _LEVELS, _SIZES, _EPSILON, _TEXTS = "dense", "levels", "sizes", "epsilon", "calibration_size"
_MOST_DENSE = 1024  # nodes of dense trees: there are about a hundred thousand of them on five levels
_NODES_HELP = (
    f"Nodes of the sparse trees, root counted [default: {SWEEP_NODES} for --dense and --calibration-size, "
    f"{','.join(map(str, LEVELS_SIZES))} for --levels, {','.join(map(str, SIZES_SIZES))} for --sizes]."
)
_EPSILONS_HELP = f"For --epsilon; delta is the square root [default: {','.join(map(str, EPSILONS))}]."
_TRACED = (_DENSE, _LEVELS, _SIZES, _TEXTS)
_USED_BY = {  # options -> the sweeps that use them
    ("calibrations",): _TRACED,
    ("nodes", "top_k"): _TRACED,
    ("trees", "largest", "profile", "batch", "context"): (_DENSE,),
    ("seed",): (_DENSE, _TEXTS),
    ("draws",): (_TEXTS,),
    ("epsilons", "temperature", "heads", "model", "adapter", "device", "dtype", "tree", "drafter", "draft"): (
        _EPSILON,
    ),
    ("prompts", "skip", "limit", "chat_template", "max_new_tokens", "batch_size", "nproc"): (_EPSILON,),
    ("device_map",): (_EPSILON,),
}


@command("sweep")
@click.option("--dense", is_flag=True, help="Random dense trees against optimised sparse ones (figure 4).")
@click.option("--levels", is_flag=True, help="Trees on the first 1, 2, ... levels (heads).")
@click.option("--sizes", is_flag=True, help="Trees by nodes, of several methods and drafters.")
@click.option("--epsilon", is_flag=True, help="Typical acceptance by epsilon (figure 5); runs the model.")
@click.option("--calibration-size", is_flag=True, help="How many prompts a calibration needs.")
@calibrations_option(
    "Traces, from `treeopt calibrate`; for --sizes one or more, of different drafters on the same prompts."
)
@numbers_option("--nodes", help=_NODES_HELP)
@click.option("--top-k", type=click.IntRange(min=1), default=DEFAULT_TOP_K, show_default=True, help="Ranks per level.")
@click.option(
    "--trees",
    type=click.IntRange(min=0),
    default=DENSE_TREES,
    show_default=True,
    help="Random dense trees; 0: all.",
)
@click.option(
    "--largest",
    type=click.IntRange(FEWEST_DENSE, _MOST_DENSE),
    default=LARGEST_DENSE,
    show_default=True,
    help="Nodes of the largest dense trees.",
)
@click.option("--profile", help="Seconds per step of static trees, from `treeopt profile`: --dense has speedups too.")
@click.option("--batch", type=click.IntRange(min=1), default=1, show_default=True, help="Batch of the profile.")
@click.option("--context", type=click.IntRange(min=1), help="Context of the profile [default: its longest].")
@click.option(
    "--draws",
    type=click.IntRange(1, 1000),
    default=SWEEP_DRAWS,
    show_default=True,
    help="Random splits of the texts, for --calibration-size.",
)
@click.option("--seed", type=SEED, default=0, show_default=True, help="Of the random trees and splits.")
@shares_option("--epsilons", help=_EPSILONS_HELP)
@click.option(
    "--temperature",
    type=Temperature(),
    default=EPSILON_TEMPERATURE,
    show_default=True,
    help="Of typical and sampled texts.",
)
@functools.partial(model_options, dtype="float32")
@prompt_options
@plan_options
@click.option(
    "--batch-size", type=click.IntRange(min=1), default=1, show_default=True, help="Prompts decoded together."
)
@nproc_option
@click.option("--csv", help="File of the figures [default: that of -o, with the suffix .csv].")
@force_option
@click.option("-o", "--output", default="sweep.svg", show_default=True, help="File to write.")
def run(console: Console, **options: Any) -> None:
    """Vary one thing and print tokens per step: one of the first five options says what is varied.

    The figures are those of the Medusa paper (arXiv:2401.10774), for your model and prompts. All but --epsilon need a
    calibration and no model; trees are judged on texts that were left out of their fit. Intervals are 90 %.

    --dense: dense trees have the s_k likeliest candidates of each level k after every node. Each of the possible trees
    is equally likely. Sparse trees are the Medusa tree and the tree that `build` would choose.

    --sizes: ratios are to the Medusa tree of the first calibration of heads alone, on the texts that all calibrations
    hold.

    --epsilon: each line is what `validate --acceptance typical` finds with this epsilon. The tokens per step of greedy
    and sampled texts are those of the same tree under exact acceptance.

    --calibration-size: in each draw every fifth of the texts is judged by trees from n of the other texts.
    """
    from treeopt.files.outputs import check_distinct

    sweep = _chosen(options)
    if sweep != _EPSILON and follows():  # torchrun may have started several, and one is enough
        sys.exit(0)
    check_outputs(options, options["output"], kind=PICTURE)
    check_suffix(options["output"], ".svg")
    options["csv"] = options["csv"] or str(Path(options["output"]).with_suffix(".csv"))
    check_outputs(options, options["csv"])
    check_suffix(options["csv"], ".csv", option="--csv")
    check_distinct(options["output"], options["csv"])
    check_once("calibrations", options["calibrations"])
    with not_resumable(console, options):
        report = _SWEEPS[sweep](console, options)
    from treeopt.view.charts import render_chart

    write_text(options["csv"], as_csv(report))
    write_note(options["csv"], console.configuration)
    write_marked(options["output"], render_chart(report.chart, report.title), PICTURE, console.configuration)
    print_report(console, report)
    console.note(f"wrote {options['output']} and {options['csv']}")
    more = {"output": options["output"], "csv": options["csv"]}
    console.result({"sweep": sweep.replace("_", "-"), **report.data, "points": report.points, **more})


command = run


def _chosen(options: dict[str, Any]) -> str:
    """The sweep that is chosen; a usage error where none or several are, or an option belongs to another one."""
    chosen = [name for name in _SWEEPS if options[name]]
    names = [_option(name) for name in chosen or _SWEEPS]
    if len(chosen) != 1:
        raise click.UsageError(f"give one of {', '.join(names[:-1])} and {names[-1]}")
    for used, sweeps in _USED_BY.items():
        check_belongs(used, " or ".join(map(_option, sweeps)), chosen[0] in sweeps)
    if max(options["nodes"], default=0) > MAX_NODES:
        raise click.BadParameter(f"a tree has {MAX_NODES:,} nodes at most", param_hint="--nodes")
    if not options["profile"] and (given("batch") or given("context")):
        raise click.UsageError("--batch and --context choose from a --profile")
    if options["temperature"] == 0:
        raise click.UsageError("--temperature 0 is greedy decoding, whatever epsilon is")
    return chosen[0]


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _one_calibration(console: Console, options: dict[str, Any]) -> Calibration:
    from treeopt.files.calibrations import load_calibration

    if len(options["calibrations"]) > 1:
        raise click.UsageError("only --sizes takes more than one --calibration")
    [file] = options["calibrations"]
    calibration = load_calibration(file)
    warn_few_texts(console, calibration)
    return calibration


def _dense(console: Console, options: dict[str, Any]) -> Report:
    from treeopt.files.profiles import load_profile
    from treeopt.optimize.curve import Timing
    from treeopt.optimize.sweep_dense import sweep_dense

    calibration, timing = _one_calibration(console, options), None
    if options["profile"]:
        timing = Timing(load_profile(options["profile"]), options["batch"], options["context"])
        timing.seconds(ONE_NODE)  # speedups refer to one node: fail before any work
        warn_other_heads(console, calibration, timing.profile)
    if timing is not None and not given("largest"):
        options["largest"] = min(options["largest"], max(timing.largest, FEWEST_DENSE))
    chosen = {name: options[name] for name in ("trees", "largest", "top_k", "seed")}
    chosen |= {"sizes": options["nodes"] or (SWEEP_NODES,), "timing": timing}
    with console.progress("sweep") as progress:
        found = sweep_dense(calibration, progress=late(progress), **chosen)
    return of_dense(found, calibration)


def _levels(console: Console, options: dict[str, Any]) -> Report:
    from treeopt.optimize.sweep_levels import sweep_levels

    calibration = _one_calibration(console, options)
    sizes = options["nodes"] or LEVELS_SIZES
    with console.progress("sweep") as progress:
        found = sweep_levels(calibration, sizes=sizes, top_k=options["top_k"], progress=late(progress))
    return of_levels(found, calibration)


def _sizes(console: Console, options: dict[str, Any]) -> Report:
    from treeopt.files.calibrations import load_calibration
    from treeopt.optimize.sweep_sizes import sweep_sizes

    calibrations = {file: load_calibration(file) for file in options["calibrations"]}
    sizes = options["nodes"] or SIZES_SIZES
    with console.progress("sweep") as progress:
        found = sweep_sizes(calibrations, sizes=sizes, top_k=options["top_k"], progress=late(progress))
    return of_sizes(found, calibrations)


def _texts(console: Console, options: dict[str, Any]) -> Report:
    from treeopt.optimize.sweep_texts import sweep_texts

    calibration = _one_calibration(console, options)
    if len(options["nodes"]) > 1:
        raise click.UsageError("--calibration-size takes one number of --nodes")
    chosen = {name: options[name] for name in ("draws", "top_k", "seed")}
    [nodes] = options["nodes"] or (SWEEP_NODES,)
    with console.progress("sweep") as progress:
        found = sweep_texts(calibration, nodes=nodes, progress=late(progress), **chosen)
    return of_texts(found, calibration)


def _epsilon(console: Console, options: dict[str, Any]) -> Report:
    source, chosen = chosen_prompts(options), chosen_plan(options)
    division = division_of(options)
    used, encoded = load_with_prompts(console, options, chosen, source)
    from treeopt.evaluate.sweep_epsilon import sweep_epsilon

    settings = {name: options[name] for name in ("max_new_tokens", "batch_size", "chat_template", "temperature")}
    settings |= {"epsilons": options["epsilons"] or EPSILONS, "drafter": used.drafter, "draft": used.draft}
    settings["division"] = division
    with console.progress("sweep") as progress:
        found = sweep_epsilon(used.base, used.heads, used.plan, encoded.texts, progress=progress, **settings)
    return of_epsilon(found, used.base.name, encoded.skipped)


_SWEEPS: dict[str, Callable[[Console, dict[str, Any]], Report]] = {
    _DENSE: _dense,
    _LEVELS: _levels,
    _SIZES: _sizes,
    _EPSILON: _epsilon,
    _TEXTS: _texts,
}
