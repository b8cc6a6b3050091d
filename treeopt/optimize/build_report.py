"""What a build says: of a tree, of a policy of per-step trees, and of the choice among drafters."""

from collections.abc import Iterator
from typing import Any

from treeopt.calibration import Calibration
from treeopt.defaults import KINDS, NODES, ONE_NODE, PATH_TOKENS
from treeopt.errors import counted
from treeopt.facts import Column, Fact, Part, Table, for_programs, milliseconds, picked
from treeopt.optimize.auto_drafter import DrafterChoice
from treeopt.optimize.build_job import Built
from treeopt.optimize.curve import Curve
from treeopt.optimize.intervals import FEWEST_TEXTS
from treeopt.optimize.per_step import BINS, calibration_error
from treeopt.optimize.select_method import FOLDS, MEDUSA
from treeopt.policy import Plan, TreePolicy
from treeopt.tree import Tree

_EXPECTED = "expected tokens per step"
TREES = {KINDS[0]: KINDS[0], KINDS[1]: "per step"}  # names of kinds of trees


def tree_report(built: Built) -> Iterator[Part]:
    """A built tree: its size, its expected tokens per step, and the fastest size where it was searched."""
    tree, expected = built.tree, built.tree.expected
    assert expected is not None
    yield (
        f"{counted(tree.nodes, 'node')} = 1 root + {counted(len(tree.paths), 'draft')}, depth {tree.depth}, "
        f"{counted(len(tree.leaves), 'leaf')}, K = {expected.top_k} ranks per {'level' if tree.drafter else 'head'}"
    )
    yield price(tree)
    steps = {name: value for name, value in vars(expected).items() if name != "top_k"}
    own = {"leaves": len(tree.leaves), "top_k": expected.top_k, "cross_validated_steps": built.fit.trials}
    texts = {"texts_fitted": built.fitted.sequences, "texts_distinct": built.fitted.distinct}
    known = picked(tree, "nodes", "depth", "paths", "values")
    yield from for_programs({**known, **own, **texts, "expected_tokens_per_step": steps})
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
    best = built.fastest
    if best is not None:
        size = f"{best.nodes} {PATH_TOKENS}" if built.budget is None else counted(best.nodes, "node")
        figures = f"{best.tokens_per_step:.3f} tokens/step, overhead {best.overhead:.2f}, speedup {best.speedup:.2f}"
        yield Fact("by the profile", f"fastest: {size}, {figures}")
        yield Fact(None, {"best": best}, key="auto")


def price(tree: Tree) -> Fact:
    """What a step costs on a model that verifies the paths of a tree as a batch, as nodes do with a tree mask."""
    read = sum(tree.depths[leaf] + 1 for leaf in tree.leaves)
    note = f"leaves x (depth + 1), {read} without padding: the price on the route of paths; replayed tokens are added"
    return Fact("path tokens", tree.path_tokens, note=note, key="path_tokens")


def tree_warnings(built: Built) -> Iterator[str]:
    """What is less than it could be: a tree below its budget, too few texts for an interval or a choice."""
    tree = built.tree
    if built.budget is not None and tree.nodes < built.budget:
        yield (
            f"warning: {counted(tree.nodes, 'node')}, not {built.budget}: no further path within the limits has a "
            f"value above 0 (K = {tree.expected.top_k if tree.expected else '?'})"
        )
    yield from few_texts(built.fitted)
    if built.fit.sums is None:
        # For traces of heads alone it is the Medusa tree.
        medusa = "the tree of --values independent --weights uniform" if tree.drafter else "the Medusa tree"
        taken = medusa if built.fit.method == MEDUSA else f"method {built.fit.method}"
        yield f"warning: too few different texts for cross-validation: {taken} is built"


def policy_report(policy: TreePolicy, plan: Plan, calibration: Calibration) -> Iterator[Part]:
    """A policy; `plan` is what is written: the policy, or the root alone where plain decoding is as fast."""
    expected, pays = policy.expected, plan is policy
    assert expected is not None
    if not pays:
        yield "none: plain decoding is as fast, by the profile, as the fastest per-step trees, which are these:"
    yield f"at every step {policy.chosen}, {policy.depth} drafts deep"
    yield Fact(_EXPECTED, expected.replay, ".3f", f"replay: a decoder on {texts_of(calibration)}")
    yield Fact("", expected.estimated, ".3f", "estimated by the drafter")
    if expected.low:
        yield Fact("", f"{expected.low:.3f} to {expected.high:.3f} on as many new prompts (90 %)")
    if policy.size_cost:
        yield Fact(f"mean {policy.unit} of a step", expected.nodes, ".1f")
    yield reliability_text(calibration)
    more = {"size_cost": policy.size_cost if pays else (), "calibration_error": calibration_error(calibration)}
    yield from for_programs({**_plan(plan, KINDS[1], pays=pays), **more})


