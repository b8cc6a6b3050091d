"""No label of a picture is on an edge, a node or another label, by the geometry of the SVG alone."""

from __future__ import annotations

import itertools
import re

import numpy as np
from drafted_steps import random_step
from helpers import random_tree
from looped import looped
from svg_geometry import faults

from treeopt.files.trees import load_tree, zoo
from treeopt.tree import Tree
from treeopt.view.svg import render_svg

SHAPES = [(nodes, depth, ranks) for nodes in (1, 2, 9, 60) for depth, ranks in ((1, 99), (4, 12), (9, 1000))]


def with_values(tree: Tree, seed: int) -> Tree:
    """The tree with values, which make its edges 1 to 6 pixels wide."""
    values = np.random.default_rng(seed).random(len(tree.paths)) ** 3
    return Tree(tree.paths, tuple(values.tolist()))


@looped("label", ["rank", "probability", "none"])
def test_labels_are_free_of_edges_on_random_trees(label: str) -> None:
    """On trees of any shape nothing overlaps, and everything is inside the picture."""
    for seed, (nodes, depth, ranks) in enumerate(SHAPES):
        tree = with_values(random_tree(seed, nodes=min(nodes, ranks), depth=depth, ranks=ranks), seed)
        assert faults(render_svg(tree, label=label)) == [], (seed, nodes, depth)


@looped("name", sorted(zoo()))
def test_labels_are_free_of_edges_on_bundled_trees(name: str) -> None:
    """The same of the trees of `treeopt list`."""
    assert faults(render_svg(load_tree(name))) == []


@looped("label", ["token", "probability", "rank"])
def test_labels_are_free_of_edges_on_steps(label: str) -> None:
    """The same of steps, with tokens of many characters and of several widths, the bonus token and thick edges."""
    for seed, (nodes, depth, ranks) in enumerate(SHAPES):
        tree = random_tree(seed, nodes=min(nodes, ranks), depth=depth, ranks=ranks)
        assert faults(render_svg(tree, label=label, step=random_step(tree, seed))) == [], (seed, nodes, depth)


def test_labels_are_free_of_edges_on_a_tree_of_collapsed_subtrees() -> None:
    """The same where a subtree is one marked node."""
    paths = [path for depth in (1, 2, 3) for path in itertools.product(range(13), repeat=depth)]  # 2,379
    tree = with_values(Tree(tuple(paths)), 5)
    picture = render_svg(tree)
    assert re.search(r">\+\d+<", picture)
    marked = re.findall(r'class="node collapsed"', picture)
    assert len(marked) > 1
    # All pairs of 2,000 boxes take long: the geometry of the first rows only.
    assert faults(first_rows(picture, 300.0)) == []


def first_rows(picture: str, lowest: float) -> str:
    """The picture without what is drawn below a height."""
    kept = []
    for line in picture.splitlines():
        places = re.search(r'c?y="([\d.]+)"', line) if line.startswith("<g") else None
        ends = (
            re.findall(r"[MC ][\d.-]+ ([\d.]+)(?=[HC]|$)", line.split(' d="')[1].split('"')[0]) if " d=" in line else []
        )
        if (places is None or float(places[1]) < lowest) and all(float(end) < lowest for end in ends):
            kept.append(line)
    return "\n".join(kept)


@looped(
    ("pattern", "change", "said"),
    [
        (r'(class="label" x=")([\d.]+)', 30.0, "edge"),  # labels moved right, onto the edges
        (r'(class="label" x=")([\d.]+)', -8.0, "node"),  # and left, onto their nodes
        (r"(H)([\d.]+)(?=C)", -45.0, "label"),  # curves that begin on the labels
        (r'( cy=")([\d.]+)', 300.0, "outside"),
    ],
)
def test_geometry_finds_planted_overlaps(small_tree: Tree, pattern: str, change: float, said: str) -> None:
    """The test of the test: what is moved onto something else is found."""
    picture = render_svg(small_tree)
    moved = re.sub(pattern, lambda found: f"{found[1]}{float(found[2]) + change:.1f}", picture)
    assert moved != picture
    assert any(said in one for one in faults(moved))


def test_geometry_finds_labels_on_each_other(small_tree: Tree) -> None:
    """The test of the test: rows that are too near to each other."""
    near = re.sub(
        r'( y=")([\d.]+)(">\d)', lambda one: f"{one[1]}{50 + float(one[2]) / 9:.1f}{one[3]}", render_svg(small_tree)
    )
    assert any(one.startswith("labels") for one in faults(near))
