"""Where a picture has its parts: large trees in part, and no label on an edge, a node or another label."""

from __future__ import annotations

import dataclasses
import itertools
import re
import time

import numpy as np
from drafted_steps import random_step
from helpers import random_tree
from looped import looped
from svg_geometry import faults

from treeopt.files.trees import load_tree, zoo
from treeopt.tree import Tree
from treeopt.view.scene import MAX_NODES, Item, items_of, place, scene_of
from treeopt.view.svg import render_svg


def valued(tree: Tree, seed: int) -> Tree:
    """The tree with values that fall along each path."""
    chances, values = np.random.default_rng(seed).random(tree.nodes), [1.0] * tree.nodes
    for node in range(1, tree.nodes):
        values[node] = values[tree.parents[node]] * float(chances[node])
    return Tree(tree.paths, tuple(values[1:]))


@looped("most", [2, 3, 7, 20, 39, 40])
@looped("with_values", [True, False])
def test_drawn_nodes_are_the_likeliest(most: int, with_values: bool) -> None:
    """So many nodes, each with its parent; no node that is left out has a likelier path than one that is drawn."""
    for seed in range(6):
        tree = random_tree(seed, nodes=40, depth=5, ranks=5)
        tree = valued(tree, seed) if with_values else tree
        items = items_of(tree, most=most)
        assert len(items) == most
        drawn = {item.node for item in items}
        assert all(tree.parents[node] in drawn for node in drawn)
        assert all(items[item.parent].node == tree.parents[item.node] for item in items)
        values = (1.0, *(tree.values or [1.0 - node / 99 for node in range(1, tree.nodes)]))
        assert min(values[node] for node in drawn) >= max([0.0, *(values[i] for i in set(range(40)) - drawn)])


def test_whole_tree_is_drawn_up_to_the_limit() -> None:
    """A tree of as many nodes as are drawn is drawn whole, in the order of its nodes."""
    tree = random_tree(1, nodes=40, depth=5, ranks=5)
    assert items_of(tree, most=40) == [Item(node, tree.parents[node], tree.depths[node]) for node in range(40)]


def test_nodes_of_greatest_value_are_drawn() -> None:
    """The likeliest nodes stay; a child that is likelier than its parent does not come before it."""
    tree = Tree(((0,), (1,), (2,), (0, 0), (1, 0), (1, 1)), (0.5, 0.1, 0.3, 0.4, 0.9, 0.9))
    assert [item.node for item in items_of(tree, most=4)] == [0, 1, 3, 4]


def test_accepted_path_is_drawn_in_any_case() -> None:
    """The accepted nodes and the token after them are drawn, however unlikely they are."""
    paths = [path for depth in (1, 2, 3) for path in itertools.product(range(13), repeat=depth)]
    tree = Tree(tuple(paths), tuple(1.0 - path[0] / 20 for path in paths))
    last = [tree.paths.index(path) + 1 for path in ((12,), (12, 12), (12, 12, 12))]
    assert not {item.node for item in items_of(tree)} >= set(last)
    step = dataclasses.replace(random_step(tree, 1), accepted=(0, *last))
    scene = scene_of(tree, label="token", step=step)
    nodes = {item.node for item in scene.items if not item.bonus}
    assert set(step.accepted) <= nodes
    assert (len(nodes) < tree.nodes, len(scene.items) <= MAX_NODES + 1) == (True, True)
    assert scene.items[-1].bonus


def test_large_picture_is_quick_and_says_what_it_draws() -> None:
    """20,000 nodes take less than two seconds; the heading has the number of those drawn."""
    paths = [path for depth in (1, 2, 3) for path in itertools.product(range(27), repeat=depth)]
    tree = valued(Tree(tuple(paths)), 2)
    assert tree.nodes == 1 + 27 + 27**2 + 27**3 == 20_440
    begin = time.process_time()
    picture = render_svg(tree)
    assert time.process_time() - begin < 2
    assert picture.count('<g class="node s') == MAX_NODES
    assert "(2,000 drawn)</title>" in picture
    assert "A tree of 20,440 nodes" in picture


def test_large_tree_has_stable_bytes() -> None:
    """Equal trees give equal bytes, also where values are equal."""
    paths = [(i, j) for i in range(60) for j in range(60)] + [(i,) for i in range(60)]
    one, other = (Tree.from_paths(order, [0.5] * len(paths)) for order in (paths, paths[::-1]))
    assert render_svg(one) == render_svg(other)


def test_places_by_hand() -> None:
    """Columns as wide as their labels, 7 pixels a character and at least 48; rows of 16 pixels; parents between."""
    items = [Item(0, 0, 0), Item(1, 0, 1, label="ab"), Item(2, 0, 1, label="日"), Item(3, 1, 2, label="abcdefgh")]
    found = place(items)
    assert found.columns == (20, 141, 262)
    assert found.x == (20, 141, 141, 262)
    assert found.y == (54, 46, 62, 46)
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


def test_labels_are_free_of_edges_on_a_large_tree() -> None:
    """The same where a part of the nodes is drawn."""
    paths = [path for depth in (1, 2, 3) for path in itertools.product(range(13), repeat=depth)]  # 2,379
    tree = with_values(Tree(tuple(paths)), 5)
    picture = render_svg(tree)
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
