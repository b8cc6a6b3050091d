"""Calibration to tree, in one call."""

from __future__ import annotations

import dataclasses

from treeopt.build.grow import grow
from treeopt.build.replay import replay
from treeopt.build.values import IndependentValues
from treeopt.calibration import Calibration
from treeopt.tree import Expected, Tree
from treeopt.version import VERSION

DEFAULT_TOP_K = 32


def build_tree(
    calibration: Calibration,
    nodes: int,
    *,
    top_k: int = DEFAULT_TOP_K,
    max_depth: int | None = None,
    max_rank: int | None = None,
) -> Tree:
    """The tree with the greatest expected tokens per step under a budget of nodes.

    Args:
        calibration: the rank traces.
        nodes: the budget, root counted; the tree is smaller where no further node has any value.
        top_k: K, the ranks of each head that are considered.
        max_depth: no path is longer; the number of heads where None.
        max_rank: no rank is larger (9 for engines that draft ten tokens a head).

    Returns:
        The tree with its values, both expectations, and what it was made from.
    """
    assert nodes >= 1
    assert top_k >= 1
    assert max_rank is None or max_rank >= 0
    ranks = min(top_k, calibration.kept, top_k if max_rank is None else max_rank + 1)
    accuracy = calibration.accuracy[:, :ranks]
    tree = grow(IndependentValues(accuracy), nodes, max_depth=max_depth).tree()
    expected = Expected(
        independent=round(1.0 + sum(tree.values or ()), 6),
        replay=round(replay(tree, calibration).tokens_per_step, 6),
        top_k=ranks,
    )
    source = {
        "made_by": f"treeopt {VERSION}",
        "method": {"values": "independent", "weights": "uniform", "nodes_asked": nodes, "top_k": ranks},
        "calibration": _describe(calibration),
    }
    return dataclasses.replace(tree, expected=expected, source=source)


def _describe(calibration: Calibration) -> dict[str, str | int]:
    """What a tree file says of the calibration behind it."""
    provenance = calibration.provenance
    return {
        "model": provenance.model,
        "model_id": provenance.model_id,
        "heads": provenance.heads,
        "heads_id": provenance.heads_id,
        "prompts": ", ".join(provenance.prompts.values()),
        "sequences": calibration.sequences,
        "positions": calibration.positions,
    }
