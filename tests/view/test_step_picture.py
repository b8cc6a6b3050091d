"""The picture of one step, and the words of all pictures."""

from __future__ import annotations

import dataclasses
from xml.etree import ElementTree

import pytest
from looped import looped
from refusals import refusal_of

from treeopt.drafted_step import DraftedStep
from treeopt.errors import Code, counted
from treeopt.files.trees import load_tree
from treeopt.tree import Tree
from treeopt.view.graph import render
from treeopt.view.scene import (
    Item,
    accepted_words,
    describe,
    describe_item,
    description,
    drawn_data,
    heading,
    label_of,
    short_probability,
    shortened,
    summary,
    visible,
    visible_line,
)
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


def test_a_step_says_how_to_read_it(step: DraftedStep) -> None:
    """One line below the heading of a step, inside the picture and above the columns; none without a step."""
    root = ElementTree.fromstring(render_svg(step.tree, label="token", step=step))
    title, hint, *columns = (one for one in root.findall(f"{SVG}text"))
    assert (hint.text or "").startswith("Left to right: each column is one more draft token. Red: accepted.")
    heights = [float(one.attrib["y"]) for one in (title, hint, columns[0])]
    assert heights == sorted(set(heights))
    first = min(float(one.attrib["cy"]) for one in root.iter(f"{SVG}circle"))
    assert first - 5 > heights[-1]
    assert float(root.attrib["width"]) > 5.5 * len(hint.text or "")
    assert float(root.attrib["height"]) > max(float(one.attrib["cy"]) for one in root.iter(f"{SVG}circle")) + 5
    assert "Left to right" not in render_svg(step.tree)


def test_node_without_a_draft_is_marked(step: DraftedStep) -> None:
    """It is hollow, without a token."""
    void = dataclasses.replace(step, tokens=(10, 11, None, 13, 14, 15), probabilities=(None, 0.75, None, 0.5, 0.2, 0.1))
    [found] = groups(render_svg(step.tree, label="token", step=void), "void")
    assert (found.attrib["data-node"], found.findtext(f"{SVG}text")) == ("2", "∅")
    assert (found.findtext(f"{SVG}title") or "").startswith("no draft; node 2")


@looped(("label", "fix"), [("probability", "treeopt build"), ("token", "--example")])
def test_labels_that_a_tree_lacks_are_one_error(label: str, fix: str) -> None:
    """Probabilities need values, tokens a step: E107, with what gives them."""
    error = refusal_of(render_svg, load_tree("mc_sim_7b_63"), label=label)
    assert error.code is Code.LABEL_UNKNOWN
    assert fix in str(error)


def test_dot_has_the_same_labels(step: DraftedStep) -> None:
    """DOT has the labels and tooltips of the SVG, the accepted path in red, and the token after it."""
    dot = render(step.tree, "dot", label="token", step=step).decode()
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


TREE = Tree.from_paths([[0], [1], [0, 2]], values=[0.5, 0.25, 0.125])
STEP = DraftedStep(TREE, (7, 8, None, 9), ("a", " b", "", "c\n"), (None, 0.75, None, 0.5), (0, 1), 5, "\t", 4, "x y\nz")


@looped(("value", "text"), [
    (None, ""), (1.0, "1"), (0.995, "1"), (0.994, ".99"), (0.5, ".50"), (0.0995, ".10"), (0.0994, ".099"),
    (0.048, ".048"), (0.00095, ".001"), (0.0009499, "9e-4"), (3e-4, "3e-4"), (2e-12, "2e-12"), (0.0, "0"),
])  # fmt: skip
def test_probabilities_in_five_characters(value: float | None, text: str) -> None:
    """Two or three digits, then a power of ten; the borders are those of rounding."""
    assert short_probability(value) == text


def test_words_by_hand() -> None:
    """Of 17 characters the first 15 and an ellipsis; marks that combine, and what is not printed, are escapes."""
    assert shortened("a" * 16) == "a" * 16
    assert shortened("a" * 17) == "a" * 15 + "…"
    assert shortened("abcd", 3) == "ab…"
    assert visible(" a\n\t\r") == "␣a↵⇥␍"
    assert visible("\x1bé\u0301\u200b\U000e0001") == "\\x1bé\\u0301\\u200b\\U000e0001"
    assert visible("\xff\x80\x9f\u0100") == "ÿ\\x80\\x9fĀ"
    assert visible_line("a b\nc\td") == "a b↵c⇥d"


