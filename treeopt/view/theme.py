"""Colors of pictures of trees as CSS, for light and dark backgrounds.

Every rule begins with `.treeopt-tree`, the class of the picture, so that a page that has pictures inline can carry
`STYLE` itself. A renderer that does not know media queries draws `auto` as `light`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

SHADES = 10  # classes s0 .. s9 of edges and nodes, by value

Color = tuple[int, int, int]


@dataclass(frozen=True)
class Palette:
    """Colors of a theme, sRGB.

    Args:
        background: of the picture.
        text: of headings and labels.
        muted: of the names of columns.
        low: of nodes and edges of value 0.
        high: of the greatest value.
        neutral: of nodes and edges without values.
        accepted: of the accepted path and the bonus token.
    """

    background: Color
    text: Color
    muted: Color
    low: Color
    high: Color
    neutral: Color
    accepted: Color


PALETTES: Mapping[str, Palette] = {
    "light": Palette(
        background=(0xFF, 0xFF, 0xFF),
        text=(0x24, 0x29, 0x2F),
        muted=(0x57, 0x60, 0x6A),
        low=(0x84, 0x94, 0xA4),
        high=(0x0B, 0x4F, 0x8A),
        neutral=(0x5B, 0x70, 0x83),
        accepted=(0xC9, 0x2A, 0x2A),
    ),
    "dark": Palette(
        background=(0x0D, 0x11, 0x17),
        text=(0xE6, 0xED, 0xF3),
        muted=(0x9D, 0xA7, 0xB1),
        low=(0x5F, 0x73, 0x88),
        high=(0x79, 0xC0, 0xFF),
        neutral=(0x8B, 0x9D, 0xAF),
        accepted=(0xFF, 0x7B, 0x72),
    ),
}
_PICTURE = ".treeopt-tree"
_SHAPES = (
    "text{font:10px ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace}",
    ".title{font:600 13px system-ui,sans-serif}",
    ".column{font:10px system-ui,sans-serif}",
    ".edge{fill:none}",
    ".collapsed rect,.bonus circle,.void circle{stroke-width:1.5}",
    ".bonus.edge{stroke-dasharray:4 3}",
    ".accepted .label,.bonus .label{font-weight:700}",
    ".node:hover circle,.node:hover rect{stroke-width:3}",
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


def _colors(palette: Palette) -> str:
    """The rules of a palette."""
    accepted, neutral, background = (_hex(color) for color in (palette.accepted, palette.neutral, palette.background))
    rules = [
        f".background{{fill:{background}}}",
        f"text{{fill:{_hex(palette.text)}}}",
        f".column{{fill:{_hex(palette.muted)}}}",
        f".edge{{stroke:{neutral}}}",
        f".node circle,.node rect{{fill:{neutral};stroke:{background}}}",
    ]
    for i in range(SHADES):
        color = _hex(_mixed(palette.low, palette.high, i / (SHADES - 1)))
        rules += [f".s{i}.edge{{stroke:{color}}}", f".s{i} circle{{fill:{color}}}"]
    rules += [
        f".collapsed rect,.void circle{{fill:{background};stroke:{neutral}}}",
        f".accepted.edge,.bonus.edge{{stroke:{accepted}}}",
        f".accepted circle{{fill:{accepted}}}",
        f".bonus circle{{fill:{background};stroke:{accepted}}}",
        f".accepted .label,.bonus .label{{fill:{accepted}}}",
        f".node:hover circle,.node:hover rect{{stroke:{accepted}}}",
    ]
    return _scoped(rules)


def _scoped(rules: list[str] | tuple[str, ...]) -> str:
    """The rules for what is inside a picture."""
    scoped = []
    for rule in rules:
        selectors, _, rest = rule.partition("{")
        scoped.append(",".join(f"{_PICTURE} {one}" for one in selectors.split(",")) + "{" + rest)
    return "".join(scoped)


def _mixed(low: Color, high: Color, share: float) -> Color:
    red, green, blue = (round(a + (b - a) * share) for a, b in zip(low, high, strict=True))
    return red, green, blue


def _hex(color: Color) -> str:
    return "#{:02x}{:02x}{:02x}".format(*color)


STYLE = style()
