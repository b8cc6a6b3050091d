"""`treeopt build`: traces to a tree."""

from __future__ import annotations

from typing import Any

import click

from treeopt.build.trees import DEFAULT_TOP_K, build_tree
from treeopt.cli.console import Console, calibration_option, command
from treeopt.files.calibrations import load_calibration
from treeopt.files.outputs import check_output
from treeopt.files.trees import save_tree


@command("build")
@calibration_option
@click.option("--nodes", type=click.IntRange(min=1), default=64, show_default=True, help="Budget, root counted.")
@click.option("--top-k", type=click.IntRange(min=1), default=DEFAULT_TOP_K, show_default=True, help="Ranks a head.")
@click.option("--max-rank", type=click.IntRange(min=0), help="No larger rank, e.g. 9 for engines that draft ten.")
@click.option("--max-depth", type=click.IntRange(min=0), help="No longer path [default: the number of heads].")
@click.option("-o", "--output", default="tree.yaml", show_default=True)
def run(console: Console, **options: Any) -> None:
    """Grow the tree with the greatest expected tokens per step under a number of nodes.

    Best first by the product of the heads' accuracies, as in the paper; then the tree is replayed over the traces,
    which is exactly what a decoder would do on that text.
    """
    check_output(options["output"], options["calibration"])
    calibration = load_calibration(options["calibration"])
    limits = {name: options[name] for name in ("top_k", "max_depth", "max_rank")}
    tree = build_tree(calibration, options["nodes"], **limits)
    save_tree(tree, options["output"])
    assert tree.expected is not None
    expected = tree.expected
    if tree.nodes < options["nodes"]:
        console.warn(
            f"warning: {tree.nodes} nodes, not {options['nodes']}: no further path was ever right in this calibration "
            f"(K = {expected.top_k})"
        )
    console.say(
        f"{tree.nodes} nodes = 1 root + {len(tree.paths)} drafts, depth {tree.depth}, {len(tree.leaves)} leaves, "
        f"K = {expected.top_k} ranks a head"
    )
    console.say(f"expected tokens per step  {expected.independent:.3f}  independent: 1 + sum of products of accuracies")
    console.say(
        f"                          {expected.replay:.3f}  replay: what a decoder yields on the "
        f"{calibration.sequences} traced texts"
    )
    console.note(f"wrote {options['output']}")
    console.result(
        {
            "nodes": tree.nodes,
            "depth": tree.depth,
            "leaves": len(tree.leaves),
            "top_k": expected.top_k,
            "expected_tokens_per_step": {"independent": expected.independent, "replay": expected.replay},
            "paths": tree.paths,
            "values": tree.values,
            "output": options["output"],
        }
    )


command = run
