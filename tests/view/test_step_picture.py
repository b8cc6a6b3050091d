"""The picture of one step: tokens, the accepted path in red, the token after it, and the step in words."""

from __future__ import annotations

import dataclasses
from xml.etree import ElementTree

import pytest

from treeopt.drafted_step import DraftedStep
from treeopt.errors import Code, TreeoptError
from treeopt.files.trees import load_tree
from treeopt.tree import Tree
from treeopt.view.graph import render_dot
from treeopt.view.scene import drawn_data, scene_of, short_probability, shortened, visible
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


def test_tooltips_have_token_and_probability(step: DraftedStep) -> None:
    """The tooltip has the token with its id, the base model's probability and, of a built tree, its value."""
    titles = [one.findtext(f"{SVG}title") for one in groups(render_svg(step.tree, step=step), "node")]
    assert titles == [
        "token 10 'a'; root: the base model's token",
        "token 11 '␣b' (accepted), probability 0.75 in the base model; "
        "node 1: path [0], rank 0 of level 1, right with probability 0.5",
        "token 12 '↵', probability 0.125 in the base model; "
        "node 2: path [1], rank 1 of level 1, right with probability 0.2",
        "token 13 'd', probability 0.5 in the base model; "
        "node 3: path [0, 0], rank 0 of level 2, right with probability 0.25",
        "token 14 'e␣<&>' (accepted), probability 0.25 in the base model; "
        "node 4: path [0, 1], rank 1 of level 2, right with probability 0.1",
        "token 15 'f', probability 0.0625 in the base model; "
        "node 5: path [0, 0, 0], rank 0 of level 3, right with probability 0.125",
        "token 99 '␣end': the base model's token after the accepted path",
    ]


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


@pytest.mark.parametrize(
    ("label", "with_step", "without"),
    [
        ("rank", ["0", "1", "0", "1", "0"], ["0", "1", "0", "1", "0"]),
        ("probability", [".75", ".12", ".50", ".25", ".062"], [".50", ".20", ".25", ".10", ".12"]),
        ("none", [None] * 5, [None] * 5),
    ],
)
def test_labels(step: DraftedStep, label: str, with_step: list[str], without: list[str]) -> None:
    """Probabilities are the values of the tree; of a step those in the base model. The root has neither."""
    assert texts_of(groups(render_svg(step.tree, label=label, step=step), "node"))[:6] == [None, *with_step]
    assert texts_of(groups(render_svg(step.tree, label=label), "node")) == [None, *without]


@pytest.mark.parametrize(("label", "fix"), [("probability", "treeopt build"), ("token", "--example")])
def test_labels_that_a_tree_lacks_are_one_error(label: str, fix: str) -> None:
    """Probabilities need values, tokens a step: E107, with what gives them."""
    with pytest.raises(TreeoptError) as caught:
        render_svg(load_tree("mc_sim_7b_63"), label=label)
    assert caught.value.code is Code.LABEL_UNKNOWN
    assert fix in str(caught.value)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (1.0, "1"),
        (0.996, "1"),
        (0.99, ".99"),
        (0.1, ".10"),
        (0.0999, ".10"),
        (0.048, ".048"),
        (0.00096, ".001"),
        (0.0003, "3e-4"),
        (2.6e-11, "3e-11"),
        (0.0, "0"),
    ],
)
def test_probabilities_are_short(value: float, shown: str) -> None:
    """At most five characters, right to two digits where they matter."""
    assert short_probability(value) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (" a b", "␣a␣b"),
        ("\n\n\t", "↵↵⇥"),
        ("\r", "␍"),
        ("\x1b[0m", "\\x1b[0m"),
        ("\u202e", "\\u202e"),
        ("e\u0301", "e\\u0301"),
        ("日本", "日本"),
        ("\U000e0001", "\\U000e0001"),
    ],
)
def test_white_space_of_tokens_is_visible(text: str, shown: str) -> None:
    """Spaces, line ends and tabs have signs; what prints nothing is escaped."""
    assert visible(text) == shown


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


@pytest.mark.parametrize(
    "change",
    [{"tokens": (1, 2)}, {"accepted": (1, 3)}, {"accepted": ()}, {"accepted": (0, 4)}, {"accepted": (0, 1, 9)}],
)
def test_step_that_contradicts_its_tree_is_refused(step: DraftedStep, change: dict[str, tuple[int, ...]]) -> None:
    """Lists of another length, and accepted nodes that are no path from the root."""
    with pytest.raises(ValueError, match="nodes"):
        dataclasses.replace(step, **change)


def test_text_is_cut_beyond_its_longest_length() -> None:
    """A text of the greatest length stays; a longer one ends with an ellipsis, at this length."""
    assert [shortened(text, 4) for text in ("abc", "abcd", "abcde")] == ["abc", "abcd", "abc\u2026"]
    assert (short_probability(0.00095), short_probability(0.0009)) == (".001", "9e-4")
