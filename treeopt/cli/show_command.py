"""`treeopt show`: a tree or a policy, its replay over traces, its differences from another, a path of it, the rules of
engines that it breaks, or the options that a file was made with.
"""

from __future__ import annotations

import re
from typing import Any

import click

import treeopt
from treeopt.cli.checks import check_apart, check_belongs
from treeopt.cli.console import Console, command
from treeopt.cli.drafters import warn_edited
from treeopt.engines import ENGINES
from treeopt.errors import EXIT_INPUT, counted
from treeopt.facts import picked

_ALL = "all"  # engines
_RANKS = re.compile(r"\[?\(?\s*(\d{1,9}(?:\s*,\s*\d{1,9})*)?\s*,?\s*\)?\]?")


@command("show")
@click.argument("tree", metavar="FILE")
@click.option("--calibration", help="Replay the tree over these traces.")
@click.option("--against", metavar="TREE", help="Another tree: print what differs.")
@click.option("--path", metavar="RANKS", help="Ranks such as 0,2: print why this path is in the tree, or not.")
@click.option("--for", "engine", type=click.Choice([*ENGINES, _ALL]), help="Check the tree by the rules of an engine.")
@click.option("--num-heads", type=click.IntRange(min=1), help="With --for: number of heads that the engine serves.")
@click.option("--options", "stored", is_flag=True, help="Print the options that FILE was made with, for --config.")
def run(console: Console, tree: str, calibration: str | None, **options: Any) -> None:
    """Print the tree FILE (or a name from `treeopt list`): one line for each node, with its rank and value.

    FILE is a tree in the YAML of treeopt, or a medusa_choices list: [[0], [0, 0], [1]] in JSON or Python. For a policy
    of per-step trees, sizes and costs are printed, for a schedule its plan at each batch and context.

    With --against, paths with - are only in FILE, and paths with + only in the other tree. With --calibration too, both
    are replayed over the same traces; the interval of the difference in tokens per step is a paired bootstrap over
    texts.

    With --path, the place of the path in the order of values is printed: a tree holds the first ones. With
    --calibration the values are estimated by the method in the tree's file, or by Medusa's where it names none.

    With --for, the rules of an engine that the tree breaks are printed (docs/develop/formats.md). An error is what the
    engine would refuse or misread; a warning depends on how the engine was built. The exit status is 3 where there is
    an error; with --for all, only where a list is not a tree.

    With --options, FILE is any file that a command wrote, a folder of heads, or a result of --json. Its options are
    printed, defaults included, outputs such as -o left out.
    """
    check_apart("against", "path", "engine", "stored")
    check_belongs(("calibration",), "a tree that is replayed", not (options["engine"] or options["stored"]))
    check_belongs(("num_heads",), "--for", bool(options["engine"]))
    if options["stored"]:
        _show_options(console, tree)
    elif options["engine"]:
        _show_rules(console, tree, options["engine"], options["num_heads"])
    elif options["against"] is not None:
        _show_differences(console, tree, options["against"], calibration)
    elif options["path"] is not None:
        _show_path(console, tree, options["path"], calibration)
    else:
        _show_plan(console, tree, calibration)


def _traces(calibration: str | None) -> treeopt.Calibration | None:

    return None if calibration is None else treeopt.load_calibration(calibration)


def _show_options(console: Console, file: str) -> None:
    from treeopt.files.configurations import configuration_yaml, stored_configuration

    stored = stored_configuration(file)
    console.say(configuration_yaml(stored).rstrip("\n"))
    console.result({"stored": stored})


