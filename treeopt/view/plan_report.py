"""What `show` prints of a tree or a policy: its figures, its replay, its paths, and why a path is in it."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from treeopt.calibration import Calibration
from treeopt.defaults import HEADS, KINDS, MAX_NODES
from treeopt.errors import Code, TreeoptError, counted
from treeopt.facts import Column, Fact, Part, Table, picked
from treeopt.optimize.build_report import price
from treeopt.optimize.explain import Explanation, Prefix
from treeopt.optimize.intervals import by_text
from treeopt.optimize.per_step import replay_plan
from treeopt.optimize.replay import standard_error
from treeopt.policy import Plan, PolicyExpected, TreePolicy
from treeopt.tree import Expected, Path, Tree
from treeopt.view.graph import render_text
from treeopt.view.scene import summary

_EXPECTED = "tokens per step"  # root counted
_SHOWN = 40  # paths of each side


def replay_parts(plan: Plan, traces: Calibration | None, name: str) -> Iterator[Part]:
    """The replay of a plan over traces."""
    if traces is None:
        yield Fact(None, None, key="replay")
        return
    if not traces.positions:
        raise TreeoptError(Code.PROMPTS_EMPTY, "the calibration holds no text", at=name)
    outcome = replay_plan(plan, traces)
    error = standard_error(*by_text(traces.clusters, outcome.sums.tokens, outcome.sums.steps))
    shares = outcome.acceptance_by_depth().tolist()
    spread = "" if error is None else f"; standard error {error:.4f}, clustered by text"
    yield f"replayed over {name}: {outcome.tokens_per_step:.4f} tokens per step (root counted){spread}"
    if outcome.expected_drafts is not None:
        yield f"its texts are sampled at temperature {traces.temperature:g}: a sum of the target's probabilities"
    yield f"share of steps that accept at least 1, 2, ... drafts: {' '.join(f'{share:.3f}' for share in shares)}"
    made_for = (plan.source.get("calibration") or {}).get("heads_id")
    same = None if made_for is None else made_for == traces.provenance.heads_id
    figures = {"tokens_per_step": outcome.tokens_per_step, "standard_error": error}
    yield Fact(None, {**figures, "acceptance_by_depth": shares, "same_heads": same}, key="replay")


def plan_data(plan: Plan) -> dict[str, Any]:
    """The plan with the keys of `--json`."""
    of_tree = isinstance(plan, Tree)
    return {
        "kind": KINDS[0] if of_tree else KINDS[1],
        **picked(plan, "nodes", "depth", "source"),
        "drafter": plan.drafter or HEADS,
        "expected_tokens_per_step": plan.expected,
        **({**picked(plan, "path_tokens"), "leaves": len(plan.leaves)} if isinstance(plan, Tree) else {}),
        **picked(plan, *(("paths", "values") if of_tree else ("sizes", "size_cost", "unit"))),
    }


def plan_parts(plan: Plan) -> Iterator[Part]:
    """A plan in words: its size, source, expected tokens per step, and its nodes or sizes."""
    source, of_tree = plan.source, isinstance(plan, Tree)
    if isinstance(plan, Tree):
        yield summary(plan)
        yield price(plan)
    else:
        yield f"a tree for each step: {plan.chosen}, {counted(plan.depth, 'draft')} deep"
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
        yield Fact("mean size", policy.expected.nodes, ".1f", f"{policy.unit} per step")
    if not policy.size_cost:
        yield Fact("size", policy.nodes, note=f"{policy.unit} at every step")
        return
    yield "a step takes the size with the greatest estimated tokens - cost:"
    columns = (Column(policy.unit, lambda one: one[0]), Column("cost in tokens", lambda one: one[1], ".4f"))
    yield Table(columns, policy.size_cost)


def path_lines(sign: str, tree: Tree, paths: Sequence[Path]) -> Iterator[str]:
    values: Mapping[Path, float] = dict(zip(tree.paths, tree.values or (), strict=False))
    for path in paths[:_SHOWN]:
        yield f"{sign} {list(path)}" + (f"  {values[path]:.4f}" if path in values else "")
    if len(paths) > _SHOWN:
        yield f"{sign} and {len(paths) - _SHOWN} more (--json lists all)"


def path_parts(found: Explanation) -> Iterator[Part]:
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
        yield Fact("note", f"it is {although} enough: the tree is of path tokens, other limits or other traces")
    columns = (
        Column("path", "path", lambda ranks: str(list(ranks))),
        Column("value", "value", ".4g"),
        Column("of the path above", "share", ".4f"),
        Column("place", _place),
        Column("in the tree", "in_tree", lambda there: "yes" if there else "no"),
    )
    yield Table(columns, found.prefixes)


def _place(prefix: Prefix) -> str:
    if prefix.place is not None:
        return f"{prefix.place:,}"
    return f"above {MAX_NODES:,}" if prefix.value else "none: its value is 0"
