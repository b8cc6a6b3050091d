"""Policy files: round trip, moved with their drafter, and refused where they are not right."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
from looped import looped
from refusals import refusal_of

from treeopt.drafter import Drafter
from treeopt.errors import Code, TreeoptError
from treeopt.files.drafters import save_drafter
from treeopt.files.schedules import as_plan_for, load_plan_for
from treeopt.files.trees import load_plan, load_tree, plan_id, policy_yaml, save_policy, save_tree
from treeopt.policy import PolicyExpected, TreePolicy
from treeopt.tree import Tree

DRAFTER = Drafter.heads_only(2, 4)
FIXED = TreePolicy(20, 3, DRAFTER.id)
COSTED = TreePolicy(
    8,
    3,
    DRAFTER.id,
    ((1, 0.123456), (8, 1.5)),
    PolicyExpected(2.5, 2.4, 5.5, 2.1, 2.9),
    {"made_by": "treeopt x", "calibration": {"heads_id": "h", "prompts": 4}},
)


PATHS = dataclasses.replace(COSTED, path_tokens=True)


@looped("policy", [FIXED, COSTED, PATHS, TreePolicy(24, 3, DRAFTER.id, path_tokens=True)])
def test_round_trip(tmp_path: Path, policy: TreePolicy) -> None:
    """All of it comes back, and is written again to the byte."""
    save_policy(policy, tmp_path / "p.yaml")
    found = load_plan(tmp_path / "p.yaml")
    assert isinstance(found, TreePolicy)
    assert (found, found.expected, found.source) == (policy, policy.expected, policy.source)
    save_policy(found, tmp_path / "again.yaml")
    assert (tmp_path / "again.yaml").read_bytes() == (tmp_path / "p.yaml").read_bytes()


def test_ids_tell_the_units_apart() -> None:
    """Eight nodes are not eight path tokens; figures change no id."""
    assert plan_id(PATHS) != plan_id(COSTED)
    assert plan_id(PATHS) == plan_id(dataclasses.replace(PATHS, expected=None))


@looped("line", ["", "nodes: 8\npath_tokens: 8", "path_tokens: 7"])
def test_a_policy_has_one_size(tmp_path: Path, line: str) -> None:
    """Nodes or path tokens, and of these only the sizes that are traced: E203 with the line's place."""
    text = policy_yaml(PATHS)
    assert text.count("path_tokens: 8") == 1
    (tmp_path / "p.yaml").write_text(text.replace("path_tokens: 8", line))
    error = refusal_of(load_plan, tmp_path / "p.yaml")
    assert error.code is Code.FILE_INVALID
    assert "nodes" in error.at


def test_costs_beyond_float64_are_refused(tmp_path: Path) -> None:
    """A cost of 10^400 is E203 with its place."""
    text = policy_yaml(COSTED)
    (size, cost), *_ = COSTED.size_cost
    assert f"- [{size}, {cost:g}]" in text
    (tmp_path / "p.yaml").write_text(text.replace(f"- [{size}, {cost:g}]", f"- [{size}, 1{'0' * 400}]"))
    with pytest.raises(TreeoptError, match=r"size_cost\.0\.1") as caught:
        load_plan(tmp_path / "p.yaml")
    assert caught.value.code is Code.FILE_INVALID