def _show_plan(console: Console, name: str, calibration: str | None) -> None:
    from treeopt.models.origins import made_for_others, traced_ids
    from treeopt.optimize.verdict import schedule_parts
    from treeopt.view.plan_report import plan_data, plan_parts, replay_parts

    plan = treeopt.load_planned(name)
    warn_edited(console, name)
    if isinstance(plan, treeopt.Schedule):
        check_belongs(("calibration",), "a tree or policy: the plan of a schedule's step depends on the batch", False)
        console.report(*schedule_parts(plan))
        console.result({"kind": "schedule", **picked(plan, "nodes", "depth", "drafter", "source")})
        return
    traces = _traces(calibration)
    if traces is not None:
        console.warn(*made_for_others(name, plan.source.get("calibration") or {}, traced_ids(traces)))
    console.report(*plan_parts(plan), *replay_parts(plan, traces, calibration or ""))
    console.result(plan_data(plan))


def _show_rules(console: Console, name: str, engine: str, num_heads: int | None) -> None:
    """Print the rules of engines that a tree breaks."""
    from treeopt.export.lint import ERROR

    names, tree = list(ENGINES) if engine == _ALL else [engine], treeopt.load_tree(name)
    findings = [finding for one in names for finding in treeopt.lint_tree(tree, one, num_heads=num_heads)]
    for finding in findings:
        console.say(f"{finding.severity}: {finding.rule} [{finding.engine}]: {finding.what}")
        console.say(f"  why: {finding.why}" + (f"\n  fix: {finding.fix}" if finding.fix else ""))
    errors = [finding.engine for finding in findings if finding.severity == ERROR]
    for one in names:
        faults = errors.count(one)
        console.say(f"{one:11} {counted(faults, 'error') if faults else 'ok'}")
    console.result({"nodes": tree.nodes, "findings": findings, "engines": names})
    if engine != _ALL and errors:
        click.get_current_context().exit(EXIT_INPUT)


def _show_differences(console: Console, first: str, second: str, calibration: str | None) -> None:
    """Print what differs between two trees."""
    from treeopt.view.plan_report import path_lines
    from treeopt.view.scene import summary

    one, other = treeopt.load_tree(first), treeopt.load_tree(second)
    warn_edited(console, first, second)
    found = treeopt.compare_trees(one, other, _traces(calibration))
    sides = (("-", one, found.first_only), ("+", other, found.second_only))
    console.report(
        f"- {first}: {summary(one)}",
        f"+ {second}: {summary(other)}",
        f"{counted(found.shared, 'path')} in both, {len(found.first_only)} removed, {len(found.second_only)} added",
        *(line for side in sides for line in path_lines(*side)),
    )
    gain = found.gain
    if gain is not None:
        console.say(f"tokens per step by replay over {calibration}: {gain.first:.4f} and {gain.second:.4f}, {gain}")
    console.result(
        {
            "shared": found.shared,
            "removed": found.first_only,
            "added": found.second_only,
            "nodes": [one.nodes, other.nodes],
            "depth": [one.depth, other.depth],
            "tokens_per_step": None if gain is None else gain.as_dict(),
        }
    )


def _show_path(console: Console, name: str, path: str, calibration: str | None) -> None:
    """Print why a path is in a tree, or not."""
    from treeopt.view.plan_report import path_parts

    tree = treeopt.load_tree(name)
    warn_edited(console, name)
    ranks = _ranks(path)
    found = treeopt.explain_path(tree, ranks, _traces(calibration))
    last, gain = found.last, found.gain
    console.say(f"{list(ranks)} is {'' if last.in_tree else 'not '}in {name}, which has {tree.nodes - 1} paths")
    console.report(*path_parts(found))
    more = {"path": ranks, "in_tree": last.in_tree, "tokens_per_step": None if gain is None else gain.as_dict()}
    console.result({**more, **picked(found, "made_it", "method", "prefixes")})


def _ranks(text: str) -> tuple[int, ...]:
    """The ranks of a path, as on the command line: `0,2`, `[0, 2]` or `(0, 2)`."""
    found = _RANKS.fullmatch(text.strip())
    if found is None:
        raise click.BadParameter(f"{text!r} is not a path of ranks such as 0,2", param_hint="--path")
    return tuple(int(rank) for rank in found[1].split(",")) if found[1] else ()
