"""The tree as SVG, without any program; equal trees give equal bytes.

The root is on the left, with one column for each level and one row for each leaf; a parent is at the mean of its
children. Line width and color follow the node's value, and hovering shows path and value. Without values all nodes look
alike. Of a step, whose tokens are known, the accepted path is red and thick, and width and color follow the probability
of each path in the base model.

Nodes are `<g class="node ...">`, edges `<path class="edge ...">`, with `data-node`; further classes are `accepted`,
`bonus`, `collapsed`, `void` (without a draft) and `s0` to `s9` (the value). There are neither `style` attributes nor
scripts, so that a page with a strict Content-Security-Policy can embed pictures; `treeopt.view.theme.STYLE` is then
part of the page.
"""

from __future__ import annotations

from xml.sax.saxutils import escape

from treeopt.drafted_step import DraftedStep
from treeopt.tree import Tree
from treeopt.view.drawing import Drawing, DrawnItem
from treeopt.view.layout import MAX_NODES, RADIUS, Kind, Layout, place
from treeopt.view.scene import scene_of
from treeopt.view.theme import style
from treeopt.view.words import cut_heading

_PLAIN, _ACCEPTED = 1.5, 5.0  # widths of edges; by value 1 to 6
_TITLE_X, _TITLE_Y, _COLUMNS_Y = 14, 17, 34
_TITLE_CHARACTER = 7.6  # estimate of the width of a character of the heading


def render_svg(
    tree: Tree,
    title: str = "",
    *,
    label: str = "rank",
    step: DraftedStep | None = None,
    theme: str = "auto",
    with_style: bool = True,
    name: str = "treeopt",
    most: int = MAX_NODES,
) -> str:
    """The picture as text.

    Args:
        tree: the tree; of a step `step.tree`.
        title: the heading; nodes, depth and leaves where it is empty.
        label: of `treeopt.view.looks.LABELS`. `probability` is the value of a node; of a step that of its token in the
            base model.
        step: one step of a text, whose tokens and accepted path are drawn.
        theme: of `treeopt.view.looks.THEMES`; `auto` follows the reader's system.
        with_style: whether the picture contains its CSS.
        most: nodes that are drawn; larger trees are collapsed.
        name: beginning of the ids of the text alternative; pictures of one page need different names.

    Raises:
        TreeoptError: E107 where the labels are probabilities or tokens, and the tree has none.
    """
    scene = scene_of(tree, label=label, step=step, most=most)
    return drawing_svg(Drawing.of(scene, title), theme=theme, with_style=with_style, name=name)


def drawing_svg(drawing: Drawing, *, theme: str = "auto", with_style: bool = True, name: str = "treeopt") -> str:
    """The picture of a drawing as text, with arguments as those of `render_svg`."""
    layout = place([one.item for one in drawing.items], [one.label for one in drawing.items])
    text = drawing.heading
    width = max(layout.width, 2 * _TITLE_X + _TITLE_CHARACTER * len(cut_heading(text)))
    edges = sorted(range(1, len(drawing.items)), key=lambda i: _height(drawing.items[i]))
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="treeopt-tree" width="{width:.0f}" '
        f'height="{layout.height:.0f}" viewBox="0 0 {width:.0f} {layout.height:.0f}" role="img" '
        f'aria-labelledby="{name}-title {name}-desc">',
        f'<title id="{name}-title">{escape(text)}</title>',
        f'<desc id="{name}-desc">{escape(drawing.description)}</desc>',
        *([f"<style>{escape(style(theme))}</style>"] if with_style else []),
        '<rect class="background" width="100%" height="100%"/>',
        f'<text class="title" x="{_TITLE_X}" y="{_TITLE_Y}">{escape(cut_heading(text))}</text>',
        *_columns(drawing, layout),
        *(_edge(drawing, layout, i) for i in edges),
        *(_node(drawing.items[i], layout, i) for i in range(len(drawing.items))),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _columns(drawing: Drawing, layout: Layout) -> list[str]:
    """The names of the columns."""
    names = ["root", *(f"{drawing.level} {depth}" for depth in range(1, len(layout.columns)))]
    return [
        f'<text class="column" x="{x - RADIUS:.1f}" y="{_COLUMNS_Y}">{name}</text>'
        for x, name in zip(layout.columns, names, strict=True)
    ]


def _height(one: DrawnItem) -> tuple[int, float]:
    """The order in which edges are drawn over each other: by value, then the bonus token, then the accepted path."""
    if one.accepted:
        return 2, 0.0
    return int(one.item.kind is Kind.BONUS), one.share or 0.0


def _edge(drawing: Drawing, layout: Layout, i: int) -> str:
    """The line from the label of the item above: horizontal, a curve in its zone, and horizontal again."""
    one = drawing.items[i]
    item, share = one.item, one.share
    begin, end = layout.curves[item.depth - 1]
    y0, y1 = layout.y[item.parent], layout.y[i]
    middle = (begin + end) / 2
    line = f"M{layout.begin[item.parent]:.1f} {y0:.1f}H{begin:.1f}"
    line += f"C{middle:.1f} {y0:.1f} {middle:.1f} {y1:.1f} {end:.1f} {y1:.1f}H{layout.x[i] - RADIUS:.1f}"
    width = _ACCEPTED if one.accepted else _PLAIN if share is None else 1 + 5 * share
    if drawing.of_step and not one.accepted:
        width = min(width, _ACCEPTED / 2)
    classes = " ".join(("edge", *one.classes))
    return f'<path class="{classes}" data-node="{item.node}" d="{line}" stroke-width="{width:.2f}"/>'


def _node(one: DrawnItem, layout: Layout, i: int) -> str:
    item, label = one.item, one.label
    x, y = layout.x[i], layout.y[i]
    shape = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{RADIUS:.0f}"/>'
    if item.kind is Kind.COLLAPSED:
        shape = f'<rect x="{x - RADIUS:.1f}" y="{y - RADIUS:.1f}" width="{2 * RADIUS:.0f}" height="{2 * RADIUS:.0f}"/>'
    text = f'<text class="label" x="{layout.label[i]:.1f}" y="{y + 3.5:.1f}">{escape(label)}</text>' if label else ""
    tooltip = f"<title>{escape(one.tooltip)}</title>"
    classes = " ".join(("node", *one.classes))
    return f'<g class="{classes}" data-node="{item.node}">{tooltip}{shape}{text}</g>'
