"""Random trees for tests of engines: any, without gaps, and those that one engine reads."""

from __future__ import annotations

from helpers import random_tree

from treeopt.tree import Path, Tree

T = Tree(((0,), (1,), (0, 0)))  # the running example


def closed_up(tree: Tree) -> Tree:
    """The tree with the ranks of the children of each node changed to 0, 1, .. in their order."""
    new: dict[Path, Path] = {(): ()}
    children: dict[Path, int] = {}
    for path in tree.paths:
        rank = children.get(path[:-1], 0)
        children[path[:-1]] = rank + 1
        new[path] = (*new[path[:-1]], rank)
    return Tree.from_paths(path for path in new.values() if path)


def trees(seeds: int = 25) -> list[Tree]:
    """Trees of many sizes, with gaps and without."""
    found = []
    for seed in range(seeds):
        depth, ranks = 1 + seed % 5, 2 + seed % 9
        most = sum(ranks**level for level in range(depth + 1))
        found.append(random_tree(seed, nodes=min(2 + seed * 3 % 60, most // 2 + 1), depth=depth, ranks=ranks))
    return [*found, *map(closed_up, found)]
