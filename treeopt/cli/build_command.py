"""`treeopt build`: rank traces to a tree."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import click

from treeopt.cli.build_auto import run_auto
from treeopt.cli.build_dynamic import AUTO, by_one_growth, check_profile, run_dynamic, texts_of, warn_few_texts
from treeopt.cli.configuration import with_configuration
from treeopt.cli.console import Console, command
from treeopt.cli.early_checks import check_suffix, given
from treeopt.cli.engine_report import limits_as_dict, report_limits, report_refusing
from treeopt.cli.mismatch import warn_other_heads
from treeopt.cli.numbers import FiniteRange
from treeopt.cli.options import (
    HOLDOUT_HELP,
    calibrations_option,
    check_outputs,
    force_option,
    max_rank_option,
    ranks_of,
    step_options,
)
from treeopt.cli.sampling_options import check_temperature_of, temperature_option
from treeopt.defaults import (
    DEFAULT_TOP_K,
    DEFAULT_VALUES,
    DEFAULT_WEIGHTS,
    KINDS,
    MAX_NODES,
    STEP_SIZES,
    VALUES,
    WEIGHTS,
)
from treeopt.engines import ALL_LEVELS, ENGINES
from treeopt.errors import counted
from treeopt.files.outputs import TREE
from treeopt.progress import Progress, late

if TYPE_CHECKING:
    from treeopt.calibration import Calibration
    from treeopt.export.lint import Constrained
    from treeopt.optimize.build_job import BuildJob, Built, Judgement


class _Nodes(click.ParamType[int | str]):
    """A number of nodes, or `auto`."""

    name = "N|auto"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        if value == AUTO:
            return AUTO
        return click.IntRange(min=1).convert(value, param, ctx)


_NODES_HELP = f"Budget, root counted, at most {MAX_NODES:,} ({STEP_SIZES[-1]} for dynamic); auto: the fastest size."
_ESTIMATE_HELP = "With --{} given too, exactly these; else the Medusa tree is a candidate as well."


@command("build")
@calibrations_option(
    "Traces, from `treeopt calibrate`; one for each task of a mixture, and for each drafter of --drafter auto."
)
@click.option("--drafter", type=click.Choice([AUTO]), help="auto: the fastest drafter, kind and size of all.")
@click.option("--nodes", type=_Nodes(), default=64, show_default=True, help=_NODES_HELP)
@click.option(
    "--kind",
    type=click.Choice(KINDS),
    default=KINDS[0],
    show_default=True,
    help="static: one tree for all steps; dynamic: a tree for each step, of the most likely nodes.",
)
@click.option(
    "--profile",
    multiple=True,
    help="Seconds per step, from `treeopt profile`, for --nodes auto; one for each drafter and kind of --drafter auto.",
)
@step_options
@click.option(
    "--values",
    type=click.Choice(VALUES),
    default=DEFAULT_VALUES,
    show_default=True,
    help=_ESTIMATE_HELP.format("weights"),
)
@click.option(
    "--weights",
    type=click.Choice(WEIGHTS),
    default=DEFAULT_WEIGHTS,
    show_default=True,
    help=_ESTIMATE_HELP.format("values"),
)
@click.option("--refine", type=FiniteRange(min=0), default=0.0, help="Seconds for exchanging nodes, in all.")
@max_rank_option
@click.option("--contiguous", is_flag=True, help="Siblings have the ranks 0, 1, .. without a gap.")
@click.option(
    "--for", "engine", type=click.Choice(list(ENGINES)), help="Keep the limits of an engine (treeopt show --for)."
)
@click.option("--max-depth", type=click.IntRange(min=0), help="Longest path [default: the number of levels].")
@click.option("--holdout", type=click.IntRange(min=1), help=HOLDOUT_HELP)
@click.option("--mix", help="Weights of the tasks, e.g. 3,1 [default: by their tokens].")
@click.option("--robust", is_flag=True, help="Minimise the loss on the worst of several tasks.")
@temperature_option
@force_option
@click.option("-o", "--output", default="tree.yaml", show_default=True, help="File to write.")
def run(console: Console, **options: Any) -> None:
    """Build the tree with the most tokens per step for a number of nodes.

    Node values are estimated from the traces. Several estimates are compared by cross-validation over texts; the Medusa
    tree (--values independent --weights uniform) is a candidate unless both options are given. Then the tree is
    replayed over the traces, which gives exactly the steps of a decoder on that text.

    Traces of sampled texts (`treeopt calibrate --temperature`) have the target's probability of each candidate, and
    tokens per step are then sums of probabilities, at the temperature of the traces.

    With --kind dynamic the drafter's estimates choose the nodes of each step, so no tree is grown: the file holds the
    number of nodes and the drafter. With --nodes auto each step takes the size that is worth its time.

    With --for, --contiguous or --max-rank the tree is the best one under these limits, and what they cost is printed:
    the tokens per step of the tree of the same size without them.

    With --drafter auto calibrations of several drafters compete: the drafter, kind and size with the most tokens per
    second by the profiles are taken, the time of drafting included. --kind and --nodes, where given, leave less to
    choose from.
    """
    if options["drafter"] == AUTO:
        run_auto(console, options)
        return
    if len(options["profile"]) > 1:
        raise click.UsageError("several --profile belong to --drafter auto")
    options["profile"] = next(iter(options["profile"]), None)
    if options["kind"] == KINDS[0]:
        _run_static(console, options)
    else:
        run_dynamic(console, options)


command = run


def _run_static(console: Console, options: dict[str, Any]) -> None:
    """A tree from one calibration, or from one a task."""
    from treeopt.files.calibrations import load_calibration
    from treeopt.files.trees import save_tree

    files = options["calibrations"]
    check_outputs(options, options["output"], kind=TREE)
    check_suffix(options["output"], ".yaml", ".yml")
    job = _job(options, len(files))
    calibrations = [load_calibration(file) for file in files]
    check_temperature_of(calibrations, options["temperature"])
    warn_other_heads(console, calibrations[0], job.profile)
    with console.progress("build") as progress:
        built, constrained = _build(calibrations, job, late(progress))
    save_tree(with_configuration(built.tree, console.configuration), options["output"])
    # The texts held out are read only after the file is written, so nothing can be fitted to them.
    judgement = built.judgement()
    _report(console, built, options["output"])
    _report_choice(console, built)
    if constrained is not None:
        report_limits(console, constrained, job.engine)
    refusing = report_refusing(console, built.tree) if constrained is None else []
    _report_tasks(console, built, files)
    _report_judgement(console, judgement, _medusa(built))
    limits: dict[str, Any] = {"not_exportable_to": refusing}
    if constrained is not None:
        limits = {"limits": limits_as_dict(constrained, job.engine)}
    console.result(_as_dict(built, judgement, options["output"]) | limits)


def _build(calibrations: list[Calibration], job: BuildJob, progress: Progress) -> tuple[Built, Constrained | None]:
    """The tree of a job; under limits for an engine, with what they cost."""
    from treeopt.optimize.build_job import run_job

    if not job.constrained:
        return run_job(calibrations, job, progress=progress), None
    from treeopt.export.lint import build_for

    constrained = build_for(calibrations, job, progress=progress)
    return constrained.built, constrained


def _job(options: dict[str, Any], tasks: int) -> BuildJob:
    """The job of the options; contradicting options are refused."""
    from treeopt.files.profiles import load_profile
    from treeopt.optimize.build_job import BuildJob

    auto = options["nodes"] == AUTO
    check_profile(options)
    if tasks == 1 and (options["mix"] is not None or options["robust"]):
        raise click.UsageError("--mix and --robust need several --calibration")
    if tasks > 1 and (options["holdout"] or options["refine"] or auto):
        raise click.UsageError("--holdout, --refine and --nodes auto take one --calibration")
    if options["mix"] is not None and options["robust"]:
        raise click.UsageError("--mix and --robust exclude each other")
    same = ("values", "weights", "max_rank", "max_depth", "batch", "context", "robust")
    return BuildJob(
        nodes=None if auto else options["nodes"],
        refine_seconds=options["refine"],
        holdout=options["holdout"] or 0,
        profile=load_profile(options["profile"]) if auto else None,
        shares=None if options["mix"] is None else _shares(options["mix"], tasks),
        exactly=given("values") and given("weights"),
        contiguous=ALL_LEVELS if options["contiguous"] else 0,
        engine=options["engine"] or "",
        top_k=max(DEFAULT_TOP_K, ranks_of(options)),
        **{name: options[name] for name in same},
    )


def _shares(text: str, tasks: int) -> list[float]:
    try:
        shares = [float(share) for share in text.split(",")]
    except ValueError as error:
        raise click.BadParameter("numbers separated by commas", param_hint="--mix") from error
    if len(shares) != tasks or not all(0 < share < math.inf for share in shares):
        raise click.BadParameter(f"{tasks} positive numbers, one for each calibration", param_hint="--mix")
    return shares


def _report(console: Console, built: Built, output: str) -> None:
    tree, expected = built.tree, built.tree.expected
    assert expected is not None
    if tree.nodes < built.budget:
        console.warn(
            f"warning: {counted(tree.nodes, 'node')}, not {built.budget}: no further path within the limits has a "
            f"value above 0 (K = {expected.top_k})"
        )
    console.say(
        f"{counted(tree.nodes, 'node')} = 1 root + {counted(len(tree.paths), 'draft')}, depth {tree.depth}, "
        f"{counted(len(tree.leaves), 'leaf')}, "
        f"K = {expected.top_k} ranks per {'level' if tree.drafter else 'head'}"
    )
    console.say(f"method                    {built.fit.method}")
    console.say(f"expected tokens per step  {expected.independent:.3f}  independent: 1 + sum of products of accuracies")
    console.say(f"                          {expected.replay:.3f}  replay: a decoder on {texts_of(built.fitted)}")
    if expected.cross_validated is not None:
        line = (
            f"                          {expected.cross_validated:.3f}  cross-validated: on texts left out of the fit"
        )
        if expected.low is None:
            console.say(line)
        else:
            more = 3 * built.fitted.distinct  # the width falls with the square root of the number of texts
            console.say(f"{line}; {expected.low:.3f} to {expected.high:.3f} on")
            console.say(
                f"                                 as many new prompts (90 %); {more} more prompts would halve that"
            )
    warn_few_texts(console, built.fitted)
    if built.fit.sums is None:
        taken = _medusa(built) if built.fit.method.is_medusa else f"method {built.fit.method}"
        console.warn(f"warning: too few different texts for cross-validation: {taken} is built")
    console.note(f"wrote {output}")


def _report_choice(console: Console, built: Built) -> None:
    if built.choice is None:
        return
    for label, budget in (("fastest", built.choice.best), ("64 nodes", built.choice.at_64)):
        if budget is not None:
            console.say(
                f"{label:9} {counted(budget.nodes, 'node')}: {budget.tokens_per_step:.3f} tokens per step, overhead "
                f"{budget.overhead:.2f}, speedup {budget.speedup:.2f} by the profile"
            )
    console.say(by_one_growth(built.choice.largest))


def _report_tasks(console: Console, built: Built, files: tuple[str, ...]) -> None:
    if built.matrix is None or built.mixed is None:
        return
    table = built.matrix.tokens_per_step
    rows = [[name, *(f"{tau:.3f}" for tau in row)] for name, row in zip(files, table, strict=True)]
    rows.append(["this tree (fitted to all)", *(f"{tau:.3f}" for tau in built.mixed.tokens_per_step)])
    rows.append(["share in the fit", *(f"{share:.2f}" for share in built.mixed.shares)])
    console.table(["tokens per step of the tree of / on", *files], rows)
    console.say("the diagonal is cross-validated where a task has five different texts or more")


def _medusa(built: Built) -> str:
    """The name of the tree by Medusa's method, which is the Medusa tree for traces of heads alone."""
    return "the tree of --values independent --weights uniform" if built.tree.drafter else "the Medusa tree"


