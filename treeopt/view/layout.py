"""What a picture of a tree draws, and where: nodes, rows, and columns.

A column has three zones from left to right: the nodes, their labels, and the curves to the next column. Outside its
zone an edge is horizontal at the height of its own node, and nodes of one depth are a row or more apart, so no edge
meets a label, nor another node.
"""

import itertools
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

from treeopt.tree import ROOT, Tree

MAX_NODES = 2000  # of a picture
RADIUS, ROW = 5.0, 16.0
TOP, LEFT = 46.0, 20.0  # of the first row and of the first column's nodes
GAP = 4.0  # between a node and its label, a label and its edges, and at both ends of the curves
CURVE = 56.0  # width of the zone of curves
_COLUMN = 48.0  # least width of nodes and labels, for the column's name
CHARACTER = 7.0  # width of a label's character; monospaced fonts of 10 px have 6


@dataclass(frozen=True)
class Item:
    """One drawn node with its texts.

    Args:
        node: the number of the node in the tree; of the bonus token that of the node above.
        parent: index of the item above; that of the root is itself.
        depth: 0 for the root.
        bonus: whether it is the token after the accepted path.
        label: beside the node; empty for none.
        tooltip: shown where the pointer is on it.
        share: 0 .. 1, the square root of its share of the greatest value, which spreads small values; of a step of the
            probability of its path in the base model. None without values.
        accepted: whether it is on the accepted path of a step.
        void: whether it is a node of a step without a draft.
    """

    node: int
    parent: int
    depth: int
    bonus: bool = False
    label: str = ""
    tooltip: str = ""
    share: float | None = None
    accepted: bool = False
    void: bool = False


def items_of(tree: Tree, *, most: int = MAX_NODES, accepted: Sequence[int] = (), bonus: bool = False) -> list[Item]:
    """What is drawn of a tree, without texts: the drawn nodes in their order, then the bonus token."""
    drawn = drawn_nodes(tree, most, accepted)
    index = {node: i for i, node in enumerate(drawn)}
    items = [Item(node, index[tree.parents[node]], tree.depths[node]) for node in drawn]
    if bonus:
        items.append(Item(accepted[-1], index[accepted[-1]], len(accepted), bonus=True))
    return items


def drawn_nodes(tree: Tree, most: int, first: Sequence[int] = ()) -> list[int]:
    """At most so many nodes, ascending: those of `first`, then of the greatest values (without values, the first)."""
    order = list(range(tree.nodes))
    if tree.values is not None:
        least = [1.0, *tree.values]  # on the node's path
        for node in range(1, tree.nodes):
            least[node] = min(least[node], least[tree.parents[node]])
        order.sort(key=lambda node: -least[node])  # stable, so that parents come before their children
    return sorted(list(dict.fromkeys([ROOT, *first, *order]))[:most])


@dataclass(frozen=True)
class Layout:
    """Where the items are, in pixels: their centres, and where the edges below them begin.

    `columns` has x of the nodes of each depth, `curves` both ends of the curves to the next depth.
    """

    x: tuple[float, ...]
    y: tuple[float, ...]
    begin: tuple[float, ...]
    columns: tuple[float, ...]
    curves: tuple[tuple[float, float], ...]
    width: float
    height: float


def place(items: Sequence[Item], top: float = TOP) -> Layout:
    """Places of items with their labels: a column for each depth, from `top` a row for each item without children."""
    widths = [text_width(item.label) for item in items]
    columns = [0.0] * (1 + max(item.depth for item in items))
    for item, width in zip(items, widths, strict=True):
        columns[item.depth] = max(columns[item.depth], width + (GAP if width else 0.0))
    centers, curves, x = [], [], LEFT
    for column in columns:
        end = x + max(RADIUS + column, _COLUMN)
        centers.append(x)
        curves.append((end + 2 * GAP, end + 2 * GAP + CURVE))
        x = curves[-1][1] + GAP + RADIUS
    rows = _rows(items)
    x_of = [centers[item.depth] for item in items]
    ends = [2 * GAP + width if width else 0.0 for width in widths]
    return Layout(
        x=tuple(x_of),
        y=tuple(top + row * ROW for row in rows),
        begin=tuple(x + RADIUS + end for x, end in zip(x_of, ends, strict=True)),
        columns=tuple(centers),
        curves=tuple(curves),
        width=curves[-1][0] + GAP,
        height=top + max(rows) * ROW + ROW,
    )


def _rows(items: Sequence[Item]) -> list[float]:
    """Each item's row: the next free one without children, in depth-first order; else the mean of the children."""
    children: list[list[int]] = [[] for _ in items]
    for i, item in enumerate(items[1:], start=1):
        children[item.parent].append(i)
    rows, free = [0.0] * len(items), itertools.count()

    def choose(i: int) -> None:
        for child in children[i]:
            choose(child)
        below = [rows[child] for child in children[i]]
        rows[i] = sum(below) / len(below) if below else float(next(free))

    choose(0)
    return rows


def text_width(text: str) -> float:
    """A generous estimate of the width of a label: wide characters, such as those of Chinese, count twice."""
    return CHARACTER * sum(2 if unicodedata.east_asian_width(one) in "WF" else 1 for one in text)