@looped(("number", "noun", "words"), [
    (1, "leaf", "1 leaf"), (2, "leaf", "2 leaves"), (0, "node", "0 nodes"), (1, "node", "1 node"),
    (1234, "node", "1,234 nodes"),
])  # fmt: skip
def test_counts(number: int, noun: str, words: str) -> None:
    """Singular and plural."""
    assert counted(number, noun) == words


def test_labels_of_nodes() -> None:
    """Ranks, values of the tree, or tokens and probabilities of a step."""
    nodes = [Item(node, 0, 0) for node in range(4)]
    assert [label_of(TREE, item, "rank") for item in nodes] == ["", "0", "1", "2"]
    assert [label_of(TREE, item, "probability") for item in nodes] == ["", ".50", ".25", ".12"]
    assert [label_of(TREE, item, "none") for item in nodes] == [""] * 4
    assert [label_of(TREE, item, "token", STEP) for item in nodes] == ["a", "␣b", "∅", "c↵"]
    assert [label_of(TREE, item, "probability", STEP) for item in nodes] == ["", ".75", "", ".50"]
    bonus = Item(1, 1, 2, bonus=True)
    assert [label_of(TREE, bonus, label, STEP) for label in ("none", "rank", "token")] == ["", "⇥", "⇥"]
    assert label_of(TREE, bonus, "rank") == ""


def test_tooltips() -> None:
    """Path, rank, level or head, value; of a step the token first."""
    assert describe(TREE, 0) == "root: the base model's token"
    assert describe(TREE, 3) == "node 3: path [0, 2], rank 2 of head 2, right with probability 0.125"
    assert describe(TREE, 0, STEP) == "token 7 'a'; root: the base model's token"
    ends = {1: ", right with probability 0.5", 2: ", right with probability 0.25", 3: ", right with probability 0.125"}
    assert describe(TREE, 1, STEP) == (
        "token 8 '␣b' (accepted), probability 0.75 in the base model; node 1: path [0], rank 0 of level 1" + ends[1]
    )
    assert describe(TREE, 2, STEP) == "no draft; node 2: path [1], rank 1 of level 1" + ends[2]
    assert describe(TREE, 3, STEP) == (
        "token 9 'c↵', probability 0.5 in the base model; node 3: path [0, 2], rank 2 of level 2" + ends[3]
    )
    assert describe_item(TREE, Item(1, 1, 2, bonus=True), STEP) == (
        "token 5 '⇥': the base model's token after the accepted path"
    )
    assert describe_item(TREE, Item(1, 0, 1)) == describe(TREE, 1)


def test_headings() -> None:
    """A title, else the size; a step has its text; where not all nodes are drawn, their number."""
    assert summary(TREE) == "4 nodes, depth 2, 2 leaves"
    assert heading(TREE, "", 4) == "4 nodes, depth 2, 2 leaves"
    assert heading(TREE, "a\x00 title\n", 4) == "a title"
    assert heading(TREE, "", 3) == "4 nodes, depth 2, 2 leaves (3 drawn)"
    assert heading(TREE, "", 4, STEP) == "step 4 after “x y↵z”: 4 nodes, depth 2, 2 leaves"
    drafted = Tree(TREE.paths, drafter="d1")
    assert heading(drafted, "t", 4) == "t, of drafter d1"
    assert describe(drafted, 1) == "node 1: path [0], rank 0 of level 1"


def test_pictures_in_words() -> None:
    """The leaf of the largest value, and the accepted path."""
    assert description(TREE) == (
        "A tree of 4 nodes, depth 2, 2 leaves. Most probable path: [1], with probability 0.25."
    )
    accepted = "Step 4: after the root 'a', 1 draft accepted: '␣b'; the next token is '⇥'."
    assert accepted_words(STEP) == accepted
    assert description(Tree(TREE.paths), STEP) == (f"A tree of 4 nodes, depth 2, 2 leaves. {accepted}")
    ended = DraftedStep(TREE, STEP.tokens, STEP.texts, STEP.probabilities, (0,))
    assert accepted_words(ended) == "Step 1: after the root 'a', no draft accepted."
