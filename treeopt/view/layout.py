"""What a picture of a tree draws, and where: collapsed subtrees, rows, and columns.

A column has three zones from left to right: the nodes, their labels, and the curves to the next column. Outside its
zone an edge is horizontal at the height of its own node, and nodes of one depth are a row or more apart, so no edge
meets a label, nor another node.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from treeopt.tree import ROOT, Tree

MAX_NODES = 2000  # of a picture; more are collapsed
RADIUS, ROW = 5.0, 16.0
TOP, LEFT = 46.0, 20.0  # of the first row and of the first column's nodes
GAP = 4.0  # between a node and its label, a label and its edges, and at both ends of the curves
CURVE = 56.0  # width of the zone of curves
_COLUMN = 48.0  # least width of nodes and labels, for the column's name
CHARACTER = 7.0  # width of a label's character; monospaced fonts of 10 px have 6


class Kind(StrEnum):
    """What an item of a picture is."""

    NODE = "node"
    COLLAPSED = "collapsed"
    BONUS = "bonus"


@dataclass(frozen=True)
class Item:
    """One drawn node.

    Args:
        kind: a node of the tree, a collapsed part of it, or the token after the accepted path.
        node: the number of the node in the tree; of the other kinds that of the node above.
        parent: index of the item above; that of the root is itself.
        depth: 0 for the root.
        hidden: number of nodes of a collapsed part.
        value: sum of the values of a collapsed part; None where the tree has none.
    """

    kind: Kind
    node: int
    parent: int
    depth: int
    hidden: int = 0
    value: float | None = None


def items_of(tree: Tree, *, most: int = MAX_NODES, accepted: Sequence[int] = (), bonus: bool = False) -> list[Item]:
    """What is drawn of a tree: its nodes in their order, then collapsed parts, then the bonus token.

    Of more than `most` nodes those of the greatest values are drawn (without values, the first), and `accepted` in any
    case; below each drawn node, all others are one collapsed item.
    """
    drawn = _drawn_nodes(tree, most, accepted)
    index = {node: i for i, node in enumerate(drawn)}
    items = [Item(Kind.NODE, node, index[tree.parents[node]], tree.depths[node]) for node in drawn]
    hidden, values = _hidden(tree, index)
    for node, count in sorted(hidden.items()):
        value = None if tree.values is None else values[node]
        items.append(Item(Kind.COLLAPSED, node, index[node], tree.depths[node] + 1, count, value))
    if bonus:
        items.append(Item(Kind.BONUS, accepted[-1], index[accepted[-1]], len(accepted)))
    return items


def _drawn_nodes(tree: Tree, most: int, first: Sequence[int]) -> list[int]:
    """The nodes that are drawn, ascending: with a collapsed item below each that lacks children, `most` at most."""
    if tree.nodes <= most:
        return list(range(tree.nodes))
    missing = [0] * tree.nodes  # children that are not drawn
    for parent in tree.parents[1:]:
        missing[parent] += 1
    drawn, count = {ROOT}, 2  # the root, and one collapsed item below it
    for node in _order(tree, first):
        if node in drawn:
            continue
        parent = tree.parents[node]
        count += 1 + (missing[node] > 0) - (missing[parent] == 1)
        if count > most:
            break
        drawn.add(node)
        missing[parent] -= 1
    hidden, _ = _hidden(tree, drawn)
    # A collapsed item of one node is drawn as that node, in the same room.
    alone = {node for node in range(tree.nodes) if node not in drawn and hidden.get(tree.parents[node]) == 1}
    return sorted(drawn | alone)


def _order(tree: Tree, first: Sequence[int]) -> list[int]:
    """The nodes by value, each after its parent; those of `first` before all others."""
    if tree.values is None:
        return [*first, *range(1, tree.nodes)]
    least = [1.0, *tree.values]  # on the node's path
    for node in range(1, tree.nodes):
        least[node] = min(least[node], least[tree.parents[node]])
    return [*first, *sorted(range(1, tree.nodes), key=lambda node: -least[node])]  # stable


def _hidden(tree: Tree, drawn: set[int] | dict[int, int]) -> tuple[dict[int, int], dict[int, float]]:
    """Below each drawn node that lacks children: the number of nodes that are not drawn, and their sum of values."""
    counts: dict[int, int] = {}
    values: dict[int, float] = {}
    above = list(range(tree.nodes))  # the nearest drawn node
    for node in range(1, tree.nodes):
        if node not in drawn:
            above[node] = above[tree.parents[node]]
            counts[above[node]] = counts.get(above[node], 0) + 1
            value = 0.0 if tree.values is None else tree.values[node - 1]
            values[above[node]] = values.get(above[node], 0.0) + value
    return counts, values


@dataclass(frozen=True)
class Layout:
    """Where the items are, in pixels: their centres, and where labels and the edges below them begin.

    `columns` has x of the nodes of each depth, `curves` both ends of the curves to the next depth.
    """

    x: tuple[float, ...]
    y: tuple[float, ...]
    label: tuple[float, ...]
    begin: tuple[float, ...]
    columns: tuple[float, ...]
    curves: tuple[tuple[float, float], ...]
    width: float
    height: float


def place(items: Sequence[Item], labels: Sequence[str]) -> Layout:
    """Places of items with these labels: a column for each depth, a row for each item without children."""
    widths = [text_width(label) for label in labels]
    columns = [0.0] * (1 + max(item.depth for item in items))
    for item, width in zip(items, widths, strict=True):
        columns[item.depth] = max(columns[item.depth], width + (GAP if width else 0.0))
    centers, curves, x = [], [], LEFT
    for column in columns:
        end = x + max(RADIUS + column, _COLUMN)
        centers.append(x)
        curves.append((end + 2 * GAP, end + 2 * GAP + CURVE))
        x = curves[-1][1] + GAP + RADIUS
    begin = [
        centers[item.depth] + RADIUS + (2 * GAP + width if width else 0.0)
        for item, width in zip(items, widths, strict=True)
    ]
    rows = _rows(items)
    return Layout(
        x=tuple(centers[item.depth] for item in items),
        y=tuple(TOP + row * ROW for row in rows),
        label=tuple(centers[item.depth] + RADIUS + GAP for item in items),
        begin=tuple(begin),
        columns=tuple(centers),
        curves=tuple(curves),
        width=curves[-1][0] + GAP,
        height=TOP + max(rows) * ROW + ROW,
    )


def _rows(items: Sequence[Item]) -> list[float]:
    """Each item's row: the next free one without children, in depth-first order; else the mean of the children."""
    children: list[list[int]] = [[] for _ in items]
    for i, item in enumerate(items[1:], start=1):
        children[item.parent].append(i)
    rows = [0.0] * len(items)
    free, stack = 0.0, [(0, False)]
    while stack:
        i, done = stack.pop()
        if done:
            rows[i] = sum(rows[child] for child in children[i]) / len(children[i])
        elif children[i]:
            stack.append((i, True))
            stack.extend((child, False) for child in reversed(children[i]))
        else:
            rows[i] = free
            free += 1
    return rows


def text_width(text: str) -> float:
    """A generous estimate of the width of a label: wide characters, such as those of Chinese, count twice."""
    return CHARACTER * sum(2 if unicodedata.east_asian_width(one) in "WF" else 1 for one in text)
