"""The public functions that take a tree take it in every form, and refuse names and numbers that they do not know."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import random_calibration
from looped import looped

import treeopt
from treeopt.errors import Code, TreeoptError

NAME = "mc_sim_7b_63"
TREE = treeopt.load_tree(NAME)
TRACES = random_calibration(0, heads=5)
FORMS: dict[str, Callable[[Path], Any]] = {
    "name of treeopt list": lambda _: NAME,
    "name of a file": lambda file: str(file),
    "path of a file": lambda file: file,
    "list of paths": lambda _: [list(path) for path in TREE.paths],
    "tuples in another order": lambda _: tuple(reversed(TREE.paths)),
    "arrays": lambda _: map(np.array, TREE.paths),
}
TAKING: dict[str, Callable[[Any, Path], object]] = {
    "compare_trees, first": lambda tree, _: treeopt.compare_trees(tree, [[0]], TRACES),
    "compare_trees, second": lambda tree, _: treeopt.compare_trees([[0]], tree, TRACES),
    "explain_path": lambda tree, _: treeopt.explain_path(tree, [0, 3], TRACES),
    "replay": lambda tree, _: treeopt.replay(tree, TRACES).tokens_per_step,
    "compile_tree": lambda tree, _: treeopt.compile_tree(tree).retrieve_indices.tolist(),
    "lint_tree": lambda tree, _: treeopt.lint_tree(tree, "medusa", num_heads=2),
    "export_tree": lambda tree, _: treeopt.export_tree(tree, "medusa"),
    "save_tree": lambda tree, folder: (
        treeopt.save_tree(tree, folder / "s.yaml"),
        treeopt.load_tree(folder / "s.yaml"),
    ),
}


@looped("form", FORMS)
@looped("name", TAKING)
def test_each_form_of_a_tree_is_taken(name: str, form: str, tmp_path: Path) -> None:
    """The result is that of the record."""
    treeopt.save_tree(TREE, tmp_path / "tree.yaml")
    assert TAKING[name](FORMS[form](tmp_path / "tree.yaml"), tmp_path) == TAKING[name](TREE, tmp_path)


@looped("name", TAKING)
@looped(("given", "code"), [("no_such_tree", Code.TREE_UNKNOWN), ([[0, 0]], Code.TREE_INVALID)])
def test_what_is_no_tree_is_refused(name: str, given: Any, code: Code, tmp_path: Path) -> None:
    """A name that is no file, and a list without a parent."""
    with pytest.raises(TreeoptError) as caught:
        TAKING[name](given, tmp_path)
    assert caught.value.code is code


@looped("path", ["0,1", [0.5], 0, [[0]]])
def test_explain_path_refuses_what_is_no_path(path: Any) -> None:
    """E103; a list and a tuple are paths."""
    with pytest.raises(TreeoptError) as caught:
        treeopt.explain_path(TREE, path, TRACES)
    assert caught.value.code is Code.TREE_INVALID
    assert treeopt.explain_path(TREE, (0, 3), TRACES) == treeopt.explain_path(TREE, np.array([0, 3]), TRACES)  # type: ignore[arg-type]


def test_policies_are_taken_by_name(tmp_path: Path) -> None:
    """A policy is a record or the name of its file; a tree is none."""
    policy = treeopt.TreePolicy(8, 3, "d")
    treeopt.save_policy(policy, tmp_path / "a.yaml")
    treeopt.save_policy(tmp_path / "a.yaml", tmp_path / "b.yaml")
    assert (tmp_path / "a.yaml").read_bytes() == (tmp_path / "b.yaml").read_bytes()
    for given in (NAME, TREE):
        with pytest.raises(TypeError, match="this is a Tree"):
            treeopt.save_policy(given, tmp_path / "c.yaml")  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="this is a Tree"):
            treeopt.replay_policy(given, TRACES)  # type: ignore[arg-type]


WRONG: dict[str, Callable[[], object]] = {
    "engine 'nope'": lambda: treeopt.engine_settings("nope", TRACES),
    "engine 'medusa2'": lambda: treeopt.lint_tree(TREE, "medusa2"),
    "to 'nope'": lambda: treeopt.export_tree(TREE, "nope"),
    "kind 'nope'": lambda: treeopt.calibrated_acceptance(TRACES, 8, kind="nope"),
    "kind 'dynamics'": lambda: treeopt.Acceptance(kind="dynamics"),
    "heads_schedule 'nope'": lambda: treeopt.JointSettings(heads_schedule="nope"),
    "num_heads 2.5": lambda: treeopt.lint_tree(TREE, "medusa", num_heads=2.5),  # type: ignore[arg-type]
    "largest 4.5": lambda: treeopt.calibrated_acceptance(TRACES, 4.5),  # type: ignore[arg-type]
    "drafts 1.5": lambda: treeopt.engine_settings("vllm", TRACES, drafts=1.5),  # type: ignore[arg-type]
    "drafts True": lambda: treeopt.engine_settings("vllm", TRACES, drafts=True),
    "nodes 1.5": lambda: treeopt.engine_settings("sglang", TRACES, nodes=1.5),  # type: ignore[arg-type]
    "blocks 1.5": lambda: treeopt.Settings(blocks=1.5),  # type: ignore[arg-type]
    "steps True": lambda: treeopt.Settings(steps=True),
    "holdout -1": lambda: treeopt.Settings(holdout=-1),
    "tokens 1.5": lambda: treeopt.Learning(tokens=1.5),  # type: ignore[arg-type]
    "count 0": lambda: treeopt.SelfTalk(0),
    "turns 1.5": lambda: treeopt.SelfTalk(1, turns=1.5),  # type: ignore[arg-type]
}


@looped("named", WRONG)
def test_words_and_numbers_that_are_not_known_are_refused(named: str) -> None:
    """The error begins with the argument's name and what was given."""
    with pytest.raises(ValueError, match=f"^{named}:"):
        WRONG[named]()
