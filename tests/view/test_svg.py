"""Pictures: right, stable, and safe to embed."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
from helpers import random_tree
from looped import looped

from treeopt.errors import Code, TreeoptError
from treeopt.tree import Tree
from treeopt.view.graph import render
from treeopt.view.scene import describe
from treeopt.view.svg import render_svg

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


def test_svg_bytes_are_stable() -> None:
    """Equal trees give equal bytes."""
    tree = random_tree(1, nodes=80, depth=4, ranks=9)
    assert render_svg(tree) == render_svg(Tree.from_paths(reversed(tree.paths)))


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
    with pytest.raises(TreeoptError) as caught:
        render(small_tree, "png")
    assert caught.value.code is Code.PROGRAM_MISSING
