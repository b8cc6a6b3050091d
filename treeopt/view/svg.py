"""The tree as SVG, without any program; equal trees give equal bytes. Colors are CSS, for light and dark backgrounds.

Nodes are `<g class="node ...">`, edges `<path class="edge ...">`, with `data-node`; further classes are `accepted`,
`bonus`, `void` (without a draft) and `s0` to `s9` (the value). There are neither `style` attributes nor
scripts, so that a page with a strict Content-Security-Policy can embed pictures with `STYLE` in its style sheet.
"""

from collections.abc import Mapping
from xml.sax.saxutils import escape

from treeopt.drafted_step import DraftedStep
from treeopt.tree import Tree
from treeopt.view.scene import GAP, MAX_NODES, RADIUS, TOP, Item, Layout, Scene, place, scene_of, shortened

SHADES = 10  # classes s0 .. s9 of edges and nodes, by value

# Of nodes and edges: low is value 0, high the greatest value, neutral without values; accepted is the accepted path.
PALETTES = {
    "light": {
        "background": "#ffffff",
        "text": "#24292f",
        "muted": "#57606a",
        "low": "#8494a4",
        "high": "#0b4f8a",
        "neutral": "#5b7083",
        "accepted": "#c92a2a",
    },
    "dark": {
        "background": "#0d1117",
        "text": "#e6edf3",
        "muted": "#9da7b1",
        "low": "#5f7388",
        "high": "#79c0ff",
        "neutral": "#8b9daf",
        "accepted": "#ff7b72",
    },
}
_PICTURE = ".treeopt-tree"
_SHAPES = (
    "text{font:10px ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace}",
    ".title{font:600 13px system-ui,sans-serif}",
    ".column{font:10px system-ui,sans-serif}",
    ".edge{fill:none}",
    ".bonus circle,.void circle{stroke-width:1.5}",
    ".bonus.edge{stroke-dasharray:4 3}",
    ".accepted .label,.bonus .label{font-weight:700}",
    ".node:hover circle{stroke-width:3}",
)


def style(theme: str = "auto") -> str:
    """The CSS of a theme: the colors of light, dark or, with `auto`, those that the reader's system prefers."""
    shapes = _scoped(_SHAPES)
    if theme != "auto":
        return shapes + _colors(PALETTES[theme])
    dark = _colors(PALETTES["dark"])
    return f"{shapes}{_colors(PALETTES['light'])}@media (prefers-color-scheme:dark){{{dark}}}"


def shade(share: float) -> int:
    """The class number of a share from 0 to 1."""
    return min(SHADES - 1, int(share * SHADES))


def _colors(palette: Mapping[str, str]) -> str:
    accepted, neutral, background = (palette[name] for name in ("accepted", "neutral", "background"))
    rules = [
        f".background{{fill:{background}}}",
        f"text{{fill:{palette['text']}}}",
        f".column{{fill:{palette['muted']}}}",
        f".edge{{stroke:{neutral}}}",
        f".node circle{{fill:{neutral};stroke:{background}}}",
    ]
    ends = list(zip(*(bytes.fromhex(palette[name][1:]) for name in ("low", "high")), strict=True))
    for i in range(SHADES):
        color = "#" + bytes(round(a + (b - a) * (i / (SHADES - 1))) for a, b in ends).hex()
        rules += [f".s{i}.edge{{stroke:{color}}}", f".s{i} circle{{fill:{color}}}"]
    rules += [
        f".void circle{{fill:{background};stroke:{neutral}}}",
        f".accepted.edge,.bonus.edge{{stroke:{accepted}}}",
        f".accepted circle{{fill:{accepted}}}",
        f".bonus circle{{fill:{background};stroke:{accepted}}}",
        f".accepted .label,.bonus .label{{fill:{accepted}}}",
        f".node:hover circle{{stroke:{accepted}}}",
    ]
    return _scoped(rules)


def _scoped(rules: list[str] | tuple[str, ...]) -> str:
    scoped = []
    for rule in rules:
        selectors, _, rest = rule.partition("{")
        scoped.append(",".join(f"{_PICTURE} {one}" for one in selectors.split(",")) + "{" + rest)
    return "".join(scoped)


STYLE = style()


