"""The graph, the text and the DOT of a tree."""

from __future__ import annotations

import networkx
from helpers import random_tree

from treeopt.tree import Tree
from treeopt.view.graph import render_dot, render_text, to_graph
from treeopt.view.scene import scene_of


def test_graph_is_the_tree(small_tree: Tree) -> None:
    """Nodes, edges, paths and values agree with the record."""
    graph = to_graph(small_tree)
    assert networkx.is_arborescence(graph)
    assert sorted(graph.edges) == [(0, 1), (0, 2), (1, 3), (1, 4), (3, 5)]
    assert graph.nodes[4] == {"path": (0, 1), "label": "1  0.1000", "value": 0.1}


def test_ancestors_agree_with_networkx() -> None:
    """The record's ancestor matrix is the graph's reachability: an independent oracle."""
    for seed in range(5):
        tree = random_tree(seed, nodes=60, depth=5, ranks=6)
        graph = to_graph(tree)
        for node in range(tree.nodes):
            expected = networkx.ancestors(graph, node) | {node}
            assert {int(i) for i in tree.ancestors[node].nonzero()[0]} == expected


def test_text_lists_children_in_rank_order(small_tree: Tree) -> None:
    """A line a node, deeper ones indented below their parent."""
    assert render_text(small_tree).splitlines() == [
        "╙── root",
        "    ├─╼ 0  0.5000",
        "    │   ├─╼ 0  0.2500",
        "    │   │   └─╼ 0  0.1250",
        "    │   └─╼ 1  0.1000",
        "    └─╼ 1  0.2000",
    ]


def test_dot_is_stable(small_tree: Tree) -> None:
    """Equal trees give equal DOT."""
    again = Tree(small_tree.paths, small_tree.values)
    assert render_dot(scene_of(small_tree)) == render_dot(scene_of(again))