def choice_report(choice: DrafterChoice, batch: int) -> Iterator[Part]:
    """The candidates, and the fastest of them."""
    plan, best = choice.plan, choice.best
    pays = plan.nodes > ONE_NODE
    assert plan.expected is not None
    chosen = Column(None, lambda one: pays and one is best, key="chosen")
    size = f"{best.group.name}, {TREES[best.kind]}, {counted(plan.nodes, 'node')}, {plan.depth} deep"
    yield Table((*_CANDIDATES, chosen), choice.candidates, key="rows")
    yield (
        "tokens/step: all tokens / all steps, cross-validated for static trees; step: with its drafting, by the "
        f"profile, at batch {batch}; tokens/s: of one text; speedup: over the profile's autoregressive step"
    )
    for one in choice.candidates:
        if one.budget is None:
            yield f"left out: {one.group.name}, {TREES[one.kind]}: {one.missing}" + (one.fix and f"; {one.fix}")
    yield f"fastest: {size if pays else 'none: plain decoding'}"
    yield Fact(_EXPECTED, plan.expected.replay, ".3f", "replay: a decoder on the texts of its calibrations")
    yield from for_programs({**_plan(plan, best.kind, pays=pays), "drafter": best.group.name})


def _plan(plan: Plan, kind: str, *, pays: bool) -> dict[str, Any]:
    """For programs: the plan, and its kind where it is faster than plain decoding."""
    more = {"kind": kind if pays else "none", "expected_tokens_per_step": plan.expected}
    return {**picked(plan, "nodes", "depth", "drafter"), **more}


_CANDIDATES = (
    Column("drafter", "group.name", key="drafter"),
    Column(None, "group.drafter_id"),
    Column("trees", "kind", TREES.__getitem__, key=""),
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


def curve_report(curve: Curve, calibration: Calibration, kind: str) -> Iterator[Part]:
    """The figures of each size."""
    columns = (
        Column(curve.unit, lambda point: f"{point.nodes} best" if point.nodes == curve.best else point.nodes),
        Column("tokens/step", "tokens_per_step", ".3f"),
        Column("new prompts, 90 %", "prediction", ".3f"),
        Column("overhead", "overhead", ".2f"),
        Column("speedup", "speedup", ".2f"),
    )
    yield Table(columns, curve.points)
    yield from for_programs({**vars(curve), "texts": calibration.sequences, "texts_distinct": calibration.distinct})
    yield f"tokens per step over {texts_of(calibration)}; {curve.method}"
    if kind == KINDS[0] and curve.unit == NODES:
        yield by_one_growth(curve.points[-1].nodes)


def by_one_growth(largest: int) -> str:
    """Why a size can have another figure here than in `treeopt build --nodes N`."""
    return (
        f"static trees of every size are the first nodes of one growth to {largest} nodes; `treeopt build --nodes N` "
        "chooses method and nodes for N, so its figure can differ"
    )


def reliability_text(calibration: Calibration) -> str:
    """The expected calibration error of the most likely guess of each level."""
    error = calibration_error(calibration)
    errors = " ".join(f"{one:.3f}" for one in error)
    return f"expected calibration error by level ({BINS} bins): {errors}; mean {error.mean():.3f}"


def few_texts(calibration: Calibration) -> list[str]:
    """A warning where there are too few different texts for an interval."""
    enough = calibration.distinct >= FEWEST_TEXTS
    return [] if enough else [f"warning: {texts_of(calibration)}: an interval needs two different ones"]


def fitted_texts(calibration: Calibration) -> list[str]:
    """A warning where there are too few different texts for cross-validation."""
    enough = len(set(calibration.clusters)) >= FOLDS
    few = f"warning: {texts_of(calibration)}, too few for cross-validation"
    return [] if enough else [f"{few}; tokens per step are those of the fitted texts"]
