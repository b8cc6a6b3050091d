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
from treeopt.defaults import HEADS, KINDS, MAX_NODES
from treeopt.engines import ENGINES
from treeopt.errors import EXIT_INPUT, Code, TreeoptError, counted
from treeopt.facts import Column, Fact, Part, Table, picked

if TYPE_CHECKING:
    from treeopt.calibration import Calibration
    from treeopt.optimize.explain import Explanation, Prefix
    from treeopt.policy import Plan, PolicyExpected, TreePolicy
    from treeopt.tree import Expected, Path, Tree


_ALL = "all"  # engines
_EXPECTED = "tokens per step"  # root counted
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
def run(console: Console, tree: str, calibration: str | None, **options: Any) -> None:
    """Print the tree FILE (or a name from `treeopt list`): one line for each node, with its rank and value.

    A file is YAML of treeopt, or holds a medusa_choices list: [[0], [0, 0], [1]] in JSON or Python. For a policy of
    per-step trees, sizes and costs are printed.

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

    plan = load_plan(name)
    warn_edited(console, name)
    traces = _traces(calibration)
    if traces is not None:
        console.warn(*made_for_others(name, plan.source.get("calibration") or {}, traced_ids(traces)))
    console.report(*_plan_parts(plan), *_replay_parts(plan, traces, calibration or ""))
    console.result(_plan_data(plan))


def _replay_parts(plan: Plan, traces: Calibration | None, name: str) -> Iterator[Part]:
    """The replay of a plan over traces."""
    from treeopt.optimize.per_step import replay_policy
    from treeopt.optimize.replay import replay
    from treeopt.tree import Tree

    if traces is None:
        yield Fact(None, None, key="replay")
        return
    if not traces.positions:
        raise TreeoptError(Code.PROMPTS_EMPTY, "the calibration holds no text", at=name)
    outcome = replay(plan, traces) if isinstance(plan, Tree) else replay_policy(plan, traces)
    error, shares = outcome.sums.standard_error, outcome.acceptance_by_depth().tolist()
    spread = "" if error is None else f"; standard error {error:.4f}, clustered by text"
    yield f"replayed over {name}: {outcome.tokens_per_step:.4f} tokens per step (root counted){spread}"
    if outcome.expected_drafts is not None:
        yield f"its texts are sampled at temperature {traces.temperature:g}: a sum of the target's probabilities"
    yield f"share of steps that accept at least 1, 2, ... drafts: {' '.join(f'{share:.3f}' for share in shares)}"
    made_for = (plan.source.get("calibration") or {}).get("heads_id")
    same = None if made_for is None else made_for == traces.provenance.heads_id
    figures = {"tokens_per_step": outcome.tokens_per_step, "standard_error": error}
    yield Fact(None, {**figures, "acceptance_by_depth": shares, "same_heads": same}, key="replay")


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
    from treeopt.view.scene import summary

    source, of_tree = plan.source, isinstance(plan, Tree)
    if isinstance(plan, Tree):
        yield summary(plan)
    else:
        size = f"{'at most ' if plan.size_cost else ''}the {plan.nodes} most likely nodes (root counted)"
        yield f"a tree for each step: {size}, {counted(plan.depth, 'draft')} deep"
    for name in ("reference", "made_by", "method", "calibration"):
        if source.get(name):
            yield Fact(name.replace("_", " "), _in_words(source[name]))
    if plan.drafter:
        file = f" in {source['drafter']}" if "drafter" in source else ""
        meaning = "ranks are those of its candidates" if of_tree else "its estimates choose the nodes"
        yield Fact("drafter", f"{plan.drafter}{file}; {meaning}")
    yield from _expected(plan.expected)
    if isinstance(plan, Tree):
        yield render_text(plan).rstrip()
    else:
        yield from _sizes(plan)


def _in_words(value: Any) -> Any:
    """A mapping of a file as `model NAME, heads none, positions 70000`."""
    if not isinstance(value, Mapping):
        return value
    return ", ".join(f"{name.replace('_', ' ')} {'none' if one == '' else one}" for name, one in value.items())


def _expected(expected: Expected | PolicyExpected | None) -> Iterator[Fact]:
    """Each figure of a file with its meaning; the interval is that of the last one."""
    from treeopt.policy import PolicyExpected

    if expected is None:
        yield Fact(_EXPECTED, "not in the file; --calibration FILE replays traces")
        return
    figures = {"replay: a decoder on the calibration's texts": expected.replay}
    if isinstance(expected, PolicyExpected):
        first = Fact(_EXPECTED, expected.estimated, ".4f", "estimated: by the drafter, on the same texts")
    else:
        formula = f"independent: 1 + the sum of the products of accuracies (K = {expected.top_k})"
        first = Fact(_EXPECTED, expected.independent, ".4f", formula)
        if expected.cross_validated is not None:
            figures["cross-validated: replay on texts left out of the fit"] = expected.cross_validated
    yield first
    yield from (Fact("", figure, ".4f", meaning) for meaning, figure in figures.items())
    if expected.low is not None:
        yield Fact("", f"{expected.low:.3f} to {expected.high:.3f} on as many new prompts (90 %)")


def _sizes(policy: TreePolicy) -> Iterator[Part]:
    if policy.expected is not None:
        yield Fact("mean size", policy.expected.nodes, ".1f", "nodes per step")
    if not policy.size_cost:
        yield Fact("size", policy.nodes, note="nodes at every step")
        return
    yield "a step takes the size with the greatest estimated tokens - cost:"
    columns = (Column("nodes", lambda one: one[0]), Column("cost in tokens", lambda one: one[1], ".4f"))
    yield Table(columns, policy.size_cost)


def _show_rules(console: Console, name: str, engine: str, num_heads: int | None) -> None:
    """Print the rules of engines that a tree breaks."""
    from treeopt.export.lint import lint_file

    names = list(ENGINES) if engine == _ALL else [engine]
    found = lint_file(name, names, num_heads=num_heads)
    for finding in found.findings:
        where = f" [{finding.engine}]" if finding.engine else ""
        console.say(f"{finding.severity}: {finding.rule}{where}: {finding.what}")
        console.say(f"  why: {finding.why}" + (f"\n  fix: {finding.fix}" if finding.fix else ""))
    for one in names if found.tree is not None else ():
        faults = sum(error.engine == one for error in found.errors)
        console.say(f"{one:11} {counted(faults, 'error') if faults else 'ok'}")
    more = {"engines": names, "valid": found.tree is not None}
    console.result({**picked(found, "nodes", "findings"), **more})
    if found.tree is None or (engine != _ALL and found.errors):
        click.get_current_context().exit(EXIT_INPUT)


def _show_differences(console: Console, first: str, second: str, calibration: str | None) -> None:
    """Print what differs between two trees."""
    from treeopt.files.trees import load_tree
    from treeopt.optimize.intervals import compare_trees
    from treeopt.view.scene import summary

    one, other = load_tree(first), load_tree(second)
    warn_edited(console, first, second)
    found = compare_trees(one, other, _traces(calibration))
    sides = (("-", one, found.first_only), ("+", other, found.second_only))
    console.report(
        f"- {first}: {summary(one)}",
        f"+ {second}: {summary(other)}",
        f"{counted(found.shared, 'path')} in both, {len(found.first_only)} removed, {len(found.second_only)} added",
        *(line for side in sides for line in _path_lines(*side)),
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


def _path_lines(sign: str, tree: Tree, paths: Sequence[Path]) -> Iterator[str]:
    values: Mapping[Path, float] = dict(zip(tree.paths, tree.values or (), strict=False))
    for path in paths[:_SHOWN]:
        yield f"{sign} {list(path)}" + (f"  {values[path]:.4f}" if path in values else "")
    if len(paths) > _SHOWN:
        yield f"{sign} and {len(paths) - _SHOWN} more (--json lists all)"


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
