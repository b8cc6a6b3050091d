"""NxD Inference's token tree: the children of each node, `{"0": ["1", "2"], "1": ["3"]}`.

Ids are numbers in strings, the root is 0, and nodes are numbered level by level; the order of the children is that of
their ranks, and nodes without children may be left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from treeopt.export.faults import Fault, shown
from treeopt.optimize.tree_builder import MAX_NODES
from treeopt.tree import MAX_DEPTH, Path, Tree

_ID = re.compile(r"0|[1-9][0-9]{0,6}")


def adjacency_text(tree: Tree) -> str:
    """The tree as JSON; its siblings must be contiguous."""
    children: dict[str, list[str]] = {}
    for node, parent in enumerate(tree.parents[1:], start=1):
        children.setdefault(str(parent), []).append(str(node))
    return json.dumps(children)


def tree_of_adjacency(data: Mapping[Any, Any], fault: Fault) -> Tree:
    """The tree of an adjacency mapping.

    Raises:
        TreeoptError: E206 where ids are not numbers in strings, out of range, used twice, in a cycle, or not numbered
            level by level; where the tree is too deep.
    """
    children: dict[int, list[int]] = {}
    for key, listed in data.items():
        if not isinstance(listed, (list, tuple)):
            raise fault(f"has {shown(listed)} as the children of {shown(key)}, not a list")
        children[_id(key, fault)] = [_id(child, fault) for child in listed]
    return tree_of_children(children, 1 + sum(map(len, children.values())), fault)


def tree_of_children(children: Mapping[int, list[int]], nodes: int, fault: Fault) -> Tree:
    """The tree of `nodes` nodes whose children are listed in the order of their ranks.

    Raises:
        TreeoptError: as `tree_of_adjacency`.
    """
    if nodes > MAX_NODES:
        raise fault(f"has {nodes:,} nodes; a tree has {MAX_NODES:,} at most")
    large = next((node for parent, listed in children.items() for node in (parent, *listed) if node >= nodes), None)
    if large is not None:
        raise fault(f"has node {large}, but {nodes} nodes, whose ids are 0 to {nodes - 1}")
    paths: dict[int, Path] = {0: ()}
    level = [0]
    while level:
        below: list[int] = []
        for parent in level:
            for rank, child in enumerate(children.get(parent, ())):
                if child in paths:
                    what = "the root as a child" if child == 0 else f"node {child} as a child twice"
                    raise fault(f"has {what}, the second time at node {parent}")
                if child != len(paths):
                    raise fault(f"has node {child} where node {len(paths)} is due: ids are given level by level")
                paths[child] = (*paths[parent], rank)
                below.append(child)
        level = below
        if level and len(paths[level[0]]) > MAX_DEPTH:
            raise fault(f"is more than {MAX_DEPTH} levels deep")
    if len(paths) != nodes:
        apart = min(set(range(nodes)) - set(paths))
        raise fault(f"has nodes that are not below the root, such as {apart}: they are in a cycle or in another tree")
    return Tree.from_paths(path for path in paths.values() if path)


def _id(value: Any, fault: Fault) -> int:
    if not isinstance(value, str) or not _ID.fullmatch(value):
        raise fault(f'has the id {shown(value)}: an id is a number in a string, such as "3"')
    return int(value)