@looped("kind", ["policy", "tree"])
def test_drafter_is_found_from_the_files_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Written in one folder, and moved with the drafter to another, a plan still finds it; given, the given counts."""
    monkeypatch.chdir(tmp_path)
    Path("a/b").mkdir(parents=True)
    save_drafter(DRAFTER, "a/d.safetensors")
    source = {"drafter": "a/d.safetensors"}
    if kind == "tree":
        save_tree(Tree(((0,),), drafter=DRAFTER.id, source=source), "a/b/p.yaml")
    else:
        save_policy(TreePolicy(20, 3, DRAFTER.id, source=source), "a/b/p.yaml")
    os.rename("a", "elsewhere")
    plan, drafter = load_plan_for("elsewhere/b/p.yaml")
    assert drafter is not None
    assert plan.drafter == drafter.id == DRAFTER.id
    assert plan.source["drafter"] == "elsewhere/d.safetensors"
    save_drafter(Drafter.heads_only(1, 4), "other")
    _, given = as_plan_for("elsewhere/b/p.yaml", "other")
    assert given is not None
    assert given.id != DRAFTER.id


def test_missing_drafter_names_the_tree(tmp_path: Path) -> None:
    """A tree moved without its drafter: another one would not do, so learning anew is not advised."""
    save_policy(TreePolicy(20, 3, DRAFTER.id, source={"drafter": str(tmp_path / "d.safetensors")}), tmp_path / "p.yaml")
    error = refusal_of(load_plan_for, tmp_path / "p.yaml")
    assert error.code is Code.FILE_MISSING
    assert "p.yaml" in error.what
    assert "--drafter" in error.fix
    assert "learn" not in error.fix


def test_plan_that_names_no_file(tmp_path: Path) -> None:
    """Without a file there is no drafter; a tree of the heads drafter has none at all."""
    save_policy(FIXED, tmp_path / "p.yaml")
    assert load_plan_for(tmp_path / "p.yaml") == (FIXED, None)
    save_tree(Tree(((0,),)), tmp_path / "t.yaml")
    assert load_plan_for(tmp_path / "t.yaml") == (Tree(((0,),)), None)


CHANGES = {
    "cost without a size": ("- [1, 0.123456]", "- [1]"),
    "cost of three": ("- [1, 0.123456]", "- [1, 0.1, 0.2]"),
    "half a node": ("- [1, 0.123456]", "- [1.5, 0.1]"),
    "no number": ("- [1, 0.123456]", "- [1, .nan]"),
    "unknown key": ("kind: dynamic", "kind: dynamic\nwidth: 3"),
    "another kind": ("kind: dynamic", "kind: static"),
    "nodes as text": ("nodes: 8", "nodes: '8'"),
    "too many nodes": ("nodes: 8", "nodes: 300"),
    "no drafter": (f'id: "{DRAFTER.id}"', 'id: ""'),
    "no depth": ("depth: 3\n", ""),
    "too deep": ("depth: 3\n", "depth: 1000000\n"),
}


@looped("name", CHANGES)
def test_broken_file_is_refused(tmp_path: Path, name: str) -> None:
    """Every fault is E203 that names the file; nothing is left out in silence."""
    old, new = CHANGES[name]
    text = policy_yaml(COSTED)
    assert old in text
    (tmp_path / "p.yaml").write_text(text.replace(old, new))
    with pytest.raises(TreeoptError, match=r"p\.yaml") as caught:
        load_plan(tmp_path / "p.yaml")
    assert caught.value.code is Code.FILE_INVALID


@looped("schema", ["treeopt.policy/1", '"treeopt.policy/1"', "treeopt.policy/1  # mine"])
def test_load_tree_says_that_it_is_a_policy(tmp_path: Path, schema: str) -> None:
    """Who wants one tree is told that there is none, and what to do; however the schema is quoted."""
    text = policy_yaml(FIXED).replace("treeopt.policy/1", schema)
    (tmp_path / "p.yaml").write_text(text)
    assert load_plan(tmp_path / "p.yaml") == FIXED
    with pytest.raises(TreeoptError, match="a tree for each step") as caught:
        load_tree(tmp_path / "p.yaml")
    assert caught.value.code is Code.FILE_INVALID
    assert "treeopt build --kind static" in caught.value.fix


def test_plan_id_is_of_what_is_verified(tmp_path: Path) -> None:
    """A file, an order of paths and values leave the id; paths, drafter, sizes and their costs change it."""
    tree = Tree.from_paths([(0,), (1,), (0, 0)], (0.5, 0.3, 0.2))
    save_tree(tree, tmp_path / "tree.yaml")
    same = [tree, Tree.from_paths([(0, 0), (1,), (0,)]), load_plan(tmp_path / "tree.yaml")]
    assert {plan_id(one) for one in same} == {plan_id(tree)}
    others = [
        Tree.from_paths([(0,), (2,), (0, 0)]),
        Tree(tree.paths, drafter="abcd"),
        TreePolicy(4, 3, "abcd"),
        TreePolicy(4, 2, "abcd"),
        TreePolicy(8, 3, "abcd"),
        TreePolicy(8, 3, "abcd", ((4, 0.5), (8, 1.0))),
        TreePolicy(8, 3, "abcd", ((4, 0.5), (8, 1.5))),
    ]
    assert len({plan_id(one) for one in (tree, *others)}) == 8
