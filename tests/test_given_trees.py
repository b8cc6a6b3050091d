"""A tree in every form wherever one is taken in Python; names and numbers that are not known are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import random_calibration
from looped import looped
from refusals import refusal_of
from tiny import random_heads, tiny_base

import treeopt
from treeopt.errors import Code, TreeoptError
from treeopt.models.base import Base
from treeopt.models.heads import MedusaHeads
from treeopt.tree import Tree
from treeopt.verify.buffers import MAX_NODES

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
    assert refusal_of(TAKING[name], given, tmp_path).code is code


@looped("path", ["0,1", [0.5], 0, [[0]]])
def test_explain_path_refuses_what_is_no_path(path: Any) -> None:
    """E103; a list and a tuple are paths."""
    assert refusal_of(treeopt.explain_path, TREE, path, TRACES).code is Code.TREE_INVALID
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


LIST = [[0], [0, 0], [1]]
TREE_lists_as_trees = Tree(((0,), (1,), (0, 0)))
PROMPT = [3, 8, 5, 21]


@pytest.fixture(scope="module")
def base() -> Base:
    """A model whose texts vary."""
    return tiny_base("llama", 2)


@pytest.fixture(scope="module")
def heads(base: Base) -> MedusaHeads:
    """Two random heads."""
    return random_heads(base, 2, 4)


def test_decoding_takes_a_list_a_file_and_a_name(base: Base, heads: MedusaHeads, tmp_path: Path) -> None:
    """Decoder and generate run the same tree from a record, a list, a file of a list, and the text is greedy."""
    (tmp_path / "mc.py").write_text(f"mc = {LIST}")
    inputs = torch.tensor([PROMPT])
    greedy = base.model.generate(inputs, do_sample=False, max_new_tokens=12)
    steps = treeopt.TreeDecoder(base.model, heads, TREE_lists_as_trees).generate(PROMPT, 12).step_lengths
    for tree in (LIST, tuple(map(tuple, LIST)), tmp_path / "mc.py", str(tmp_path / "mc.py")):
        made = treeopt.TreeDecoder(base.model, heads, tree).generate(PROMPT, 12)
        assert (made.tokens, made.step_lengths) == (greedy[0, 4:].tolist(), steps)
        options: dict[str, Any] = {"custom_generate": treeopt.tree_generate, "heads": heads, "tree": tree}
        out = base.model.generate(inputs, do_sample=False, max_new_tokens=12, return_dict_in_generate=True, **options)
        assert out.sequences.equal(greedy)
        assert list(out.step_lengths[0]) == steps
    shallow = treeopt.TreeDecoder(base.model, random_heads(base, 4, 1), "mc_sim_7b_63")
    assert shallow.tree == treeopt.load_tree("mc_sim_7b_63")


def uses(base: Base, heads: MedusaHeads, path: Path) -> dict[str, Callable[[Any], object]]:
    """Each function that takes a tree, as a function of the tree alone."""
    return {
        "compile": treeopt.compile_tree,
        "replay": lambda tree: treeopt.replay(tree, random_calibration(1)),
        "save": lambda tree: treeopt.save_tree(tree, path),
        "decoder": lambda tree: treeopt.TreeDecoder(base, heads, tree),
        "generate": lambda tree: base.model.generate(
            torch.tensor([PROMPT]), custom_generate=treeopt.tree_generate, heads=heads, tree=tree, max_new_tokens=4
        ),
    }


@looped("use", ["compile", "replay", "save", "decoder", "generate"])
@looped(
    ("given", "word"),
    [
        ([[0], [0, 3, 1]], "[0, 3, 1]: its parent [0, 3] is missing"),
        ([[0], [0]], "[0] occurs twice"),
        ([[0], [-1]], "[-1] has a rank"),
        ([[0], [0.5]], "[0.5] is not a path"),
        ([0], "0 is not a path"),
        (5, "5 is not a list of paths"),
        ({"tree": [[0]]}, "an object of type dict is not a list of paths"),
    ],
)
def test_what_is_no_tree_is_one_error(
    base: Base, heads: MedusaHeads, tmp_path: Path, use: str, given: object, word: str
) -> None:
    """Each function refuses it alike, with the entry named, and writes nothing."""
    error = refusal_of(uses(base, heads, tmp_path / "t.yaml")[use], given)
    assert error.code is Code.TREE_INVALID
    assert word in error.what
    assert not list(tmp_path.iterdir())


def test_policy_is_not_compiled() -> None:
    """What chooses a tree at every step has no tensors."""
    with pytest.raises(TreeoptError, match="TreePolicy is not a list of paths"):
        treeopt.compile_tree(treeopt.TreePolicy(4, 2, "d1"))  # type: ignore[arg-type]


def test_too_large_a_tree_is_not_compiled() -> None:
    """A mask of many gigabytes is refused before any memory is taken."""
    tree = Tree(tuple((rank,) for rank in range(MAX_NODES)))
    with pytest.raises(TreeoptError, match="at most 32,768 are compiled") as caught:
        treeopt.compile_tree(tree)
    assert caught.value.code is Code.TREE_NOT_EXPORTABLE