_PLAIN, _ACCEPTED = 1.5, 5.0  # widths of edges; by value 1 to 6
_TITLE_X, _TITLE_Y, _COLUMNS_Y = 14, 17, 34
_HINT_HEIGHT, _HINT_CHARACTER = 16, 5.8  # pixels of its line, which moves the picture down, and of a character
_TITLE_CHARACTER, _LONGEST_TITLE = 7.6, 90  # estimate of the width of a character of the heading, and its characters


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
    """The picture as text; of a step its tokens and the accepted path are drawn. `name` begins the ids in it."""
    scene = scene_of(tree, title, label=label, step=step, most=most)
    layout = place(scene.items, top=TOP + _HINT_HEIGHT * bool(scene.hint))
    text, drawn = scene.heading, shortened(scene.heading, _LONGEST_TITLE)
    least = max(_TITLE_CHARACTER * len(drawn), _HINT_CHARACTER * len(scene.hint))
    width = max(layout.width, 2 * _TITLE_X + least)
    edges = sorted(range(1, len(scene.items)), key=lambda i: _height(scene.items[i]))
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="treeopt-tree" width="{width:.0f}" '
        f'height="{layout.height:.0f}" viewBox="0 0 {width:.0f} {layout.height:.0f}" role="img" '
        f'aria-labelledby="{name}-title {name}-desc">',
        f'<title id="{name}-title">{escape(text)}</title>',
        f'<desc id="{name}-desc">{escape(scene.description)}</desc>',
        *([f"<style>{escape(style(theme))}</style>"] if with_style else []),
        '<rect class="background" width="100%" height="100%"/>',
        f'<text class="title" x="{_TITLE_X}" y="{_TITLE_Y}">{escape(drawn)}</text>',
        *([f'<text class="column" x="{_TITLE_X}" y="{_COLUMNS_Y}">{escape(scene.hint)}</text>'] if scene.hint else []),
        *_columns(scene, layout),
        *(_edge(scene, layout, i) for i in edges),
        *(_node(scene.items[i], layout, i) for i in range(len(scene.items))),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _columns(scene: Scene, layout: Layout) -> list[str]:
    names = ["root", *(f"{scene.level} {depth}" for depth in range(1, len(layout.columns)))]
    return [
        f'<text class="column" x="{x - RADIUS:.1f}" y="{_COLUMNS_Y + _HINT_HEIGHT * bool(scene.hint)}">{name}</text>'
        for x, name in zip(layout.columns, names, strict=True)
    ]


def _height(one: Item) -> tuple[int, float]:
    """The order in which edges are drawn over each other: by value, then the bonus token, then the accepted path."""
    if one.accepted:
        return 2, 0.0
    return int(one.bonus), one.share or 0.0


def _edge(scene: Scene, layout: Layout, i: int) -> str:
    """The line from the label of the item above: horizontal, a curve in its zone, and horizontal again."""
    one = scene.items[i]
    share = one.share
    begin, end = layout.curves[one.depth - 1]
    y0, y1 = layout.y[one.parent], layout.y[i]
    middle = (begin + end) / 2
    line = f"M{layout.begin[one.parent]:.1f} {y0:.1f}H{begin:.1f}"
    line += f"C{middle:.1f} {y0:.1f} {middle:.1f} {y1:.1f} {end:.1f} {y1:.1f}H{layout.x[i] - RADIUS:.1f}"
    width = _ACCEPTED if one.accepted else _PLAIN if share is None else 1 + 5 * share
    if scene.hint and not one.accepted:
        width = min(width, _ACCEPTED / 2)
    classes = " ".join(("edge", *_classes(one)))
    return f'<path class="{classes}" data-node="{one.node}" d="{line}" stroke-width="{width:.2f}"/>'


def _node(one: Item, layout: Layout, i: int) -> str:
    x, y = layout.x[i], layout.y[i]
    shape = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{RADIUS:.0f}"/>'
    text = f'<text class="label" x="{x + RADIUS + GAP:.1f}" y="{y + 3.5:.1f}">{escape(one.label)}</text>'
    tooltip = f"<title>{escape(one.tooltip)}</title>"
    classes = " ".join(("node", *_classes(one)))
    return f'<g class="{classes}" data-node="{one.node}">{tooltip}{shape}{text if one.label else ""}</g>'


def _classes(one: Item) -> list[str]:
    """Classes beside `node` or `edge`."""
    found = [] if one.share is None else [f"s{shade(one.share)}"]
    return found + [name for name in ("bonus", "accepted", "void") if getattr(one, name)]
