"""`treeopt show`: a tree as text, and what a calibration expects of it."""

from __future__ import annotations

import click

from treeopt.build.replay import Replay, replay
from treeopt.cli.console import Console, command
from treeopt.drafter import PLAIN
from treeopt.errors import Code, TreeoptError
from treeopt.files.calibrations import load_calibration
from treeopt.files.trees import load_tree
from treeopt.tree import Tree


@command("show")
@click.argument("tree")
@click.option("--calibration", help="Replay the tree over these traces.")
def run(console: Console, tree: str, calibration: str | None) -> None:
    """Print TREE (a file, or a name from `treeopt list`): a line a node, its rank and value."""
    record = load_tree(tree)
    outcome = None if calibration is None else _replayed(record, calibration)
    from treeopt.view.graph import render_text

    console.say(f"{record.nodes} nodes, depth {record.depth}, {len(record.leaves)} leaves")
    if record.drafter:
        console.say(f"ranks count among the candidates of drafter {record.drafter}")
    for name, value in record.source.items():
        console.say(f"{name}: {value}")
    console.say(render_text(record).rstrip())
    replayed = None
    if outcome is not None:
        by_depth = outcome.acceptance_by_depth().tolist()
        replayed = {"tokens_per_step": outcome.tokens_per_step, "acceptance_by_depth": by_depth}
        shares = " ".join(f"{share:.3f}" for share in by_depth)
        console.say(f"replayed over {calibration}: {outcome.tokens_per_step:.4f} tokens per step (root counted)")
        console.say(f"share of steps that accept 1, 2, ... drafts or more: {shares}")
    console.result(
        {
            "nodes": record.nodes,
            "depth": record.depth,
            "leaves": len(record.leaves),
            "drafter": record.drafter or PLAIN,
            "source": record.source,
            "paths": record.paths,
            "values": record.values,
            "replay": replayed,
        }
    )


def _replayed(record: Tree, file: str) -> Replay:
    """The replay of a tree over a calibration that holds text."""
    calibration = load_calibration(file)
    if not calibration.positions:
        raise TreeoptError(Code.PROMPTS_EMPTY, "the calibration holds no text", at=file)
    return replay(record, calibration)


command = run
