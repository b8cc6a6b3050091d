"""`treeopt show`: a tree or a policy, its replay over traces, its differences from another, a path of it, the rules of
engines that it breaks, or the options that a file was made with.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from treeopt.cli.checks import check_apart, check_belongs
from treeopt.cli.console import Console, command
from treeopt.cli.drafters import warn_edited
from treeopt.cli.facts import Column, Fact, Part, Table, picked
from treeopt.defaults import HEADS, KINDS, MAX_NODES
from treeopt.engines import ENGINES
from treeopt.errors import EXIT_INPUT, Code, TreeoptError, counted

if TYPE_CHECKING:
    from treeopt.calibration import Calibration
    from treeopt.optimize.explain import Explanation, Prefix
    from treeopt.policy import Plan, PolicyExpected, TreePolicy
    from treeopt.tree import Expected, Path, Tree


FORMATS = ("text", "choices", "yaml")
_ALL = "all"  # engines
_SHOWN = 40  # paths of each side
_COUNTS = {"sequences": "texts", "positions": "positions"}  # key in a file's calibration -> noun of the number
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

    With --path: the place of the path in the order of values, of which the tree has the first ones; with --calibration
    the values are estimated by the method in the tree's file, or by Medusa's where it names none.

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
    from treeopt.models.origins import made_for_others, traced_ids
    from treeopt.optimize.per_step import replay_policy
    from treeopt.optimize.replay import replay
    from treeopt.tree import Tree

    plan = load_plan(name)
    warn_edited(console, name)
    traces = _traces(calibration)
    if traces is None:
        console.report(*_plan_parts(plan))
        console.result({**_plan_data(plan), "replay": None})
        return
    if not traces.positions:
        raise TreeoptError(Code.PROMPTS_EMPTY, "the calibration holds no text", at=calibration or "")
    outcome = replay(plan, traces) if isinstance(plan, Tree) else replay_policy(plan, traces)
    made_for = plan.source.get("calibration", {}).get("heads_id")
    same = None if made_for is None else made_for == traces.provenance.heads_id
    console.warn(*made_for_others(name, plan.source.get("calibration") or {}, traced_ids(traces)))
    others = " (traces of other heads than those of the tree)" if same is False else ""
    error = outcome.sums.standard_error
    spread = "" if error is None else f"; standard error {error:.4f}, clustered by text"
    figure = f"{outcome.tokens_per_step:.4f} tokens per step (root counted)"
    sampled = None
    if outcome.expected_drafts is not None:
        sampled = f"its texts are sampled at temperature {traces.temperature:g}: a sum of the target's probabilities"
    shares = outcome.acceptance_by_depth().tolist()
    shown = " ".join(f"{share:.3f}" for share in shares)
    console.report(
        *_plan_parts(plan),
        f"replayed over {calibration}{others}: {figure}{spread}",
        sampled,
        f"share of steps that accept at least 1, 2, ... drafts: {shown}",
    )
    replayed = {"tokens_per_step": outcome.tokens_per_step, "standard_error": error}
    replayed |= {"acceptance_by_depth": shares, "same_heads": same}
    console.result({**_plan_data(plan), "replay": replayed})


def _plan_data(plan: Plan) -> dict[str, Any]:
    """The plan with the keys of `--json`."""
    from treeopt.tree import Tree

    of_tree = isinstance(plan, Tree)
    return {
        "kind": KINDS[0] if of_tree else KINDS[1],
        **picked(plan, "nodes", "depth", "source"),
        "drafter": plan.drafter or HEADS,
        "expected_tokens_per_step": plan.expected,
        **({"leaves": len(plan.leaves)} if isinstance(plan, Tree) else {}),
        **picked(plan, *(("paths", "values") if of_tree else ("sizes", "size_cost"))),
    }


def _plan_parts(plan: Plan) -> Iterator[Part]:
    """A plan in words: its size, source, expected tokens per step, and its nodes or sizes."""
    from treeopt.tree import Tree
    from treeopt.view.graph import render_text

    if isinstance(plan, Tree):
        yield f"{counted(plan.nodes, 'node')}, depth {plan.depth}, {counted(len(plan.leaves), 'leaf')}"
    else:
        size = f"{'at most ' if plan.size_cost else ''}the {plan.nodes} most likely nodes (root counted)"
        yield f"a tree for each step: {size}, {counted(plan.depth, 'draft')} deep"
    yield from _origin(plan)
    if plan.expected is None:
        yield Fact("expected", "not in the file; --calibration FILE replays traces")
    else:
        yield "expected tokens per step, root counted:"
        yield from (f"  {figure:<11.4f}{meaning}" for figure, meaning in _figures(plan.expected))
    if isinstance(plan, Tree):
        yield render_text(plan).rstrip()
    else:
        yield from _sizes(plan)


def _origin(plan: Plan) -> Iterator[Fact]:
    from treeopt.tree import Tree

    source = plan.source
    yield from (Fact(name.replace("_", " "), source[name]) for name in ("reference", "made_by") if name in source)
    if source.get("method"):
        yield Fact("method", ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in source["method"].items()))
    if source.get("calibration"):
        yield Fact("calibration", _calibration(source["calibration"]))
    if plan.drafter:
        file = f" in {source['drafter']}" if "drafter" in source else ""
        meaning = "ranks are those of its candidates" if isinstance(plan, Tree) else "its estimates choose the nodes"
        yield Fact("drafter", f"{plan.drafter}{file}; {meaning}")


def _calibration(source: Mapping[str, Any]) -> str:
    """`model NAME (id), heads NAME (id), prompts NAME, 512 texts, 70000 positions`."""
    ids = {name for name in source if name.endswith("_id") and name.removesuffix("_id") in source}
    parts = []
    for name, value in source.items():
        if name in _COUNTS:
            parts.append(f"{value} {_COUNTS[name]}")
        elif name not in ids:
            known = f" ({source[f'{name}_id']})" if source.get(f"{name}_id") else ""
            parts.append(f"{name.replace('_', ' ')} {'none' if value == '' else value}{known}")
    return ", ".join(parts)


def _figures(expected: Expected | PolicyExpected) -> list[tuple[float, str]]:
    """Each figure with its meaning; the interval is that of the last figure."""
    from treeopt.policy import PolicyExpected

    interval = ""
    if expected.low is not None:
        interval = f"; {expected.low:.3f} to {expected.high:.3f} on as many new prompts (90 %)"
    replayed = "replay: a decoder on the calibration's texts"
    if isinstance(expected, PolicyExpected):
        estimated = "estimated: by the drafter, on the same texts"
        return [(expected.estimated, estimated), (expected.replay, replayed + interval)]
    independent = f"independent: 1 + the sum of the products of accuracies (K = {expected.top_k})"
    figures = [(expected.independent, independent), (expected.replay, replayed)]
    if expected.cross_validated is not None:
        left_out = "cross-validated: replay on texts left out of the fit"
        figures.append((expected.cross_validated, left_out + interval))
    return figures


def _sizes(policy: TreePolicy) -> Iterator[Part]:
    if policy.expected is not None:
        yield Fact("mean size", policy.expected.nodes, ".1f", "nodes per step")
    if not policy.size_cost:
        yield Fact("size", policy.nodes, note="nodes at every step")
        return
    yield "a step takes the size with the greatest estimated tokens - cost:"
    columns = (Column("nodes", lambda one: one[0]), Column("cost in tokens", lambda one: one[1], ".4f"))
    yield Table(columns, policy.size_cost)


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
    last, gain = found.last, found.gain
    console.say(f"{list(ranks)} is {'' if last.in_tree else 'not '}in {name}, which has {tree.nodes - 1} paths")
    console.report(*_path_parts(found))
    more = {"path": ranks, "in_tree": last.in_tree, "tokens_per_step": None if gain is None else gain.as_dict()}
    console.result({**more, **picked(found, "made_it", "method", "prefixes")})


def _path_parts(found: Explanation) -> Iterator[Part]:
    last, gain = found.last, found.gain
    probability = f"the estimated probability that all its ranks are right ({found.method})"
    yield Fact("value", last.value, ".4g", probability, "value")
    by_value = "" if last.place is None and not last.value else " by value"
    yield Fact("place", f"{_place(last)}{by_value}; the tree has {found.paths:,} places")
    yield Fact(None, last.place, key="place")
    yield Fact("cut-off", found.cut_off, ".4g", "the value of the last place", "cut_off")
    made = "in by" if found.made_it else "out by"
    tie = "; equal values go to the shallower path, then to the smaller ranks" if not found.margin else ""
    yield Fact("margin", found.margin, "+.4g", f" {made} {abs(found.margin):.4g}{tie}", "margin")
    if gain is not None:
        yield Fact("replay", f"{gain.first:.4f} tokens per step without it, {gain.second:.4f} with it: {gain}")
    if found.made_it != last.in_tree:
        although = "in the tree although its value is not" if last.in_tree else "not in the tree although its value is"
        yield Fact("note", f"it is {although} enough: the tree was built from other traces, or under other limits")
    columns = (
        Column("path", "path", lambda ranks: str(list(ranks))),
        Column("value", "value", ".4g"),
        Column("of the path above", "share", ".4f"),
        Column("place", _place),
        Column("in the tree", "in_tree", lambda there: "yes" if there else "no"),
    )
    yield Table(columns, found.prefixes)


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
