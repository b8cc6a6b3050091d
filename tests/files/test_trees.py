"""Tree files: what is written comes back equal, and what is no tree is one clear error."""

from __future__ import annotations

import dataclasses
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from helpers import random_tree
from hypothesis import given, settings
from hypothesis import strategies as st
from looped import looped
from refusals import refusal_of

from treeopt.errors import Code, TreeoptError
from treeopt.files import strict_yaml
from treeopt.files.bundled import zoo
from treeopt.files.trees import load_tree, save_tree, tree_yaml
from treeopt.tree import Expected, Tree

HEAD = "schema: treeopt.tree/1\nnodes: 3\npaths:\n"
MEDUSA = [
    "mc_sim_7b_63",
    "vicuna_13b_stage1",
    "vicuna_13b_stage2",
    "vicuna_33b_stage1",
    "vicuna_33b_stage2",
    "vicuna_7b_stage1",
    "vicuna_7b_stage1_ablation",
    "vicuna_7b_stage2",
    "zephyr_stage2",
]
ZOO = sorted([*MEDUSA, "token_recycling"])

BROKEN: dict[str, tuple[str | bytes, str, str]] = {  # content, line:column, a word of the message
    "empty file": ("", "1:1", "is empty"),
    "comments only": ("# no tree\n", "1:1", "is empty"),
    "alias bomb": (
        "schema: treeopt.tree/1\na: &a [x, x, x]\nb: &b [*a, *a, *a]\nc: [*b, *b]\nnodes: 1\npaths: []\n",
        "3:8",
        "alias",
    ),
    "duplicate key": ("schema: treeopt.tree/1\nnodes: 1\nnodes: 1\npaths: []\n", "3:1", "twice"),
    "duplicate key in a path": (HEAD + "- {path: [0], path: [0]}\n- {path: [1]}\n", "4:15", "twice"),
    "unknown key": ("schema: treeopt.tree/1\nnodes: 1\ncolour: red\npaths: []\n", "3:9", "colour"),
    "unknown key in a path": (HEAD + "- {path: [0], colour: 1}\n- {path: [1]}\n", "4:23", "colour"),
    "merge key": ("schema: treeopt.tree/1\nnodes: 1\n<<: {reference: x}\npaths: []\n", "3:5", "<<"),
    "newer schema": ("schema: treeopt.tree/2\nnodes: 1\npaths: []\n", "1:9", "treeopt.tree/2"),
    "another schema": ("nodes: 1\nschema: treeopt.prompts/1\npaths: []\n", "2:9", "treeopt.prompts/1"),
    "no schema": ("nodes: 1\npaths: []\n", "1:1", "treeopt.tree/1"),
    "a list": ("- a\n- b\n", "1:1", "treeopt.tree/1"),
    "a word": ("tree\n", "1:1", "treeopt.tree/1"),
    "no paths": ("schema: treeopt.tree/1\nnodes: 1\n", "1:1", "paths"),
    "paths left empty": ("schema: treeopt.tree/1\nnodes: 1\npaths:\n", "3:7", "paths"),
    "deep nesting": ("[" * 3000, "1:", "nested"),
    "deep nesting, closed": ("schema: treeopt.tree/1\npaths: " + "[" * 3000 + "]" * 3000, "2:27", "nested"),
    "deep nesting of maps": ("{a: " * 3000, "1:81", "nested"),
    "deep nesting in blocks": ("- " * 3000 + "a\n", "1:41", "nested"),
    "octal rank": (HEAD + "- {path: [0]}\n- {path: [010]}\n", "5:11", "'010'"),
    "sexagesimal rank": (HEAD + "- {path: [0]}\n- {path: [1:30]}\n", "5:11", "'1:30'"),
    "no as rank": (HEAD + "- {path: [0]}\n- {path: [no]}\n", "5:11", "'no'"),
    "hexadecimal rank": (HEAD + "- {path: [0]}\n- {path: [0x1]}\n", "5:11", "'0x1'"),
    "rank of 5000 digits": (HEAD + "- {path: [0]}\n- {path: [" + "9" * 5000 + "]}\n", "5:11", "999"),
    "true as rank": (HEAD + "- {path: [0]}\n- {path: [true]}\n", "5:11", "integer"),
    "float rank": (HEAD + "- {path: [0]}\n- {path: [1.0]}\n", "5:11", "integer"),
    "text as rank": (HEAD + '- {path: [0]}\n- {path: ["1"]}\n', "5:11", "integer"),
    "null as rank": (HEAD + "- {path: [0]}\n- {path: [null]}\n", "5:11", "integer"),
    "negative rank": (HEAD + "- {path: [0]}\n- {path: [-1]}\n", "5:11", "greater than or equal to 0"),
    "orphan path": (HEAD + "- {path: [0]}\n- {path: [1, 0]}\n", "5:3", "[1, 0]: its parent [1] is missing"),
    "duplicate path": (HEAD + "- {path: [0]}\n- {path: [0]}\n", "5:3", "[0] occurs twice"),
    "root among the paths": (HEAD + "- {path: [0]}\n- {path: []}\n", "5:3", "root"),
    "too few nodes": (HEAD.replace("3", "2") + "- {path: [0]}\n- {path: [1]}\n", "2:8", "root and paths are 3"),
    "too many nodes": (HEAD.replace("3", "4") + "- {path: [0]}\n- {path: [1]}\n", "2:8", "root and paths are 3"),
    "values on some paths only": (HEAD + "- {path: [0], value: 0.5}\n- {path: [1]}\n", "5:3", "no value"),
    "value above one": (HEAD + "- {path: [0], value: 1.5}\n- {path: [1], value: 0.1}\n", "4:22", "less than or equal"),
    "value not a number": (HEAD + "- {path: [0], value: .nan}\n- {path: [1], value: 0.1}\n", "4:22", "'.nan'"),
    "not UTF-8": (b"schema: \xff\xfe\n", "1:1", "UTF-8"),
    "UTF-16": ("schema: treeopt.tree/1\n".encode("utf-16"), "1:1", "UTF-8"),
    "tab": ("schema: treeopt.tree/1\n\tnodes: 1\n", "2:1", "not YAML"),
    "garbage": ("}{ no YAML", "1:1", "not YAML"),
    "zero byte": ("schema: treeopt\0tree\n", "1:1", "not YAML"),
    "bad indentation": ("schema: treeopt.tree/1\n  nodes: 1\n", "2:8", "not YAML"),
    "two documents": ("schema: treeopt.tree/1\nnodes: 1\npaths: []\n---\na: 1\n", "4:1", "not YAML"),
    "a list as key": ("? [a]\n: 1\n", "1:3", "key"),
    "object as scalar": (HEAD + "- {path: [0]}\n- {path: [!!python/object/apply:os.system x]}\n", "5:11", "os.system"),
    "object as paths": (
        "schema: treeopt.tree/1\nnodes: 1\npaths: !!python/object/apply:os.system ['touch pwned']\n",
        "3:",
        "",
    ),
    "object as document": ("!!python/object/apply:os.system ['touch pwned']\n", "1:1", ""),
}


