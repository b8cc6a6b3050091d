"""The report of `treeopt show`: a tree or a policy as text, and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from treeopt.cli.console import Console
from treeopt.defaults import HEADS
from treeopt.errors import counted

if TYPE_CHECKING:
    from treeopt.policy import Plan, PolicyExpected, TreePolicy
    from treeopt.tree import Expected


_LABEL = 13  # columns of a line's first word
_INDEPENDENT = "independent: 1 + the sum of the products of accuracies"
_REPLAY = "replay: a decoder on the calibration's texts"
_CROSS_VALIDATED = "cross-validated: replay on texts left out of the fit"
_ESTIMATED = "estimated: by the drafter, on the same texts"
# Key in a file's calibration -> noun of the number.
_COUNTS = {"sequences": "texts", "positions": "positions"}


def report(console: Console, plan: Plan) -> None:
    """Print a plan: its size, source, expected tokens per step, and its nodes or sizes."""
    from treeopt.policy import TreePolicy
    from treeopt.tree import Tree

    if isinstance(plan, Tree):
        console.say(f"{counted(plan.nodes, 'node')}, depth {plan.depth}, {counted(len(plan.leaves), 'leaf')}")
    else:
        size = f"at most the {plan.nodes}" if plan.size_cost else f"the {plan.nodes}"
        console.say(
            f"a tree for each step: {size} most likely nodes (root counted), {counted(plan.depth, 'draft')} deep"
        )
    for label, text in _origin(plan):
        console.say(f"{label:{_LABEL}}{text}")
    _report_expected(console, plan)
    if isinstance(plan, TreePolicy):
        _report_sizes(console, plan)
        return
    from treeopt.view.graph import render_text

    console.say(render_text(plan).rstrip())


def as_dict(plan: Plan) -> dict[str, Any]:
    """The plan with the keys of `--json`."""
    from treeopt.policy import TreePolicy
    from treeopt.tree import Tree

    expected = None if plan.expected is None else vars(plan.expected)
    shared = {
        "kind": "static" if isinstance(plan, Tree) else "dynamic",
        "nodes": plan.nodes,
        "depth": plan.depth,
        "drafter": plan.drafter or HEADS,
        "source": plan.source,
        "expected_tokens_per_step": expected,
        "replay": None,
    }
    if isinstance(plan, TreePolicy):
        return {**shared, "sizes": plan.sizes, "size_cost": plan.size_cost}
    return {**shared, "leaves": len(plan.leaves), "paths": plan.paths, "values": plan.values}


def _origin(plan: Plan) -> list[tuple[str, str]]:
    """Label and text of each line about the source of a plan."""
    from treeopt.tree import Tree

    source = plan.source
    lines = [(name.replace("_", " "), str(source[name])) for name in ("reference", "made_by") if name in source]
    if source.get("method"):
        lines.append(("method", _pairs(source["method"])))
    if source.get("calibration"):
        lines.append(("calibration", _calibration(source["calibration"])))
    if plan.drafter:
        file = f" in {source['drafter']}" if "drafter" in source else ""
        meaning = "ranks are those of its candidates" if isinstance(plan, Tree) else "its estimates choose the nodes"
        lines.append(("drafter", f"{plan.drafter}{file}; {meaning}"))
    return lines


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


def _pairs(parts: Mapping[str, Any]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in parts.items())


def _report_expected(console: Console, plan: Plan) -> None:
    expected = plan.expected
    if expected is None:
        console.say(f"{'expected':{_LABEL}}not in the file; --calibration FILE replays traces")
        return
    console.say("expected tokens per step, root counted:")
    for figure, meaning in _figures(expected):
        console.say(f"  {f'{figure:.4f}':{_LABEL - 2}}{meaning}")


def _figures(expected: Expected | PolicyExpected) -> list[tuple[float, str]]:
    """Each figure with its meaning; the interval is that of the last figure."""
    from treeopt.policy import PolicyExpected

    interval = ""
    if expected.low is not None:
        interval = f"; {expected.low:.3f} to {expected.high:.3f} on as many new prompts (90 %)"
    if isinstance(expected, PolicyExpected):
        return [(expected.estimated, _ESTIMATED), (expected.replay, _REPLAY + interval)]
    figures = [(expected.independent, f"{_INDEPENDENT} (K = {expected.top_k})"), (expected.replay, _REPLAY)]
    if expected.cross_validated is not None:
        figures.append((expected.cross_validated, _CROSS_VALIDATED + interval))
    return figures


def _report_sizes(console: Console, policy: TreePolicy) -> None:
    """The sizes that a step may have, with their costs."""
    if policy.expected is not None:
        console.say(f"{'mean size':{_LABEL}}{policy.expected.nodes:.1f} nodes per step")
    if not policy.size_cost:
        console.say(f"{'size':{_LABEL}}{policy.nodes} nodes at every step")
        return
    console.say("a step takes the size with the greatest estimated tokens - cost:")
    rows = [[str(size), f"{cost:.4f}"] for size, cost in policy.size_cost]
    console.table(["nodes", "cost in tokens"], rows)
