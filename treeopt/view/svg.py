"""The tree as SVG, without any program; equal trees give equal bytes.

The root is on the left, with one column for each head and one row for each leaf; a parent is at the mean of its
children. Line width and colour follow the node's value, and hovering shows path and value. Without values all nodes
look alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape

from treeopt.tree import ROOT, Tree

MAX_NODES = 2000  # of a picture; of a larger tree the nodes of least value are left out, and the heading has the number

_ROW, _COLUMN, _LEFT, _TOP, _RADIUS = 15.0, 130.0, 40.0, 44.0, 5.0
_NEUTRAL = "#5b7083"
_LOW, _HIGH = (0xC9, 0xD6, 0xE2), (0x0B, 0x4F, 0x8A)  # colours of value 0 and of the greatest value

Places = Sequence[tuple[float, float]]  # x and y of each node
Shares = Sequence[float] | None  # 0..1 for each node; None without values

_STYLE = (
    "text{font:10px system-ui,sans-serif;fill:#33414d}"
    ".title{font-size:13px;font-weight:600}"
    ".rank{paint-order:stroke;stroke:#fff;stroke-width:3px}"  # a white outline, so that edges do not cross the digits
    "path{fill:none}"
    "circle{stroke:#fff;stroke-width:1}"
    "g:hover>circle{stroke:#d9480f;stroke-width:2}"
)


def render_svg(tree: Tree, title: str = "") -> str:
    """The picture as text, with `title` as its heading."""
    drawn = most_valuable(tree, MAX_NODES)
    rows, shares = _rows(drawn), _shares(drawn)
    places = [(_LEFT + depth * _COLUMN, _TOP + row * _ROW) for depth, row in zip(drawn.depths, rows, strict=True)]
    width, height = _LEFT + (drawn.depth + 1) * _COLUMN, _TOP + (max(rows) + 1) * _ROW
    heading = (
        "".join(filter(str.isprintable, title)) or f"{tree.nodes} nodes, depth {tree.depth}, {len(tree.leaves)} leaves"
    )
    heading += f", of drafter {tree.drafter}" if tree.drafter else ""
    if drawn.nodes < tree.nodes:
        heading += f" ({drawn.nodes} drawn)"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" role="img">',
        f"<title>{escape(heading)}</title>",
        f"<style>{_STYLE}</style>",
        '<rect width="100%" height="100%" fill="#fff"/>',
        f'<text class="title" x="{_LEFT - 10:.0f}" y="16">{escape(heading)}</text>',
        *(_column_label(depth) for depth in range(drawn.depth + 1)),
        *(_edge(drawn, places, shares, node) for node in range(1, drawn.nodes)),
        *(_node(drawn, places, shares, node) for node in range(drawn.nodes)),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def most_valuable(tree: Tree, nodes: int) -> Tree:
    """The tree cut to at most `nodes` nodes: those of greatest value, or the first in file order without values."""
    if tree.nodes <= nodes:
        return tree
    order = list(range(len(tree.paths)))
    if tree.values is not None:
        values = tree.values
        order = sorted(order, key=lambda i: -values[i])  # stable: a parent precedes a child of equal value
    chosen = sorted(order[: nodes - 1])
    return Tree(
        tuple(tree.paths[i] for i in chosen),
        None if tree.values is None else tuple(tree.values[i] for i in chosen),
        drafter=tree.drafter,
    )


def _rows(tree: Tree) -> list[float]:
    """Each node's row: the next free one for a leaf, in depth-first order; the mean of the children for a parent."""
    children: list[list[int]] = [[] for _ in range(tree.nodes)]
    for node in range(1, tree.nodes):
        children[tree.parents[node]].append(node)
    rows = [0.0] * tree.nodes
    free, stack = 0.0, [(ROOT, False)]
    while stack:
        node, done = stack.pop()
        if done:
            rows[node] = sum(rows[child] for child in children[node]) / len(children[node])
        elif children[node]:
            stack.append((node, True))
            stack.extend((child, False) for child in reversed(children[node]))
        else:
            rows[node] = free
            free += 1
    return rows


def _column_label(depth: int) -> str:
    name = f"head {depth}" if depth else "root"
    return f'<text x="{_LEFT + depth * _COLUMN:.0f}" y="32" text-anchor="middle">{name}</text>'


def _edge(tree: Tree, places: Places, shares: Shares, node: int) -> str:
    (x0, y0), (x1, y1) = places[tree.parents[node]], places[node]
    middle = (x0 + x1) / 2
    curve = f"M{x0:.1f} {y0:.1f}C{middle:.1f} {y0:.1f} {middle:.1f} {y1:.1f} {x1:.1f} {y1:.1f}"
    return f'<path d="{curve}" stroke="{_colour(shares, node)}" stroke-width="{_width(shares, node):.2f}"/>'


def _node(tree: Tree, places: Places, shares: Shares, node: int) -> str:
    x, y = places[node]
    label = str(tree.paths[node - 1][-1]) if node else ""
    shape = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{_RADIUS:.0f}" fill="{_colour(shares, node)}"/>'
    text = f'<text class="rank" x="{x + 8:.1f}" y="{y + 3.5:.1f}">{label}</text>'
    return f"<g><title>{escape(describe(tree, node))}</title>{shape}{text}</g>"


def describe(tree: Tree, node: int) -> str:
    """The tooltip of a node: its path and its value."""
    if node == ROOT:
        return "root: the base model's token"
    path = tree.paths[node - 1]
    text = f"node {node}: path {list(path)}, rank {path[-1]} of head {len(path)}"
    return text if tree.values is None else f"{text}, right with probability {tree.values[node - 1]:.4g}"


def _shares(tree: Tree) -> Shares:
    """The square root of each node's share of the greatest value, which spreads small values; 1 for the root."""
    if tree.values is None:
        return None
    greatest = max(tree.values, default=1.0) or 1.0
    return [1.0, *((value / greatest) ** 0.5 for value in tree.values)]


def _width(shares: Shares, node: int) -> float:
    return 1.5 if shares is None else 1 + 5 * shares[node]


def _colour(shares: Shares, node: int) -> str:
    if shares is None:
        return _NEUTRAL
    mixed = (round(low + (high - low) * shares[node]) for low, high in zip(_LOW, _HIGH, strict=True))
    return "#{:02x}{:02x}{:02x}".format(*mixed)
