"""`treeopt show`: a tree or a policy as text, its expected tokens per step, and its replay over traces."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from treeopt.cli.console import Console, command
from treeopt.cli.mismatch import warn_edited, warn_other_traces
from treeopt.cli.show_report import as_dict, report
from treeopt.errors import Code, TreeoptError

if TYPE_CHECKING:
    from treeopt.calibration import Calibration
    from treeopt.optimize.replay import Replay
    from treeopt.policy import Plan


FORMATS = ("text", "choices", "yaml")


@command("show")
@click.argument("tree")
@click.option("--calibration", help="Replay the tree over these traces.")
@click.option(
    "--format",
    "layout",
    type=click.Choice(FORMATS),
    default=FORMATS[0],
    show_default=True,
    help="choices: a medusa_choices list; yaml: a tree file.",
)
def run(console: Console, tree: str, calibration: str | None, layout: str) -> None:
    """Print TREE (a file, or a name from `treeopt list`): one line for each node, with its rank and value.

    A file is YAML of treeopt, or holds a medusa_choices list: [[0], [0, 0], [1]] in JSON or Python. For a policy of
    per-step trees, sizes and costs are printed. --format choices and yaml print nothing else.
    """
    from treeopt.files.calibrations import load_calibration
    from treeopt.files.policies import load_plan
    from treeopt.optimize.per_step import replay_policy
    from treeopt.optimize.replay import replay
    from treeopt.tree import Tree

    if layout != FORMATS[0]:
        if console.for_programs:
            raise click.UsageError(f"--format {layout} and --json exclude each other")
        if calibration is not None:
            raise click.UsageError(f"--format {layout} and --calibration exclude each other")
        console.say(_as_text(load_plan(tree), tree, layout))
        return
    plan = load_plan(tree)
    warn_edited(console, tree)
    if calibration is None:
        report(console, plan)
        console.result(as_dict(plan))
        return
    traces = load_calibration(calibration)
    if not traces.positions:
        raise TreeoptError(Code.PROMPTS_EMPTY, "the calibration holds no text", at=calibration)
    outcome = replay(plan, traces) if isinstance(plan, Tree) else replay_policy(plan, traces)
    same = _same_heads(plan, traces)
    warn_other_traces(console, tree, plan, traces)
    report(console, plan)
    others = " (traces of other heads than those of the tree)" if same is False else ""
    error = outcome.sums.standard_error
    spread = "" if error is None else f"; standard error {error:.4f}, clustered by text"
    figure = f"{outcome.tokens_per_step:.4f} tokens per step (root counted)"
    console.say(f"replayed over {calibration}{others}: {figure}{spread}")
    if outcome.expected_drafts is not None:
        console.say(f"its texts are sampled at temperature {traces.temperature:g}: a sum of the target's probabilities")
    shares = " ".join(f"{share:.3f}" for share in outcome.acceptance_by_depth().tolist())
    console.say(f"share of steps that accept at least 1, 2, ... drafts: {shares}")
    console.result(as_dict(plan) | {"replay": _replayed(outcome, same)})


command = run


def _as_text(plan: Plan, name: str, layout: str) -> str:
    """The plan as the text of a file, without the newline at its end."""
    from treeopt.files.choices import choices_text
    from treeopt.files.policies import policy_yaml
    from treeopt.files.trees import tree_yaml
    from treeopt.tree import Tree

    if layout == "yaml":
        text = tree_yaml(plan) if isinstance(plan, Tree) else policy_yaml(plan)
        return text.removesuffix("\n")
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
    return choices_text(plan)


def _same_heads(plan: Plan, traces: Calibration) -> bool | None:
    """Whether the traces are of the plan's heads; None where the plan has no record of them."""
    made_for = plan.source.get("calibration", {}).get("heads_id")
    return None if made_for is None else made_for == traces.provenance.heads_id


def _replayed(outcome: Replay, same_heads: bool | None) -> dict[str, Any]:
    return {
        "tokens_per_step": outcome.tokens_per_step,
        "standard_error": outcome.sums.standard_error,
        "acceptance_by_depth": outcome.acceptance_by_depth().tolist(),
        "same_heads": same_heads,
    }