@looped("name", BROKEN)
def test_broken_file_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """What is no tree is E203 with file, line and column, and nothing in the file is executed."""
    monkeypatch.chdir(tmp_path)
    content, place, word = BROKEN[name]
    path = tmp_path / "broken.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    refused = refusal_of(load_tree, path)
    error = refused
    assert error.code is Code.FILE_INVALID
    assert len(error.at.splitlines()) == 1
    found = re.match(re.escape(str(path)) + r":(\d+:\d+)(\s|$)", error.at)
    assert found, error.at
    assert found[1].startswith(place)
    assert word in error.what + error.at
    assert [file.name for file in tmp_path.iterdir()] == ["broken.yaml"]


def test_too_large_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file beyond the limit is E203 that names both sizes; one within it is read."""
    path = tmp_path / "tree.yaml"
    path.write_text(HEAD + "- {path: [0]}\n- {path: [1]}\n")
    monkeypatch.setattr(strict_yaml, "MAX_BYTES", 67)
    assert load_tree(path).nodes == 3
    monkeypatch.setattr(strict_yaml, "MAX_BYTES", 66)
    error = refusal_of(load_tree, path)
    assert error.code is Code.FILE_INVALID
    assert f"{path} has 67 bytes; at most 66" in error.what


def test_faults_come_together_up_to_ten(tmp_path: Path) -> None:
    """Three faults in three places are one error with three lines; of 25 ten are listed, the others counted."""
    path = tmp_path / "tree.yaml"
    path.write_text("schema: treeopt.tree/1\nnodes: 9\npaths:\n- {path: [0]}\n- {path: [0]}\n- {path: [2, 1]}\n")
    error = refusal_of(load_tree, path)
    places = [line.split("  ")[0].removeprefix(f"{path}:") for line in error.at.splitlines()]
    assert places == ["5:3", "6:3", "2:8"]
    path = tmp_path / "tree.yaml"
    lines = "".join(f"- {{path: [{rank}, 0]}}\n" for rank in range(25))
    path.write_text(f"schema: treeopt.tree/1\nnodes: 26\npaths:\n{lines}")
    error = refusal_of(load_tree, path)
    listed = error.at.splitlines()
    assert len(listed) == 11
    assert listed[-1] == "and 15 more"
    assert "25 faults" in error.what


@looped("name", ["absent.yaml", "absent.yml", "folder/absent"])
def test_missing_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """What looks like a file and is none is E201."""
    monkeypatch.chdir(tmp_path)
    error = refusal_of(load_tree, name)
    assert error.code is Code.FILE_MISSING
    assert name in error.what


def test_unknown_names() -> None:
    """A name that is nearly one of the zoo is E104 and suggests it; one like no other says where the names are."""
    error = refusal_of(load_tree, "mc_sim_7b_36")
    assert error.code is Code.TREE_UNKNOWN
    assert "mc_sim_7b_63" in error.fix
    error = refusal_of(load_tree, "oak")
    assert error.code is Code.TREE_UNKNOWN
    assert "treeopt list" in error.fix


TEXT = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cn", "Cs"], include_characters="\t\n\0\x1b"))
DETAILS = st.dictionaries(st.sampled_from(["model", "top_k", "prompts"]), TEXT | st.integers(), min_size=1)
SOURCES = st.fixed_dictionaries(
    {}, optional={"made_by": TEXT, "reference": TEXT, "method": DETAILS, "calibration": DETAILS}
)
TOKENS = st.floats(1.0, 1000.0)
EXPECTED = st.builds(Expected, independent=TOKENS, replay=TOKENS, top_k=st.integers(1, 253))


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    """Trees of any shape, with and without values, figures and source."""
    tree = random_tree(draw(st.integers(0, 10**6)), nodes=draw(st.integers(1, 25)), depth=5, ranks=12)
    count = len(tree.paths)
    values: Any = None
    if count and draw(st.booleans()):
        known: dict[tuple[int, ...], float] = {(): 1.0}
        shares = draw(st.lists(st.floats(0.0, 1.0), min_size=count, max_size=count))
        for path, share in zip(tree.paths, shares, strict=True):
            known[path] = known[path[:-1]] * share  # no child is worth more than its parent
        values = tuple(known[path] for path in tree.paths)
    expected = draw(st.none() | EXPECTED)
    if expected is not None:
        most = 1.0 + tree.depth
        expected = Expected(min(expected.independent, most), min(expected.replay, most), expected.top_k)
    return Tree(tree.paths, values, expected, draw(SOURCES), draw(st.just("") | TEXT))


@settings(max_examples=60, deadline=None)
@given(tree=trees())
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, tree: Tree) -> None:
    """A tree comes back equal in paths, values, expected and source, and its file can be written again to the byte."""
    path = tmp_path_factory.getbasetemp() / "round_trip.yaml"
    save_tree(tree, path)
    loaded = load_tree(path)
    assert loaded == tree
    assert loaded.expected == tree.expected
    assert loaded.source == tree.source
    again = path.with_name("round_trip_again.yaml")
    save_tree(loaded, again)
    assert again.read_bytes() == path.read_bytes()


FIGURES = Expected(2.5, 2.6, 32, 2.4, 2.1, 2.7)


@looped(
    ("written", "edited", "fault"),
    [
        ("replay: 2.6", "replay: 260", "expected_tokens_per_step.replay: replay is 260, and a step of a tree 3 deep"),
        ("replay: 2.6", "replay: 4.1", "expected_tokens_per_step.replay: "),
        ("independent: 2.5", "independent: 4.01", "expected_tokens_per_step.independent: "),
        ("cross_validated: 2.4", "cross_validated: 5", "expected_tokens_per_step.cross_validated: "),
        ("high: 2.7", "high: 1e999", "expected_tokens_per_step.high: "),
        ("low: 2.1", "low: 2.8", "expected_tokens_per_step.low: low is above high"),
        ("[0, 0], value: 0.25", "[0, 0], value: 0.51", "has the value 0.51, above 0.5, the value of its parent"),
    ],
)
def test_figures_that_no_tree_has_are_refused(
    small_tree: Tree, tmp_path: Path, written: str, edited: str, fault: str
) -> None:
    """A file that was edited by hand: E203 with the place; the greatest figure that is possible is read."""
    file = tmp_path / "t.yaml"
    save_tree(dataclasses.replace(small_tree, expected=FIGURES), file)
    text = file.read_text()
    assert written in text
    file.write_text(text.replace(written, edited))
    error = refusal_of(load_tree, file)
    assert error.code is Code.FILE_INVALID
    assert fault in str(error)
    file.write_text(text.replace("replay: 2.6", "replay: 4.0").replace("high: 2.7", "high: 4.6"))
    assert load_tree(file).expected == dataclasses.replace(FIGURES, replay=4.0, high=4.6)


@looped("value", [0.0, 1.0, 5e-324, 1e-7, 1.5e-7, 0.1, 1 / 3])
def test_round_trip_of_a_value(tmp_path: Path, value: float) -> None:
    """Every float is written so that YAML reads the same number."""
    save_tree(Tree(((0,),), (value,)), tmp_path / "tree.yaml")
    assert load_tree(tmp_path / "tree.yaml").values == (value,)


def test_text_of_a_tree_file(small_tree: Tree) -> None:
    """One line a path, in the order of the record, behind the schema and the number of nodes."""
    assert tree_yaml(small_tree) == (
        "# 6 nodes = 1 root + 5 drafts, depth 3, 3 leaves\n"
        "schema: treeopt.tree/1\n"
        "nodes: 6\n"
        "paths:\n"
        "- {path: [0], value: 0.5}\n"
        "- {path: [1], value: 0.2}\n"
        "- {path: [0, 0], value: 0.25}\n"
        "- {path: [0, 1], value: 0.1}\n"
        "- {path: [0, 0, 0], value: 0.125}\n"
    )


def test_paths_in_any_order_are_read(tmp_path: Path, small_tree: Tree) -> None:
    """Lines may be moved by hand: order is no content, children may stand before their parents."""
    head, lines = tree_yaml(small_tree).split("paths:\n")
    shuffled = lines.splitlines(keepends=True)
    random.Random(3).shuffle(shuffled)
    assert "".join(shuffled) != lines
    (tmp_path / "tree.yaml").write_text(f"{head}paths:\n{''.join(shuffled)}")
    assert load_tree(tmp_path / "tree.yaml") == small_tree


@looped("change", [lambda text: text.replace("\n", "\r\n"), lambda text: "\ufeff" + text])
def test_files_of_other_editors_are_read(tmp_path: Path, small_tree: Tree, change: Any) -> None:
    """Windows line ends and a byte order mark change nothing."""
    (tmp_path / "tree.yaml").write_bytes(change(tree_yaml(small_tree)).encode())
    assert load_tree(str(tmp_path / "tree.yaml")) == small_tree


@looped("name", MEDUSA)
def test_zoo_tree_is_as_published(shared: Path, name: str) -> None:
    """A tree published with Medusa has the root and the 63 published paths, no values, and says where it comes from."""
    published = json.loads((shared / "data" / "published_trees.json").read_text())["trees"]
    tree = load_tree(name)
    assert tree.nodes == 64
    assert tree == Tree.from_paths(published[name])
    assert tree.values is None
    assert "arXiv:2401.10774" in tree.source["reference"]


def test_zoo_tree_of_token_recycling_is_as_published(shared: Path) -> None:
    """It has the root and the 80 published paths, no values, and says where it comes from."""
    published = json.loads((shared / "data" / "token_recycling_tree.json").read_text())["paths"]
    tree = load_tree("token_recycling")
    assert (tree.nodes, tree.depth, tree.max_rank) == (81, 6, 7)
    assert tree == Tree.from_paths(published)
    assert tree.values is None
    assert "arXiv:2408.08696" in tree.source["reference"]


@looped("name", ZOO)
def test_zoo_file_is_as_written(name: str) -> None:
    """A file of the zoo has the form that treeopt writes."""
    assert zoo()[name].read_text() == tree_yaml(load_tree(name))


@looped("line", ["- {path: !!python/object/apply:os.system [0]}", "- !!set {path: [0]}", "- {!!str path: [0]}"])
def test_tags_are_refused_everywhere(tmp_path: Path, line: str) -> None:
    """A tag on a list, a mapping or a key is refused, not ignored."""
    target = tmp_path / "tagged.yaml"
    target.write_text(f"schema: treeopt.tree/1\nnodes: 2\npaths:\n{line}\n")
    with pytest.raises(TreeoptError, match="uses the tag") as caught:
        load_tree(target)
    assert ":4:" in caught.value.at


def test_names_of_any_characters_survive(tmp_path: Path) -> None:
    """Control characters, a line separator and a file name that is not UTF-8 leave a readable file."""
    target = tmp_path / "tree.yaml"
    save_tree(Tree(((0,),), source={"made_by": "a\x7f\x85b\ufeff\udce9"}), target)
    assert load_tree(target).source["made_by"] == "a\x7f\x85b\ufeff?"


def test_name_too_long_for_a_file_is_an_unknown_tree() -> None:
    """A name longer than any file's is E104, not the system's error."""
    assert refusal_of(load_tree, "x" * 300).code is Code.TREE_UNKNOWN


def test_edited_tree_loses_its_expectation(tmp_path: Path) -> None:
    """Figures of the old tree do not stand for the one that a user made of it by hand."""
    target = tmp_path / "tree.yaml"
    save_tree(Tree(((0,), (1,)), (0.5, 0.2), Expected(1.7, 1.6, 9)), target)
    assert load_tree(target).expected == Expected(1.7, 1.6, 9)
    text = target.read_text().replace("nodes: 3", "nodes: 2").replace("- {path: [1], value: 0.2}\n", "")
    target.write_text(text)
    assert load_tree(target) == Tree(((0,),), (0.5,))
    assert load_tree(target).expected is None


def test_tree_too_large_to_read_back_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What could not be read is refused before it is written."""
    monkeypatch.setattr(strict_yaml, "MAX_BYTES", 200)
    assert refusal_of(save_tree, Tree.chain(30), tmp_path / "tree.yaml").code is Code.FILE_UNWRITABLE
    assert list(tmp_path.iterdir()) == []


def test_trees_of_drafters_differ() -> None:
    """The same paths for two drafters are two trees; ranks count among other candidates."""
    assert Tree(((0,),), drafter="a") != Tree(((0,),), drafter="b") != Tree(((0,),))


@looped("line", ["drafter: {file: d}", "drafter: abc", "drafter: {id: 3}", "drafter: {id: a, x: 1}"])
def test_broken_drafter_line_is_refused(tmp_path: Path, line: str) -> None:
    """The drafter is an id and at most a file."""
    target = tmp_path / "tree.yaml"
    target.write_text(tree_yaml(Tree(((0,),))).replace("paths:", f"{line}\npaths:"))
    assert refusal_of(load_tree, target).code is Code.FILE_INVALID
