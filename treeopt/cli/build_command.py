"""`treeopt build`: rank traces to a tree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

import treeopt
from treeopt.cli import options as shared
from treeopt.cli.checks import check_belongs, check_suffix, given
from treeopt.cli.configuration import with_configuration
from treeopt.cli.console import Console, command
from treeopt.cli.numbers import AUTO, COUNT, NOT_NEGATIVE, NumberOrAuto, numbers_option
from treeopt.defaults import (
    CALIBRATION_FILE,
    DEFAULT_TOP_K,
    DEFAULT_VALUES,
    DEFAULT_WEIGHTS,
    KINDS,
    MAX_NODES,
    ONE_NODE,
    PROFILE_KINDS,
    STEP_SIZES,
    VALUES,
    WEIGHTS,
)
from treeopt.engines import ENGINES
from treeopt.files.outputs import TREE
from treeopt.progress import late

if TYPE_CHECKING:
    from treeopt.optimize.build_job import BuildJob

_STATIC = ("values", "weights", "max_rank", "max_depth")
_TRACES_HELP = "Traces, from `treeopt calibrate`; several of one drafter are joined as by `treeopt merge`."
_NODES_HELP = f"Budget, root counted, at most {MAX_NODES:,} ({STEP_SIZES[-1]} for dynamic); auto: the fastest size."
_ESTIMATE_HELP = "Of the estimate of node values; without --{}, the Medusa tree is a candidate as well."
_PATH_TOKENS_HELP = "Budget of leaves x (depth + 1) in place of --nodes, for models that verify paths as a batch."
_KIND_HELP = "static: one tree for all steps; dynamic: a tree for each step, of the most likely nodes."
_PROFILE_HELP = (
    "Seconds per step, from `treeopt profile` or a CSV, for --nodes auto; one for each kind, or each drafter and "
    "kind of --drafter auto."
)
_ENGINE_HELP = "Keep to the rules of an engine (treeopt show --for)."


@command("build")
@click.option("--calibration", "calibrations", multiple=True, default=[CALIBRATION_FILE], help=_TRACES_HELP)
@click.option("--drafter", type=click.Choice([AUTO]), help="auto: the fastest drafter, kind and size of all.")
@click.option("--nodes", type=NumberOrAuto(COUNT), default=64, help=_NODES_HELP)
@click.option("--path-tokens", type=click.IntRange(min=2), help=_PATH_TOKENS_HELP)
@click.option("--kind", type=click.Choice(KINDS), default=KINDS[0], help=_KIND_HELP)
@click.option("--profile", multiple=True, help=_PROFILE_HELP)
@numbers_option("--batch-size", "batch", default=["1"], help="Batch of the profile; several: a schedule of plans.")
@numbers_option("--context", help="Context of the profile [default: its longest]; several: a schedule of plans.")
@click.option("--values", type=click.Choice(VALUES), default=DEFAULT_VALUES, help=_ESTIMATE_HELP.format("weights"))
@click.option("--weights", type=click.Choice(WEIGHTS), default=DEFAULT_WEIGHTS, help=_ESTIMATE_HELP.format("values"))
@shared.max_rank_option
@click.option("--for", "engine", type=click.Choice(list(ENGINES)), help=_ENGINE_HELP)
@click.option("--max-depth", type=NOT_NEGATIVE, help="Longest path [default: the number of levels].")
@shared.temperature_option
@shared.force_option
@click.option("-o", "--output", default="tree.yaml", help="File to write.")
def run(console: Console, **options: Any) -> None:
    """Build the tree with the most tokens per step for a number of nodes.

    Node values are estimated from the traces. Several estimates are compared by cross-validation over texts, among them
    that of the Medusa tree (independent, uniform), unless both --values and --weights are given. The tree is then
    replayed over the traces, which gives exactly the steps that a decoder takes on these texts. On traces of sampled
    texts, replay adds up probabilities at their temperature.

    With --kind dynamic the drafter's probabilities choose the nodes of each step: the file holds the number of nodes
    and the drafter. With --nodes auto the size is chosen by the times of --profile, for such trees anew in each step.

    With --nodes auto and several of --profile, --batch-size or --context, none, chains, static and per-step trees are
    compared for each batch and context, and the best is written: of several a schedule, which --tree takes.

    With --for or --max-rank the tree is the best one within these limits; the tokens per step that the limits cost are
    printed.

    With --drafter auto calibrations of several drafters are compared, and the drafter, kind and size with the most
    tokens per second by the profiles are chosen, the time of drafting included. --kind and --nodes, where given, limit
    the choice.
    """
    shared.check_outputs(options, options["output"], kind=TREE)
    check_suffix(options["output"], ".yaml", ".yml")
    if options["drafter"] != AUTO and options["nodes"] == AUTO and (_several(options) or len(options["profile"]) > 1):
        _run_verdict(console, options)
        return
    if _several(options):
        raise click.UsageError("several of --batch-size or --context belong to --nodes auto of one drafter")
    options |= {"batch": options["batch"][0], "context": next(iter(options["context"]), None)}
    if options["drafter"] == AUTO:
        _run_auto(console, options)
        return
    _check_profile(options)
    if options["path_tokens"] is not None:
        check_belongs(("nodes", "engine"), "a budget of nodes, not --path-tokens", holds=False)
    if options["kind"] == KINDS[0]:
        _run_static(console, options)
    else:
        _run_dynamic(console, options)


def _several(options: dict[str, Any]) -> bool:
    return len(options["batch"]) > 1 or len(options["context"]) > 1


def _run_verdict(console: Console, options: dict[str, Any]) -> None:
    """The best plan of each batch and context, as a schedule where there are several."""
    from treeopt.files.trees import save_plan
    from treeopt.models.origins import profile_for_others
    from treeopt.optimize.build_job import BuildJob
    from treeopt.optimize.verdict import verdict_report, verdict_warnings

    check_belongs(("engine", "path_tokens"), "a build of one tree", holds=False)
    if not 1 <= len(options["profile"]) <= len(PROFILE_KINDS):
        raise click.UsageError("--nodes auto takes one --profile for each kind; more belong to --drafter auto")
    kinds = _kinds(options)
    calibration = _calibration(options)
    profiles = [treeopt.load_profile(file) for file in options["profile"]]
    places = {"batches": options["batch"], "contexts": options["context"] or _longest(profiles, options["batch"])}
    job = BuildJob(nodes=None, **_limits({**options, **places, "batch": 1, "context": None}))
    with console.progress("build") as progress:
        found = treeopt.verdicts_of(calibration, profiles, **places, kinds=kinds, job=job, progress=late(progress))
        schedule = found.schedule
    if _several(options):
        treeopt.save_schedule(with_configuration(schedule, console.configuration), options["output"])
    else:
        save_plan(with_configuration(schedule.cells[0].plan, console.configuration), options["output"])
    console.report(*verdict_report(found))
    for profile in profiles:
        console.warn(*profile_for_others(profile, calibration))
    console.warn(*verdict_warnings(found))
    _end(console, options["output"])


def _kinds(options: dict[str, Any]) -> tuple[str, ...]:
    """The kinds of trees that are compared; options of static trees belong to these alone."""
    kinds = (options["kind"],) if given("kind") else KINDS
    check_belongs(_STATIC, "--kind static", holds=KINDS[0] in kinds)
    return kinds


def _longest(profiles: Sequence[treeopt.LatencyProfile], batches: Sequence[int]) -> list[int] | None:
    """The longest context that all profiles have with each of the batches; None where there is none."""
    common = [{point.context for point in one.points if point.batch == batch} for one in profiles for batch in batches]
    of_all = set.intersection(*common) if common else set()
    return [max(of_all)] if of_all else None


def _run_static(console: Console, options: dict[str, Any]) -> None:
    """One tree for all steps."""
    from treeopt.export.lint import build_for, engines_report
    from treeopt.models.origins import profile_for_others
    from treeopt.optimize.build_job import run_job
    from treeopt.optimize.build_report import tree_report, tree_warnings

    job = _job(options)
    calibration = _calibration(options)
    console.warn(*profile_for_others(job.profile, calibration))
    with console.progress("build") as progress:
        constrained = build_for(calibration, job, progress=late(progress)) if job.constrained else None
        built = constrained.built if constrained else run_job(calibration, job, progress=late(progress))
    treeopt.save_tree(with_configuration(built.tree, console.configuration), options["output"])
    limits = constrained.report(job.engine) if constrained else engines_report(built.tree)
    console.report(*tree_report(built), *limits)
    findings = constrained.findings if constrained else ()
    console.warn(*tree_warnings(built), *(f"warning: {finding}" for finding in findings))
    _end(console, options["output"])


def _end(console: Console, output: str) -> None:
    console.note(f"wrote {output}")
    console.result({"output": output})


def _calibration(options: dict[str, Any]) -> treeopt.Calibration:
    """The given calibration, or all of them as one."""
    calibrations = [treeopt.load_calibration(file) for file in options["calibrations"]]
    shared.check_temperature_of(calibrations, options["temperature"])
    return calibrations[0].merge(*calibrations[1:])


def _check_profile(options: dict[str, Any]) -> None:
    """Refuse a profile without --nodes auto, --nodes auto without a profile, and several profiles."""
    auto = options["nodes"] == AUTO
    if len(options["profile"]) > 1:
        raise click.UsageError("several --profile belong to --drafter auto")
    if auto != bool(options["profile"]):
        raise click.UsageError("--nodes auto and --profile go together")
    if not auto and (options["batch"] != 1 or options["context"]):
        raise click.UsageError("--batch-size and --context choose from a --profile")


def _job(options: dict[str, Any]) -> BuildJob:
    """The job of the options."""
    from treeopt.optimize.build_job import BuildJob

    auto = options["nodes"] == AUTO
    return BuildJob(
        nodes=None if auto or options["path_tokens"] else options["nodes"],
        path_tokens=options["path_tokens"],
        profile=treeopt.load_profile(options["profile"][0]) if auto else None,
        engine=options["engine"] or "",
        **_limits(options),
    )


def _limits(options: dict[str, Any]) -> dict[str, Any]:
    """What the jobs of one drafter and of several share."""
    named = {name: options[name] for name in (*_STATIC, "batch", "context")}
    exactly = given("values") and given("weights")
    return {**named, "exactly": exactly, "top_k": max(DEFAULT_TOP_K, shared.ranks_of(options))}


def _run_dynamic(console: Console, options: dict[str, Any]) -> None:
    """A policy, or none where a profile says that plain decoding is as fast."""
    from treeopt.files.trees import save_plan
    from treeopt.optimize.build_report import few_texts, policy_report

    check_belongs((*_STATIC, "engine"), "--kind static", holds=False)
    calibration = _calibration(options)
    policy, pays = _policy(console, options, calibration)
    plan = policy if pays else treeopt.build_tree(calibration, ONE_NODE)
    save_plan(with_configuration(plan, console.configuration), options["output"])
    console.report(*policy_report(policy, plan, calibration))
    console.warn(*few_texts(calibration))
    _end(console, options["output"])


def _policy(
    console: Console, options: dict[str, Any], calibration: treeopt.Calibration
) -> tuple[treeopt.TreePolicy, bool]:
    """The policy of the given size, or the fastest one by the profile, and whether it is faster than plain decoding."""
    from treeopt.models.origins import profile_for_others
    from treeopt.optimize.budget import fastest
    from treeopt.optimize.per_step import fastest_policy, policy_budget

    if not options["profile"]:
        by_paths = options["path_tokens"] is not None
        return treeopt.build_policy(calibration, options["path_tokens"] or options["nodes"], path_tokens=by_paths), True
    profile = treeopt.load_profile(options["profile"][0])
    console.warn(*profile_for_others(profile, calibration))
    where = {"batch": options["batch"], "context": options["context"]}
    policy = fastest_policy(calibration, profile, **where)
    return policy, fastest([policy_budget(policy, calibration, profile, **where).speedup]) is not None


def _run_auto(console: Console, options: dict[str, Any]) -> None:
    """The fastest tree or policy over the drafters of several calibrations."""
    from treeopt.files.trees import save_plan
    from treeopt.models.origins import profile_for_others
    from treeopt.optimize.auto_drafter import choose_drafter
    from treeopt.optimize.build_job import BuildJob
    from treeopt.optimize.build_report import choice_report

    check_belongs(("engine", "path_tokens"), "a build without --drafter auto", holds=False)
    kinds = _kinds(options)
    sized = given("nodes") and isinstance(options["nodes"], int)
    calibrations = [treeopt.load_calibration(file) for file in options["calibrations"]]
    shared.check_temperature_of(calibrations, options["temperature"])
    profiles = [treeopt.load_profile(file) for file in options["profile"]]
    context = options["context"] or next(iter(_longest(profiles, [options["batch"]]) or ()), None)
    job = BuildJob(nodes=options["nodes"] if sized else None, **_limits({**options, "context": context}))
    with console.progress("build") as progress:
        choice = choose_drafter(calibrations, profiles, job, kinds=kinds, progress=late(progress))
    save_plan(with_configuration(choice.plan, console.configuration), options["output"])
    console.report(*choice_report(choice, options["batch"]))
    console.warn(*(f"warning: {warning}" for warning in choice.warnings))
    for one in choice.candidates:
        if one.budget is not None:
            console.warn(*profile_for_others(one.group.profiles[one.kind], one.group.calibration))
    _end(console, options["output"])
