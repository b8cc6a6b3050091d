"""A list of paths is a tree wherever a tree is taken in Python, and a file or a name where one is decoded with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import random_calibration
from looped import looped
from tiny import random_heads, tiny_base

import treeopt
from treeopt.errors import Code, TreeoptError
from treeopt.models.base import Base
from treeopt.models.heads import MedusaHeads
from treeopt.tree import Tree
from treeopt.verify.buffers import MAX_NODES

LIST = [[0], [0, 0], [1]]
TREE = Tree(((0,), (1,), (0, 0)))
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
    steps = treeopt.TreeDecoder(base.model, heads, TREE).generate(PROMPT, 12).step_lengths
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
    with pytest.raises(TreeoptError) as caught:
        uses(base, heads, tmp_path / "t.yaml")[use](given)
    assert caught.value.code is Code.TREE_INVALID
    assert word in caught.value.what
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
