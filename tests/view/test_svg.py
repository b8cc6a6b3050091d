"""Pictures of trees: right, stable, safe to embed, and with enough contrast."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import networkx
import pytest
from drafted_steps import random_step
from helpers import random_tree
from looped import looped
from refusals import refusal_of

from treeopt.errors import Code
from treeopt.tree import Tree
from treeopt.view.graph import render, render_text, to_graph
from treeopt.view.scene import describe
from treeopt.view.svg import STYLE, render_svg, style

SVG = "{http://www.w3.org/2000/svg}"


def circles(text: str) -> list[ElementTree.Element]:
    """The nodes of a picture, in node order."""
    return ElementTree.fromstring(text).findall(f"{SVG}g/{SVG}circle")


def test_svg_draws_every_node_and_edge(small_tree: Tree) -> None:
    """One circle a node, one line an edge, and a hover title with path and value."""
    root = ElementTree.fromstring(render_svg(small_tree))
    assert len(circles(render_svg(small_tree))) == 6
    assert len(root.findall(f"{SVG}path")) == 5
    titles = [element.text for element in root.findall(f"{SVG}g/{SVG}title")]
    assert titles[3] == "node 3: path [0, 0], rank 0 of head 2, right with probability 0.25"


def test_svg_places_columns_by_head_and_leaves_by_row(small_tree: Tree) -> None:
    """Depth decides x; leaves take rows of their own; a parent stands at the mean of its children."""
    at = [(float(c.attrib["cx"]), float(c.attrib["cy"])) for c in circles(render_svg(small_tree))]
    for node, depth in enumerate(small_tree.depths):
        assert at[node][0] == at[0][0] + depth * (at[1][0] - at[0][0])
    assert len({at[leaf][1] for leaf in small_tree.leaves}) == len(small_tree.leaves)
    assert at[1][1] == pytest.approx((at[3][1] + at[4][1]) / 2, abs=0.1)


def test_bytes_of_equal_trees(small_tree: Tree) -> None:
    """Equal trees give equal pictures and equal DOT."""
    tree = random_tree(1, nodes=80, depth=4, ranks=9)
    assert render_svg(tree) == render_svg(Tree.from_paths(reversed(tree.paths)))
    again = Tree(small_tree.paths, small_tree.values)
    assert render(small_tree, "dot") == render(again, "dot")


def test_svg_follows_value_by_width_and_colour(small_tree: Tree) -> None:
    """The likelier edge is wider and drawn over the others; a tree without values has one width and colour."""
    edges = ElementTree.fromstring(render_svg(small_tree)).findall(f"{SVG}path")
    assert [edge.attrib["data-node"] for edge in edges] == ["4", "5", "2", "3", "1"]
    widths = [float(edge.attrib["stroke-width"]) for edge in edges]
    assert widths == sorted(set(widths))
    assert [edge.attrib["class"] for edge in edges] == [f"edge s{share}" for share in (4, 5, 6, 7, 9)]
    plain = ElementTree.fromstring(render_svg(Tree(small_tree.paths))).findall(f"{SVG}path")
    assert {(edge.attrib["class"], edge.attrib["stroke-width"]) for edge in plain} == {("edge", "1.50")}


def test_svg_escapes_its_title(small_tree: Tree) -> None:
    """A title with markup stays text."""
    root = ElementTree.fromstring(render_svg(small_tree, '<b>&"'))
    assert root.findtext(f"{SVG}title") == '<b>&"'


@looped("nodes", [1, 2])
def test_svg_of_the_smallest_trees(nodes: int) -> None:
    """The root alone and a single draft are pictures too."""
    assert len(circles(render_svg(Tree.chain(nodes - 1)))) == nodes


def test_render_by_suffix(small_tree: Tree) -> None:
    """svg and dot come out without any program."""
    assert render(small_tree, "svg").startswith(b"<svg")
    dot = render(small_tree, "dot").decode()
    assert dot.count("->") == 5
    assert describe(small_tree, 5) in dot


def test_render_without_the_dot_program_is_one_clear_error(
    small_tree: Tree, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """png needs graphviz; where it is missing the error says so."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert refusal_of(render, small_tree, "png").code is Code.PROGRAM_MISSING


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
    outlines = colors(css, r"\.void circle|\.bonus circle", "stroke")
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
