"""Pruning: the nodes of a tree that are accepted most often, by replay over traces."""

from __future__ import annotations

import numpy as np

from treeopt.calibration import Calibration
from treeopt.optimize.replay import deepest_nodes, visits
from treeopt.tree import Tree


def most_used(tree: Tree, calibration: Calibration, nodes: int) -> Tree:
    """The `nodes` nodes (root counted) that the steps of `tree` accept most often; the whole tree where it has fewer.

    A parent is accepted at least as often as its child and precedes it, so these nodes are a tree.
    """
    deepest = deepest_nodes(tree, calibration.ranks)
    depths = np.array(tree.depths)
    ends = np.bincount(deepest[visits(depths[deepest].astype(np.int8))], minlength=tree.nodes)
    used = ends @ tree.ancestors  # [N]: steps that accepted the node
    most = np.argsort(-used, kind="stable")[:nodes]
    return Tree.from_paths((tree.paths[node - 1] for node in most.tolist() if node), drafter=tree.drafter)
