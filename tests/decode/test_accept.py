"""Accept: the accepted node, against a walk that follows the base model's choices one node at a time."""

from __future__ import annotations

import pytest
import torch
from helpers import random_tree
from looped import looped
from random_trees import compile_parents

from treeopt.decode import rules
from treeopt.drafting.interface import Drafts
from treeopt.tree import ROOT, Tree
from treeopt.verify.buffers import compile_tree


def drafts_of(trees: list[Tree], tokens: list[list[int]]) -> Drafts:
    """Tokens in these trees, one a row."""
    parents = torch.tensor([tree.parents for tree in trees])
    return Drafts(torch.tensor(tokens), compile_parents(parents, max(tree.depth for tree in trees)))


def accepted(tree: Tree, tokens: list[int], choice: list[int]) -> int:
    """The node that `rules.greedy` takes."""
    found = rules.greedy(drafts_of([tree], [tokens]), torch.tensor([choice]))
    assert found.shape == (1,)
    shared = Drafts(torch.tensor([tokens]), compile_tree(tree))  # the same tree, compiled for all rows
    assert rules.greedy(shared, torch.tensor([choice])).equal(found)
    return int(found)


def walked(tree: Tree, tokens: list[int], choice: list[int]) -> int:
    """From the root, go on to the child that holds what the model chose, as long as there is one."""
    node = ROOT
    while True:
        children = [i for i in range(1, tree.nodes) if tree.parents[i] == node and tokens[i] == choice[node]]
        if not children:
            return node
        (node,) = children


def sibling_tokens(tree: Tree, vocab: int, seed: int) -> list[int]:
    """Random tokens, different among siblings, as drafts are."""
    generator = torch.Generator().manual_seed(seed)
    orders: dict[int, list[int]] = {}
    tokens = [int(torch.randint(vocab, (1,), generator=generator))]
    for parent in tree.parents[1:]:
        order = orders.setdefault(parent, torch.randperm(vocab, generator=generator).tolist())
        tokens.append(order.pop())
    return tokens


@looped("seed", range(60))
def test_greedy_naive_walk(seed: int) -> None:
    """On random trees, drafts and choices the deepest right node is where the walk ends."""
    tree = random_tree(seed, nodes=(1, 4, 12, 40)[seed % 4], depth=5, ranks=4)
    vocab = max(3, 1 + max((tree.parents[1:].count(node) for node in tree.parents), default=1))
    tokens = sibling_tokens(tree, vocab, seed)
    choice = torch.randint(vocab, (tree.nodes,), generator=torch.Generator().manual_seed(seed + 1000)).tolist()
    assert accepted(tree, tokens, choice) == walked(tree, tokens, choice)


@pytest.mark.parametrize("seed", range(10))
def test_greedy_row_by_row(seed: int) -> None:
    """Rows with a tree each end where each ends alone."""
    trees = [random_tree(10 * seed + row, nodes=20, depth=5, ranks=4) for row in range(6)]
    vocab = 1 + max(tree.parents[1:].count(node) for tree in trees for node in tree.parents)
    tokens = [sibling_tokens(tree, vocab, seed + row) for row, tree in enumerate(trees)]
    choice = torch.randint(vocab, (6, 20), generator=torch.Generator().manual_seed(seed))
    wanted = [walked(*row) for row in zip(trees, tokens, choice.tolist(), strict=True)]
    assert rules.greedy(drafts_of(trees, tokens), choice).tolist() == wanted
    assert len(set(wanted)) > 1


def test_greedy_hand_written(small_tree: Tree) -> None:
    """Nodes (0,) (1,) (0,0) (0,1) (0,0,0): a right grandchild counts only below a right child."""
    tokens = [9, 5, 6, 7, 8, 3]
    assert accepted(small_tree, tokens, [5, 7, 0, 3, 0, 0]) == 5  # (0,), (0,0), (0,0,0)
    assert accepted(small_tree, tokens, [5, 8, 0, 3, 0, 0]) == 4  # (0,), (0,1)
    assert accepted(small_tree, tokens, [6, 7, 0, 3, 0, 0]) == 2  # (1,) has no children
    assert accepted(small_tree, tokens, [0, 7, 0, 3, 0, 0]) == 0  # nothing below a wrong parent counts


def test_greedy_token_zero_not_padding(small_tree: Tree) -> None:
    """A model that chooses token 0 everywhere accepts nothing from drafts that hold no 0, on paths of any length."""
    assert accepted(small_tree, [4, 5, 6, 7, 8, 3], [0] * 6) == ROOT
    assert accepted(small_tree, [0, 5, 6, 7, 8, 3], [0] * 6) == ROOT


def test_greedy_token_zero_drafted(small_tree: Tree) -> None:
    """Where drafts do hold token 0 and the model chooses it, exactly those are accepted."""
    assert accepted(small_tree, [4, 0, 6, 7, 8, 3], [0] * 6) == 1
    assert accepted(small_tree, [4, 5, 0, 7, 8, 3], [0] * 6) == 2
    assert accepted(small_tree, [4, 0, 6, 0, 8, 0], [0] * 6) == 5


def test_greedy_root_only() -> None:
    """The root is always accepted: it was chosen before the tree was drawn."""
    assert accepted(Tree(()), [7], [3]) == ROOT
    assert accepted(Tree(()), [3], [3]) == ROOT
    assert accepted(Tree(()), [0], [0]) == ROOT
