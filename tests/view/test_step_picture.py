"""The picture of one step: tokens, the accepted path in red, the token after it, and the step in words."""

from __future__ import annotations

import dataclasses
from xml.etree import ElementTree

import pytest
from looped import looped

from treeopt.drafted_step import DraftedStep
from treeopt.errors import Code, TreeoptError
from treeopt.files.trees import load_tree
from treeopt.tree import Tree
from treeopt.view.graph import render_dot
from treeopt.view.scene import drawn_data, scene_of
from treeopt.view.svg import render_svg

SVG = "{http://www.w3.org/2000/svg}"
CHANCES = (None, 0.75, 0.125, 0.5, 0.25, 0.0625)


@pytest.fixture
def step(small_tree: Tree) -> DraftedStep:
    """Of the tree (0), (1), (0, 0), (0, 1), (0, 0, 0) the path to (0, 1) is accepted."""
    texts = ("a", " b", "\n", "d", "e <&>", "f")
    return DraftedStep(small_tree, (10, 11, 12, 13, 14, 15), texts, CHANCES, (0, 1, 4), 99, " end", 2, "Once\nupon")


def groups(picture: str, kind: str) -> list[ElementTree.Element]:
    """The groups of nodes of a class."""
    return [one for one in ElementTree.fromstring(picture).findall(f"{SVG}g") if kind in one.attrib["class"].split()]


def texts_of(found: list[ElementTree.Element]) -> list[str | None]:
    return [one.findtext(f"{SVG}text") for one in found]


def test_accepted_path_is_marked(step: DraftedStep) -> None:
    """The accepted nodes and edges have their class, the widest lines, and are drawn over the others."""
    picture = render_svg(step.tree, label="token", step=step)
    assert texts_of(groups(picture, "accepted")) == ["a", "␣b", "e␣<&>"]
    assert [one.attrib["data-node"] for one in groups(picture, "accepted")] == ["0", "1", "4"]
    edges = ElementTree.fromstring(picture).findall(f"{SVG}path")
    red = [edge for edge in edges if "accepted" in edge.attrib["class"].split()]
    assert [edge.attrib["data-node"] for edge in red] == ["1", "4"]
    assert edges[-2:] == red
    others = [float(edge.attrib["stroke-width"]) for edge in edges if edge not in red]
    assert all(float(edge.attrib["stroke-width"]) >= 2 * max(others) for edge in red)


def test_token_after_the_path_is_drawn_beside_it(step: DraftedStep) -> None:
    """It is in the column after the accepted node; without one, where the text ends, nothing is drawn."""
    picture = render_svg(step.tree, label="token", step=step)
    [bonus] = groups(picture, "bonus")
    assert texts_of([bonus]) == ["␣end"]
    at = {one.attrib["data-node"]: one.find(f"{SVG}circle") for one in groups(picture, "node") if one is not bonus}
    circle, deepest, last = bonus.find(f"{SVG}circle"), at["5"], at["4"]
    assert circle is not None
    assert deepest is not None
    assert last is not None
    assert (circle.attrib["cx"], circle.attrib["cy"]) == (deepest.attrib["cx"], last.attrib["cy"])
    ended = dataclasses.replace(step, bonus=None, bonus_text="")
    assert groups(render_svg(step.tree, label="token", step=ended), "bonus") == []


def test_step_is_in_words(step: DraftedStep) -> None:
    """Title and description have the step, the size, the most probable path and the accepted path."""
    root = ElementTree.fromstring(render_svg(step.tree, label="token", step=step))
    assert root.findtext(f"{SVG}title") == "step 2 after “Once↵upon”: 6 nodes, depth 3, 3 leaves"
    assert root.findtext(f"{SVG}desc") == (
        "A tree of 6 nodes, depth 3, 3 leaves. Most probable path: [1], with probability 0.2. "
        "Step 2: after the root 'a', 2 drafts accepted: '␣b' 'e␣<&>'; the next token is '␣end'."
    )
    nothing = dataclasses.replace(step, accepted=(0,), bonus=None)
    assert "Step 2: after the root 'a', no draft accepted." in render_svg(step.tree, step=nothing)


def test_node_without_a_draft_is_marked(step: DraftedStep) -> None:
    """It is hollow, without a token."""
    void = dataclasses.replace(step, tokens=(10, 11, None, 13, 14, 15), probabilities=(None, 0.75, None, 0.5, 0.2, 0.1))
    [found] = groups(render_svg(step.tree, label="token", step=void), "void")
    assert (found.attrib["data-node"], found.findtext(f"{SVG}text")) == ("2", "∅")
    assert (found.findtext(f"{SVG}title") or "").startswith("no draft; node 2")


@looped(("label", "fix"), [("probability", "treeopt build"), ("token", "--example")])
def test_labels_that_a_tree_lacks_are_one_error(label: str, fix: str) -> None:
    """Probabilities need values, tokens a step: E107, with what gives them."""
    with pytest.raises(TreeoptError) as caught:
        render_svg(load_tree("mc_sim_7b_63"), label=label)
    assert caught.value.code is Code.LABEL_UNKNOWN
    assert fix in str(caught.value)


def test_dot_has_the_same_labels(step: DraftedStep) -> None:
    """DOT has the labels and tooltips of the SVG, the accepted path in red, and the token after it."""
    dot = render_dot(scene_of(step.tree, label="token", step=step))
    lines = {line.split()[0]: line for line in dot.splitlines() if "label=" in line}
    assert len(lines) == 7
    for node, label in enumerate(["a", "␣b", "↵", "d", "e␣<&>", "f", "␣end"]):
        assert label in lines[str(node)]
        assert ("penwidth=3" in lines[str(node)]) == (node in step.accepted)
    assert "0 -> 1 [color=" in dot
    assert "0 -> 2\n" in dot


def test_json_has_what_is_drawn(step: DraftedStep) -> None:
    """Nodes with labels, tokens and the accepted path."""
    data = drawn_data(step.tree, label="token", step=step)
    assert data["accepted"] == [0, 1, 4]
    assert data["accepted_tokens"] == [10, 11, 14]
    assert data["accepted_texts"] == ["a", " b", "e <&>"]
    assert data["bonus"] == {"token": 99, "text": " end"}
    assert data["drawn"][4] == {
        "kind": "node",
        "label": "e␣<&>",
        "node": 4,
        "parent": 1,
        "path": [0, 1],
        "value": 0.1,
        "token": 14,
        "text": "e <&>",
        "probability": 0.25,
        "accepted": True,
    }
    assert len(data["drawn"]) == 6


@looped(
    "change",
    [{"tokens": (1, 2)}, {"accepted": (1, 3)}, {"accepted": ()}, {"accepted": (0, 4)}, {"accepted": (0, 1, 9)}],
)
def test_step_that_contradicts_its_tree_is_refused(step: DraftedStep, change: dict[str, tuple[int, ...]]) -> None:
    """Lists of another length, and accepted nodes that are no path from the root."""
    with pytest.raises(ValueError, match="nodes"):
        dataclasses.replace(step, **change)
