"""Replay against a naive simulation of the steps that a decoder makes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from helpers import make_calibration, random_calibration, random_tree
from looped import looped
from refusals import refusal_of

from treeopt.calibration import Calibration
from treeopt.errors import Code
from treeopt.optimize.replay import Replay, accepted_drafts, replay
from treeopt.traces import MISS, NONE
from treeopt.tree import Tree

KEPT = 16


@dataclass
class Naive:
    """What a step-by-step simulation counts."""

    steps_by_sequence: list[int]
    visited: list[bool]
    acceptance_by_depth: list[float]
    tokens: int


def simulate(tree: Tree, calibration: Calibration) -> Naive:
    """Each text on its own: emit the root, then drafts while the path is in the tree and the text goes on."""
    paths = set(tree.paths)
    steps: list[int] = []
    visited: list[bool] = []
    lengths: list[int] = []
    tokens = 0
    for s in range(calibration.sequences):
        rows = calibration.sequence(s).tolist()
        begins = [False] * len(rows)
        position = 0
        while position < len(rows):
            begins[position] = True
            drafts = 0
            for depth in range(1, min(calibration.num_heads, len(rows) - position - 1) + 1):
                if tuple(rows[position][:depth]) not in paths:
                    break
                drafts = depth
            lengths.append(drafts)
            tokens += 1 + drafts
            position += 1 + drafts
        steps.append(sum(begins))
        visited += begins
    shares = [sum(length >= depth for length in lengths) / max(len(lengths), 1) for depth in range(1, tree.depth + 1)]
    return Naive(steps, visited, shares, tokens)


def check(tree: Tree, calibration: Calibration) -> Replay:
    """Compare every figure with the simulation's."""
    got, expected = replay(tree, calibration), simulate(tree, calibration)
    assert got.visited.tolist() == expected.visited
    assert got.steps_by_sequence().tolist() == expected.steps_by_sequence
    assert got.steps == sum(expected.steps_by_sequence)
    assert got.tokens == expected.tokens == calibration.positions
    assert got.acceptance_by_depth().tolist() == pytest.approx(expected.acceptance_by_depth, rel=1e-15)
    assert got.tokens_per_step == expected.tokens / sum(expected.steps_by_sequence)
    return got


@looped("seed", range(60))
def test_replay_equals_simulation(seed: int) -> None:
    """Steps, tokens, visits and acceptance of any tree on any traces are those of a decoder that steps through."""
    heads = 1 + seed % 5
    calibration = random_calibration(seed, heads=heads, top_k=KEPT)
    for nodes in (2, 9, 40):
        tree = random_tree(seed + nodes, nodes=min(nodes, 4**heads), depth=heads, ranks=5)
        check(tree, calibration)


def test_ends_of_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of one token, of two and of none, across borders of the working arrays, and no text at all."""
    lengths = [1, 2, 0, 1, 0, 3, 1]
    calibration = make_calibration([np.zeros((length, 4)) for length in lengths])
    got = check(Tree.chain(4), calibration)
    assert got.steps_by_sequence().tolist() == [1, 1, 0, 1, 0, 1, 1]
    monkeypatch.setattr("treeopt.optimize.replay._CHUNK", 7)
    check(random_tree(0, nodes=20, depth=4, ranks=4), random_calibration(0))
    got = replay(Tree.chain(2), make_calibration([np.zeros((0, 2))]))
    assert (got.steps, got.tokens, got.tokens_per_step) == (0, 0, 1.0)
    assert got.acceptance_by_depth().tolist() == [0.0, 0.0]


def test_replay_by_hand() -> None:
    """Five tokens, a step of three and a step of two: 2.5 tokens per step."""
    answers = np.array([[0, 1], [3, 3], [3, 3], [1, 0], [0, 0]])
    got = replay(Tree(((0,), (1,), (0, 1), (1, 0))), make_calibration([answers]))
    assert got.accepted.tolist() == [2, 0, 0, 1, 0]
    assert got.visited.tolist() == [True, False, False, True, False]
    assert (got.steps, got.tokens, got.tokens_per_step) == (2, 5, 2.5)
    assert got.acceptance_by_depth().tolist() == [1.0, 0.5]


def test_sentinels_are_never_accepted() -> None:
    """Misses and ends match no path, even of a tree that has the largest rank there is."""
    tree = Tree(((0,), (252,)))
    assert accepted_drafts(tree, np.array([[252], [MISS], [NONE], [0]], np.uint8)).tolist() == [1, 0, 0, 1]


def test_tree_deeper_than_the_heads_is_refused() -> None:
    """E101: head d drafts depth d, so four levels need four heads."""
    error = refusal_of(replay, Tree.chain(4), random_calibration(0, heads=3))
    assert error.code is Code.TREE_TOO_DEEP
    assert "--max-depth 3" in error.fix


def test_rank_that_was_not_kept_is_refused() -> None:
    """E102: with 16 ranks kept, rank 16 was never scored; rank 15 was."""
    calibration = random_calibration(0, top_k=KEPT)
    error = refusal_of(replay, Tree(((0,), (0, KEPT))), calibration)
    assert error.code is Code.RANK_TOO_LARGE
    assert error.at == "[0, 16]"
    check(Tree(((0,), (0, KEPT - 1))), calibration)
