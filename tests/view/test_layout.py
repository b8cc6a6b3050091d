"""Where a picture has its parts: large trees collapsed, and no label on an edge, a node or another label."""

from __future__ import annotations

import dataclasses
import itertools
import re
import time

import numpy as np
import pytest
from drafted_steps import random_step
from helpers import random_tree
from looped import looped
from svg_geometry import faults

from treeopt.files.trees import load_tree, zoo
from treeopt.tree import Tree
from treeopt.view.layout import MAX_NODES, Item, Kind, items_of, place
from treeopt.view.scene import scene_of
from treeopt.view.svg import render_svg


def valued(tree: Tree, seed: int) -> Tree:
    """The tree with values that fall along each path."""
    chances, values = np.random.default_rng(seed).random(tree.nodes), [1.0] * tree.nodes
    for node in range(1, tree.nodes):
        values[node] = values[tree.parents[node]] * float(chances[node])
    return Tree(tree.paths, tuple(values[1:]))


def below(tree: Tree, path: tuple[int, ...], drawn: set[tuple[int, ...]]) -> list[int]:
    """Indices of the paths whose longest drawn beginning is this one, by the definition."""
    found = []
    for i, one in enumerate(tree.paths):
        longest = max((one[:n] for n in range(len(one) + 1) if one[:n] in drawn or not n), key=len)
        if longest == path and one != path:
            found.append(i)
    return found


@looped("most", [2, 3, 7, 20, 39, 40])
@looped("with_values", [True, False])
def test_collapsed_items_count_what_is_not_drawn(most: int, with_values: bool) -> None:
    """At most so many items; each collapsed one has number and sum of the nodes below its parent that are not drawn."""
    for seed in range(6):
        tree = random_tree(seed, nodes=40, depth=5, ranks=5)
        tree = valued(tree, seed) if with_values else tree
        items = items_of(tree, most=most)
        assert len(items) <= most
        paths = [(), *tree.paths]
        drawn = {paths[item.node] for item in items if item.kind is Kind.NODE}
        assert {path[:-1] for path in drawn if path} <= drawn  # with each node its parent
        for item in (one for one in items if one.kind is Kind.COLLAPSED):
            hidden = below(tree, paths[item.node], drawn)
            assert item.hidden == len(hidden) > 1
            assert item.value == (pytest.approx(sum(tree.values[i] for i in hidden)) if tree.values else None)
            assert (items[item.parent].node, item.depth) == (item.node, len(paths[item.node]) + 1)
        assert len(drawn) + sum(item.hidden for item in items) == tree.nodes


def test_whole_tree_is_drawn_up_to_the_limit() -> None:
    """A tree of as many nodes as are drawn has no collapsed item, in the order of its nodes."""
    tree = random_tree(1, nodes=40, depth=5, ranks=5)
    assert items_of(tree, most=40) == [
        Item(Kind.NODE, node, tree.parents[node], tree.depths[node]) for node in range(40)
    ]


def test_nodes_of_greatest_value_are_drawn() -> None:
    """The likeliest nodes stay; a child that is likelier than its parent does not come before it."""
    tree = Tree(((0,), (1,), (2,), (0, 0), (1, 0), (1, 1)), (0.5, 0.1, 0.3, 0.4, 0.9, 0.9))
    nodes = [item.node for item in items_of(tree, most=5) if item.kind is Kind.NODE]
    assert nodes == [0, 1, 3, 4]
    [collapsed] = [item for item in items_of(tree, most=5) if item.kind is Kind.COLLAPSED]
    assert (collapsed.node, collapsed.hidden, collapsed.value) == (0, 3, pytest.approx(1.9))


def test_accepted_path_is_drawn_in_any_case() -> None:
    """The accepted nodes and the token after them are drawn, however unlikely they are."""
    paths = [path for depth in (1, 2, 3) for path in itertools.product(range(13), repeat=depth)]
    tree = Tree(tuple(paths), tuple(1.0 - path[0] / 20 for path in paths))
    last = [tree.paths.index(path) + 1 for path in ((12,), (12, 12), (12, 12, 12))]
    assert not {item.node for item in items_of(tree)} >= set(last)
    step = dataclasses.replace(random_step(tree, 1), accepted=(0, *last))
    scene = scene_of(tree, label="token", step=step)
    nodes = {item.node for item in scene.items if item.kind is Kind.NODE}
    assert set(step.accepted) <= nodes
    assert (len(nodes) < tree.nodes, len(scene.items) <= MAX_NODES + 1) == (True, True)
    assert scene.items[-1].kind is Kind.BONUS


def test_large_picture_is_quick_and_says_what_it_draws() -> None:
    """20,000 nodes take less than two seconds; heading, description and tooltips have the numbers."""
    paths = [path for depth in (1, 2, 3) for path in itertools.product(range(27), repeat=depth)]
    tree = valued(Tree(tuple(paths)), 2)
    assert tree.nodes == 1 + 27 + 27**2 + 27**3 == 20_440
    begin = time.process_time()
    picture = render_svg(tree)
    assert time.process_time() - begin < 2
    drawn = picture.count('<g class="node s')
    collapsed = [int(one) for one in re.findall(r">\+(\d+)</text>", picture)]
    assert drawn + len(collapsed) <= MAX_NODES < drawn + len(collapsed) + 2
    assert drawn + sum(collapsed) == tree.nodes
    assert f"({drawn:,} drawn)</title>" in picture
    assert f"{sum(collapsed):,} nodes of them are collapsed." in picture
    assert re.search(r"<title>\d+ more nodes below path \[\d+(, \d+)*\], sum of values [\d.e-]+</title><rect", picture)


def test_collapsed_tree_has_stable_bytes() -> None:
    """Equal trees give equal bytes, also where values are equal."""
    paths = [(i, j) for i in range(60) for j in range(60)] + [(i,) for i in range(60)]
    one, other = (Tree.from_paths(order, [0.5] * len(paths)) for order in (paths, paths[::-1]))
    assert render_svg(one) == render_svg(other)


def test_places_by_hand() -> None:
    """Columns as wide as their labels, 7 pixels a character and at least 48; rows of 16 pixels; parents between."""
    items = [Item(Kind.NODE, 0, 0, 0), Item(Kind.NODE, 1, 0, 1), Item(Kind.NODE, 2, 0, 1), Item(Kind.NODE, 3, 1, 2)]
    found = place(items, ["", "ab", "日", "abcdefgh"])
    assert found.columns == (20, 141, 262)
    assert found.x == (20, 141, 141, 262)
    assert found.y == (54, 46, 62, 46)
    assert found.label == (29, 150, 150, 271)
    assert found.begin == (25, 168, 168, 331)
    assert found.curves == ((76, 132), (197, 253), (335, 391))
    assert (found.width, found.height) == (339, 78)


def test_names_of_columns_and_the_heading_have_their_places() -> None:
    """The heading is above the names, which begin at the left of the nodes."""
    picture = render_svg(Tree.chain(2), label="none")
    assert '<text class="title" x="14" y="17">' in picture
    for x, name in ((15, "root"), (136, "head 1"), (257, "head 2")):
        assert f'<text class="column" x="{x:.1f}" y="34">{name}</text>' in picture


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
