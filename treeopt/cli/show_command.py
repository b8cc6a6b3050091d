"""`treeopt show`: a tree or a policy, its replay over traces, its differences from another, a path of it, the rules of
engines that it breaks, or the options that a file was made with.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from treeopt.cli.checks import check_apart, check_belongs
from treeopt.cli.console import Console, command
from treeopt.cli.drafters import ids_of_traces, warn_edited, warn_made_for_other
from treeopt.cli.facts import picked
from treeopt.cli.show_report import as_dict, report
from treeopt.defaults import MAX_NODES
from treeopt.engines import ENGINES
from treeopt.errors import EXIT_INPUT, Code, TreeoptError, counted

if TYPE_CHECKING:
    from treeopt.calibration import Calibration
    from treeopt.optimize.explain import Prefix
    from treeopt.tree import Path, Tree


FORMATS = ("text", "choices", "yaml")
_ALL = "all"  # engines
_SHOWN = 40  # paths of each side
_RANKS = re.compile(r"\[?\(?\s*(\d{1,9}(?:\s*,\s*\d{1,9})*)?\s*,?\s*\)?\]?")


@command("show")
@click.argument("tree", metavar="FILE")
@click.option("--calibration", help="Replay the tree over these traces.")
@click.option("--against", metavar="TREE", help="Another tree: print what differs.")
@click.option("--path", metavar="RANKS", help="Ranks such as 0,2: print why this path is in the tree, or not.")
@click.option("--for", "engine", type=click.Choice([*ENGINES, _ALL]), help="Check the tree by the rules of an engine.")
@click.option("--num-heads", type=click.IntRange(min=1), help="With --for: number of heads that the engine serves.")
@click.option("--options", "stored", is_flag=True, help="Print the options that FILE was made with, for --config.")
@click.option(
    "--format",
    "layout",
    type=click.Choice(FORMATS),
    default=FORMATS[0],
    help="choices: a medusa_choices list; yaml: a tree file.",
)
def run(console: Console, tree: str, calibration: str | None, **options: Any) -> None:
    """Print the tree FILE (or a name from `treeopt list`): one line for each node, with its rank and value.

    A file is YAML of treeopt, or holds a medusa_choices list: [[0], [0, 0], [1]] in JSON or Python. For a policy of
    per-step trees, sizes and costs are printed. --format choices and yaml print nothing else.

    With --against, paths with - are in FILE alone, with + in the other tree alone; with --calibration both are
    replayed over the same traces, and the interval of the difference in tokens per step is a paired bootstrap over
    texts.

    With --path: a tree of N nodes holds the N - 1 paths of the greatest value. The place is that of the path in this
    order, the cut-off the value of the last place. With --calibration the values are estimated by the method in the
    tree's file, or by Medusa's where it names none, and the tree is replayed with and without the path.

    With --for, an error is what an engine would refuse or misread, a warning what depends on how it was built
    (docs/engines.md). The exit status is 3 where there is an error; with --for all, only where a list is not a tree.

    With --options, FILE is any file that a command wrote, a folder of heads, or a result of --json; defaults are
    among its options, outputs such as -o are not.
    """
    check_apart("against", "path", "engine", "stored", "layout")
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
    elif options["layout"] != FORMATS[0]:
        _show_text(console, tree, options["layout"], calibration)
    else:
        _show_plan(console, tree, calibration)


command = run


def _traces(calibration: str | None) -> Calibration | None:
    from treeopt.files.calibrations import load_calibration

    return None if calibration is None else load_calibration(calibration)


def _show_options(console: Console, file: str) -> None:
    from treeopt.files.configurations import configuration_yaml, stored_configuration

    stored = stored_configuration(file)
    console.say(configuration_yaml(stored).rstrip("\n"))
    console.result({"stored": stored})


def _show_plan(console: Console, name: str, calibration: str | None) -> None:
    from treeopt.files.trees import load_plan
    from treeopt.optimize.per_step import replay_policy
    from treeopt.optimize.replay import replay
    from treeopt.tree import Tree

    plan = load_plan(name)
    warn_edited(console, name)
    traces = _traces(calibration)
    if traces is None:
        report(console, plan)
        console.result(as_dict(plan))
        return
    if not traces.positions:
        raise TreeoptError(Code.PROMPTS_EMPTY, "the calibration holds no text", at=calibration or "")
    outcome = replay(plan, traces) if isinstance(plan, Tree) else replay_policy(plan, traces)
    made_for = plan.source.get("calibration", {}).get("heads_id")
    same = None if made_for is None else made_for == traces.provenance.heads_id
    warn_made_for_other(console, name, plan.source.get("calibration") or {}, ids_of_traces(traces))
    report(console, plan)
    others = " (traces of other heads than those of the tree)" if same is False else ""
    error = outcome.sums.standard_error
    spread = "" if error is None else f"; standard error {error:.4f}, clustered by text"
    figure = f"{outcome.tokens_per_step:.4f} tokens per step (root counted)"
    console.say(f"replayed over {calibration}{others}: {figure}{spread}")
    if outcome.expected_drafts is not None:
        console.say(f"its texts are sampled at temperature {traces.temperature:g}: a sum of the target's probabilities")
    shares = outcome.acceptance_by_depth().tolist()
    shown = " ".join(f"{share:.3f}" for share in shares)
    console.say(f"share of steps that accept at least 1, 2, ... drafts: {shown}")
    replayed = {"tokens_per_step": outcome.tokens_per_step, "standard_error": error}
    replayed |= {"acceptance_by_depth": shares, "same_heads": same}
    console.result(as_dict(plan) | {"replay": replayed})


def _show_text(console: Console, name: str, layout: str, calibration: str | None) -> None:
    """Print a plan as the text of a file."""
    from treeopt.files.choices import choices_text
    from treeopt.files.trees import load_plan, policy_yaml, tree_yaml
    from treeopt.tree import Tree

    for other, present in (("--json", console.for_programs), ("--calibration", calibration is not None)):
        if present:
            raise click.UsageError(f"--format {layout} and {other} exclude each other")
    plan = load_plan(name)
    if layout == "yaml":
        console.say((tree_yaml(plan) if isinstance(plan, Tree) else policy_yaml(plan)).removesuffix("\n"))
        return
    if not isinstance(plan, Tree):
        what = f"{name} has no paths: it is a policy of per-step trees"
        raise TreeoptError(Code.TREE_NOT_EXPORTABLE, what, fix="treeopt build --kind static makes one tree")
    if plan.drafter:
        raise TreeoptError(
            Code.TREE_NOT_EXPORTABLE,
            f"{name} is a tree of drafter {plan.drafter}",
            why="its ranks are those of the drafter's candidates; a medusa_choices list holds ranks of the heads",
            fix="--format yaml keeps the drafter",
        )
    console.say(choices_text(plan))


def _show_rules(console: Console, name: str, engine: str, num_heads: int | None) -> None:
    """Print the rules of engines that a tree breaks."""
    from treeopt.export.lint import lint_file

    names = list(ENGINES) if engine == _ALL else [engine]
    found = lint_file(name, names, num_heads=num_heads)
    for finding in found.findings:
        where = f" [{finding.engine}]" if finding.engine else ""
        console.say(f"{finding.severity}: {finding.rule}{where}: {finding.what}")
        console.say(f"  why: {finding.why}")
        if finding.fix:
            console.say(f"  fix: {finding.fix}")
    if found.tree is not None:
        for one in names:
            faults = sum(finding.engine == one and finding.severity == "error" for finding in found.findings)
            console.say(f"{one:11} {'ok' if not faults else f'{faults} ' + ('error' if faults == 1 else 'errors')}")
    more = {"engines": names, "valid": found.tree is not None}
    console.result({"nodes": found.nodes, **more, "findings": found.findings})
    if found.tree is None or (engine != _ALL and found.errors):
        click.get_current_context().exit(EXIT_INPUT)


def _show_differences(console: Console, first: str, second: str, calibration: str | None) -> None:
    """Print what differs between two trees."""
    from treeopt.files.trees import load_tree
    from treeopt.optimize.intervals import compare_trees

    one, other = load_tree(first), load_tree(second)
    warn_edited(console, first, second)
    found = compare_trees(one, other, _traces(calibration))
    for sign, name, tree in (("-", first, one), ("+", second, other)):
        size = f"{counted(tree.nodes, 'node')}, depth {tree.depth}, {counted(len(tree.leaves), 'leaf')}"
        console.say(f"{sign} {name}: {size}")
    shared = counted(found.shared, "path")
    console.say(f"{shared} in both, {len(found.first_only)} removed, {len(found.second_only)} added")
    _say_paths(console, "-", one, found.first_only)
    _say_paths(console, "+", other, found.second_only)
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


def _say_paths(console: Console, sign: str, tree: Tree, paths: Sequence[Path]) -> None:
    values: Mapping[Path, float] = dict(zip(tree.paths, tree.values or (), strict=False))
    for path in paths[:_SHOWN]:
        console.say(f"{sign} {list(path)}" + (f"  {values[path]:.4f}" if path in values else ""))
    if len(paths) > _SHOWN:
        console.say(f"{sign} and {len(paths) - _SHOWN} more (--json lists all)")


def _show_path(console: Console, name: str, path: str, calibration: str | None) -> None:
    """Print why a path is in a tree, or not."""
    from treeopt.files.trees import load_tree
    from treeopt.optimize.explain import explain_path

    tree = load_tree(name)
    warn_edited(console, name)
    ranks = _ranks(path)
    found = explain_path(tree, ranks, _traces(calibration))
    last = found.last
    console.say(f"{list(ranks)} is {'' if last.in_tree else 'not '}in {name}, which has {tree.nodes - 1} paths")
    console.say(f"value     {last.value:.4g}  the estimated probability that all its ranks are right ({found.method})")
    by_value = "" if last.place is None and not last.value else " by value"
    console.say(f"place     {_place(last)}{by_value}; the tree has {found.paths:,} places")
    console.say(f"cut-off   {found.cut_off:.4g}  the value of the last place")
    made = "in by" if found.made_it else "out by"
    tie = "; equal values go to the shallower path, then to the smaller ranks" if not found.margin else ""
    console.say(f"margin    {found.margin:+.4g}  {made} {abs(found.margin):.4g}{tie}")
    gain = found.gain
    if gain is not None:
        console.say(f"replay    {gain.first:.4f} tokens per step without it, {gain.second:.4f} with it: {gain}")
    if found.made_it != last.in_tree:
        although = "in the tree although its value is not" if last.in_tree else "not in the tree although its value is"
        console.say(f"note      it is {although} enough: the tree was built from other traces, or under other limits")
    rows = [
        [
            *(str(list(one.path)), f"{one.value:.4g}", f"{one.share:.4f}"),
            *(_place(one), "yes" if one.in_tree else "no"),
        ]
        for one in found.prefixes
    ]
    console.table(["path", "value", "of the path above", "place", "in the tree"], rows)
    console.result(
        {
            "path": ranks,
            **picked(last, "in_tree", "value", "place"),
            **picked(found, "cut_off", "margin", "made_it", "method", "prefixes"),
            "tokens_per_step": None if gain is None else gain.as_dict(),
        }
    )


def _ranks(text: str) -> Path:
    """The ranks of a path, as on the command line: `0,2`, `[0, 2]` or `(0, 2)`."""
    found = _RANKS.fullmatch(text.strip())
    if found is None:
        raise click.BadParameter(f"{text!r} is not a path of ranks such as 0,2", param_hint="--path")
    return tuple(int(rank) for rank in found[1].split(",")) if found[1] else ()


def _place(prefix: Prefix) -> str:
    if prefix.place is not None:
        return f"{prefix.place:,}"
    return f"above {MAX_NODES:,}" if prefix.value else "none: its value is 0"
