"""The reports of `treeopt build`: a tree, a policy of per-step trees, or the choice among drafters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from treeopt.cli.console import Console
from treeopt.cli.learn_command import reliability_text
from treeopt.defaults import KINDS, ONE_NODE
from treeopt.errors import counted
from treeopt.facts import Column, Fact, Part, Table, milliseconds, picked

if TYPE_CHECKING:
    from treeopt.calibration import Calibration
    from treeopt.export.lint import Constrained
    from treeopt.optimize.auto_drafter import Candidate, DrafterChoice
    from treeopt.optimize.build_job import Built
    from treeopt.policy import Plan, TreePolicy
    from treeopt.tree import Tree

_EXPECTED = "expected tokens per step"


def report_tree(
    console: Console,
    built: Built,
    constrained: Constrained | None,
    *,
    engine: str,
    output: str,
) -> None:
    """Print a built tree; `constrained` is what the limits of an engine cost."""
    from treeopt.optimize.select_method import MEDUSA

    tree, medusa = built.tree, _medusa(built)
    console.report(
        *_size(built),
        *_choice(built),
        *(_engines(tree) if constrained is None else _limits(constrained, engine)),
    )
    if tree.nodes < built.budget:
        console.warn(
            f"warning: {counted(tree.nodes, 'node')}, not {built.budget}: no further path within the limits has a "
            f"value above 0 (K = {tree.expected.top_k if tree.expected else '?'})"
        )
    warn_few_texts(console, built.fitted)
    if built.fit.sums is None:
        taken = medusa if built.fit.method == MEDUSA else f"method {built.fit.method}"
        console.warn(f"warning: too few different texts for cross-validation: {taken} is built")
    for finding in () if constrained is None else constrained.findings:
        console.warn(f"warning: {finding}")
    _end(console, output)


def _end(console: Console, output: str) -> None:
    """Say what was written."""
    console.note(f"wrote {output}")
    console.result({"output": output})


def _keyed(data: Mapping[str, Any]) -> Iterator[Fact]:
    """Facts for programs alone."""
    return (Fact(None, value, key=key) for key, value in data.items())


def _size(built: Built) -> Iterator[Part]:
    """The size of a tree, and its expected tokens per step."""
    tree, expected = built.tree, built.tree.expected
    assert expected is not None
    yield (
        f"{counted(tree.nodes, 'node')} = 1 root + {counted(len(tree.paths), 'draft')}, depth {tree.depth}, "
        f"{counted(len(tree.leaves), 'leaf')}, K = {expected.top_k} ranks per {'level' if tree.drafter else 'head'}"
    )
    yield from _keyed(picked(tree, "nodes", "depth", "paths", "values"))
    yield from _keyed({"leaves": len(tree.leaves), "top_k": expected.top_k})
    steps = {name: value for name, value in vars(expected).items() if name != "top_k"}
    yield Fact(None, steps, key="expected_tokens_per_step")
    yield Fact(None, built.fit.trials, key="cross_validated_steps")
    yield from _keyed({"texts_fitted": built.fitted.sequences, "texts_distinct": built.fitted.distinct})
    yield Fact("method", str(built.fit.method), key="method")
    yield Fact(_EXPECTED, expected.independent, ".3f", "independent: 1 + sum of products of accuracies")
    yield Fact("", expected.replay, ".3f", f"replay: a decoder on {texts_of(built.fitted)}")
    if expected.cross_validated is not None:
        left_out = "cross-validated: on texts left out of the fit"
        if expected.low is not None:
            # The width of an interval falls with the square root of the number of texts.
            more = f"90 %, {3 * built.fitted.distinct} more prompts would halve that"
            left_out += f"; {expected.low:.3f} to {expected.high:.3f} on as many new prompts ({more})"
        yield Fact("", expected.cross_validated, ".3f", left_out)


def _medusa(built: Built) -> str:
    """The name of the tree by Medusa's method, which is the Medusa tree for traces of heads alone."""
    return "the tree of --values independent --weights uniform" if built.tree.drafter else "the Medusa tree"


def _choice(built: Built) -> Iterator[Part]:
    if built.choice is not None:
        sizes = (("fastest", built.choice.best), ("64 nodes", built.choice.at_64))
        columns = (
            Column("by the profile", lambda size: size[0]),
            Column("nodes", lambda size: size[1].nodes),
            Column("tokens/step", lambda size: size[1].tokens_per_step, ".3f"),
            Column("overhead", lambda size: size[1].overhead, ".2f"),
            Column("speedup", lambda size: size[1].speedup, ".2f"),
        )
        yield Table(columns, [size for size in sizes if size[1] is not None])
        yield Fact(None, picked(built.choice, "best", "at_64"), key="auto")
        yield by_one_growth(built.choice.largest)


def _engines(tree: Tree) -> Iterator[Part]:
    """The engines that refuse a tree."""
    from treeopt.export.lint import refusing_engines

    refusing = refusing_engines(tree)
    yield Fact(None, refusing, key="not_exportable_to")
    if refusing:
        names = ", ".join(refusing)
        yield f"not exportable to {names}; treeopt build --for ENGINE builds within the limits of one"


