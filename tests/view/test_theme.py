"""Colors of pictures: contrast by the formulas of WCAG 2, and CSS that a page can carry."""

from __future__ import annotations

import re

import pytest
from drafted_steps import random_step
from helpers import random_tree
from looped import looped

from treeopt.view.svg import STYLE, render_svg, style

DARK = "@media (prefers-color-scheme:dark){"


def luminance(color: str) -> float:
    """Relative luminance of `#rrggbb` (WCAG 2.2)."""
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    """Contrast ratio of two colors, 1 to 21."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def rules(css: str) -> list[tuple[str, str]]:
    """Selectors and declarations."""
    return re.findall(r"([^{}]+)\{([^{}]*)\}", css)


def colors(css: str, selector: str, name: str) -> list[str]:
    """The colors that rules give a property, by a part of their selector."""
    found = [
        re.search(rf"(?:^|;){name}:(#[0-9a-f]{{6}})", body) for one, body in rules(css) if re.search(selector, one)
    ]
    return [one[1] for one in found if one]


def test_contrast_of_known_colors() -> None:
    """The formula gives the published figures: 21 for black on white, 4.54 for #767676 on white."""
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#767676", "#ffffff") == pytest.approx(4.54, abs=0.005)


@looped("theme", ["light", "dark"])
def test_text_and_edges_have_contrast(theme: str) -> None:
    """Text has at least 4.5 to 1 on its background, each edge and each node at least 3 to 1."""
    css = style(theme)
    [background] = colors(css, r"\.background$", "fill")
    texts = [*colors(css, r" text$", "fill"), *colors(css, r"\.column$", "fill"), *colors(css, r"\.label", "fill")]
    assert len(texts) == 3
    assert all(contrast(text, background) >= 4.5 for text in texts)
    edges, nodes = (
        colors(css, r"\.edge", "stroke"),
        colors(css, r"\.s\d circle|\.node circle|\.accepted circle", "fill"),
    )
    assert (len(edges), len(nodes)) == (12, 12)
    assert all(contrast(one, background) >= 3 for one in [*edges, *nodes])
    outlines = colors(css, r"\.collapsed rect|\.bonus circle", "stroke")
    assert len(outlines) == 2
    assert all(contrast(one, background) >= 3 for one in outlines)


def test_auto_is_light_and_dark_by_the_system() -> None:
    """`auto` has the rules of light, and those of dark for systems that prefer it."""
    assert style("auto") == STYLE
    light, dark = STYLE.split(DARK)
    assert light == style("light")
    assert style("dark").endswith(dark.removesuffix("}"))
    assert colors(style("light"), r"\.background$", "fill") != colors(style("dark"), r"\.background$", "fill")


@looped("theme", ["auto", "light", "dark"])
def test_rules_are_only_for_pictures(theme: str) -> None:
    """Every selector begins with the class of the picture, so that a page can carry the rules."""
    plain = style(theme).replace(DARK, "").replace("}}", "}")
    selectors = [one for selector, _ in rules(plain) for one in selector.split(",")]
    assert len(selectors) > 30
    assert all(one.startswith(".treeopt-tree ") for one in selectors)


def test_picture_suits_a_strict_policy() -> None:
    """There is no style attribute, handler, script, link or tabindex; without its CSS nothing else differs."""
    tree = random_tree(4, nodes=40, depth=4, ranks=8)
    picture = render_svg(tree, label="token", step=random_step(tree, 4))
    assert not re.search(r"\s(style|on\w+|tabindex|href)=|<script|url\(|@import", picture)
    assert picture.count("<style>") == 1
    without = render_svg(tree, label="token", step=random_step(tree, 4), with_style=False)
    assert re.sub(r"<style>.*</style>\n", "", picture) == without


def test_theme_of_a_picture_is_its_style() -> None:
    """A picture of each theme has its CSS, and otherwise the same bytes."""
    tree = random_tree(4, nodes=40, depth=4, ranks=8)
    for theme in ("auto", "light", "dark"):
        assert render_svg(tree, theme=theme) == render_svg(tree).replace(STYLE, style(theme))


def test_ids_follow_the_name() -> None:
    """Two pictures of one page have different ids, to which the text alternative refers."""
    tree = random_tree(4, nodes=5, depth=2, ranks=4)
    for name in ("treeopt", "second"):
        picture = render_svg(tree, name=name)
        assert re.findall(r'\sid="([^"]+)"', picture) == [f"{name}-title", f"{name}-desc"]
        assert f'role="img" aria-labelledby="{name}-title {name}-desc"' in picture