def _report_judgement(console: Console, judgement: Judgement | None, medusa: str) -> None:
    if judgement is None:
        return
    interval, gain = judgement.interval, judgement.gain
    distinct = f", {judgement.distinct} distinct" if judgement.distinct != judgement.texts else ""
    between = "" if interval is None else f" ({interval.low:.3f} to {interval.high:.3f})"
    console.say(
        f"judged on {counted(judgement.texts, 'text')}{distinct} held out ({judgement.dropped} that were also fitted "
        f"dropped): {judgement.tokens_per_step:.4f}{between}"
    )
    between = "" if gain is None else f" ({gain.low:+.3f} to {gain.high:+.3f} tokens)"
    console.say(
        f"{medusa} on them: {judgement.medusa_tokens_per_step:.4f}; gain "
        f"{judgement.tokens_per_step / judgement.medusa_tokens_per_step - 1:+.2%}{between}"
    )


def _as_dict(built: Built, judgement: Judgement | None, output: str) -> dict[str, Any]:
    tree, choice, mixed = built.tree, built.choice, built.mixed
    assert tree.expected is not None
    data: dict[str, Any] = {
        "nodes": tree.nodes,
        "depth": tree.depth,
        "leaves": len(tree.leaves),
        "top_k": tree.expected.top_k,
        "method": str(built.fit.method),
        "expected_tokens_per_step": {name: value for name, value in vars(tree.expected).items() if name != "top_k"},
        "cross_validated_steps": built.fit.trials,
        "texts_fitted": built.fitted.sequences,
        "texts_distinct": built.fitted.distinct,
        "paths": tree.paths,
        "values": tree.values,
        "output": output,
    }
    if choice is not None:
        data["auto"] = {"best": vars(choice.best), "at_64": choice.at_64 and vars(choice.at_64)}
    if built.matrix is not None and mixed is not None:
        data["tasks"] = {
            "tokens_per_step": built.matrix.tokens_per_step.tolist(),
            "this_tree": mixed.tokens_per_step.tolist(),
            "shares": mixed.shares.tolist(),
        }
    if judgement is not None:
        data["judged"] = dataclasses.asdict(judgement)
    return data