def _limits(constrained: Constrained, engine: str) -> Iterator[Part]:
    """What the limits of a build cost."""
    gain = constrained.gain
    data = {"engine": engine or None, "loss": gain.as_dict()}
    yield Fact(None, {**data, **picked(constrained, "cross_validated", "findings")}, key="limits")
    texts = "cross-validated" if constrained.cross_validated else "replay"
    yield (
        f"limits{f' of {engine}' if engine else ''}: {gain.second:.3f} tokens per step, {gain.first:.3f} without them "
        f"({texts}): {gain}"
    )


def report_policy(console: Console, policy: TreePolicy, plan: Plan, calibration: Calibration, output: str) -> None:
    """Print a policy; `plan` is what was written: the policy, or the root alone where plain decoding is as fast."""
    from treeopt.optimize.per_step import calibration_error

    expected, pays = policy.expected, plan is policy
    assert expected is not None
    none = "none: plain decoding is as fast, by the profile, as the fastest per-step trees, which are these:"
    console.report(
        None if pays else none,
        f"at every step the most likely nodes, at most {policy.nodes}, {policy.depth} drafts deep",
        Fact(_EXPECTED, expected.replay, ".3f", f"replay: a decoder on {texts_of(calibration)}"),
        Fact("", expected.estimated, ".3f", "estimated by the drafter"),
        Fact("", f"{expected.low:.3f} to {expected.high:.3f} on as many new prompts (90 %)") if expected.low else None,
        Fact("mean nodes of a step", expected.nodes, ".1f") if policy.size_cost else None,
        reliability_text(calibration),
        *_plan(plan, KINDS[1], pays=pays),
        *_keyed({"size_cost": policy.size_cost if pays else (), "calibration_error": calibration_error(calibration)}),
    )
    warn_few_texts(console, calibration)
    _end(console, output)


def report_choice(console: Console, choice: DrafterChoice, batch: int, output: str) -> None:
    """Print the candidates, and the fastest of them."""
    from treeopt.models.origins import profile_for_others

    plan, best = choice.plan, choice.best
    pays = plan.nodes > ONE_NODE
    assert plan.expected is not None
    chosen = Column(None, lambda one: pays and one is best, key="chosen")
    size = f"{best.group.name}, {_trees(best)}, {counted(plan.nodes, 'node')}, {plan.depth} deep"
    console.report(
        Table((*_CANDIDATES, chosen), choice.candidates, key="rows"),
        "tokens/step: all tokens / all steps, cross-validated for static trees; step: with its drafting, by the "
        f"profile, at batch {batch}; tokens/s: of one text; speedup: over the profile's autoregressive step",
        *(
            f"left out: {one.group.name}, {_trees(one)}: {one.missing}" + (one.fix and f"; {one.fix}")
            for one in choice.candidates
            if one.budget is None
        ),
        f"fastest: {size if pays else 'none: plain decoding'}",
        Fact(_EXPECTED, plan.expected.replay, ".3f", "replay: a decoder on the texts of its calibrations"),
        *_plan(plan, best.kind, pays=pays),
        Fact(None, best.group.name, key="drafter"),
    )
    for warning in choice.warnings:
        console.warn(f"warning: {warning}")
    for one in choice.candidates:
        if one.budget is not None:
            console.warn(*profile_for_others(one.group.profiles[one.kind], one.group.calibration))
    _end(console, output)


def _plan(plan: Plan, kind: str, *, pays: bool) -> Iterator[Fact]:
    """For programs: the plan, and its kind where it is faster than plain decoding."""
    yield from _keyed(picked(plan, "nodes", "depth", "drafter"))
    yield from _keyed({"kind": kind if pays else "none", "expected_tokens_per_step": plan.expected})


def _trees(one: Candidate) -> str:
    return one.kind if one.kind == KINDS[0] else "per step"


_CANDIDATES = (
    Column("drafter", "group.name", key="drafter"),
    Column(None, "group.drafter_id"),
    Column("trees", _trees),
    Column(None, "kind"),
    Column("nodes", "budget.nodes"),
    Column("tokens/step", "budget.tokens_per_step", ".3f"),
    Column("step", "budget.seconds", milliseconds),
    Column("tokens/s", "budget.tokens_per_second", ".0f"),
    Column(None, "budget.overhead"),
    Column("speedup", "budget.speedup", ".2f"),
    Column(None, "missing"),
    Column(None, "fix"),
)


def texts_of(calibration: Calibration) -> str:
    """The number of texts, and of different ones where some are equal."""
    sampled = f" sampled at temperature {calibration.temperature:g}" if calibration.target is not None else ""
    distinct = f", {calibration.distinct} distinct" if calibration.distinct != calibration.sequences else ""
    return f"{counted(calibration.sequences, 'text')}{sampled}{distinct}"


def by_one_growth(largest: int) -> str:
    """Why a size can have another figure here than in `treeopt build --nodes N`."""
    return (
        f"static trees of every size are the first nodes of one growth to {largest} nodes; `treeopt build --nodes N` "
        "chooses method and nodes for N, so its figure can differ"
    )


def warn_few_texts(console: Console, calibration: Calibration) -> None:
    """Warn where there are too few different texts for an interval."""
    from treeopt.optimize.intervals import FEWEST_TEXTS

    if calibration.distinct < FEWEST_TEXTS:
        console.warn(f"warning: {texts_of(calibration)}: an interval needs two different ones")
