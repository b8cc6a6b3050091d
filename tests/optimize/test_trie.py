"""The trie of rank paths: counted by hand with dictionaries."""

from __future__ import annotations

import itertools
from collections import defaultdict

import numpy as np
from helpers import random_calibration
from looped import looped

from treeopt.optimize.trie import Floats, PathTrie
from treeopt.traces import MISS, NONE, Ranks
from treeopt.tree import Path


def naive_counts(ranks: Ranks, top_k: int, weights: Floats) -> tuple[dict[Path, float], dict[Path, float]]:
    """Hits of every path, and for every path (the root's too) the weight that has a token one rank deeper."""
    hits: dict[Path, float] = defaultdict(float)
    trials: dict[Path, float] = defaultdict(float)
    for row, weight in zip(ranks.tolist(), weights.tolist(), strict=True):
        path: Path = ()
        for rank in row:
            if rank != NONE:
                trials[path] += weight
            if rank >= top_k:
                break
            path = (*path, rank)
            hits[path] += weight
    return hits, trials


def paths_of(trie: PathTrie) -> list[list[Path]]:
    """The paths of each level, by their keys alone; before them the root."""
    levels: list[list[Path]] = [[()]]
    for keys in trie.keys:
        above = levels[-1]
        levels.append([(*above[key // trie.top_k], key % trie.top_k) for key in keys.tolist()])
    return levels


def check_counts(ranks: Ranks, top_k: int, weights: Floats) -> None:
    """Every level lists exactly the paths that occur, in order, with the naive counts."""
    trie = PathTrie(ranks, top_k)
    hits, trials = naive_counts(ranks, top_k, weights)
    levels = paths_of(trie)
    assert levels[1:] == [sorted(path for path in hits if len(path) == d + 1) for d in range(ranks.shape[1])]
    for above, level, counts in zip(levels[:-1], levels[1:], trie.count(weights), strict=True):
        np.testing.assert_allclose(counts.hits, [hits[path] for path in level], rtol=1e-12)
        np.testing.assert_allclose(counts.trials, [trials[path] for path in above], rtol=1e-12)
        assert counts.hits.dtype == counts.trials.dtype == np.float64


@looped("top_k", [1, 2, 5, 16])
@looped("heads", [1, 2, 4])
@looped("seed", range(3))
def test_counts_equal_dictionaries(seed: int, heads: int, top_k: int) -> None:
    """Hits and trials of every path are those of a walk over the rows, whatever the positions weigh."""
    ranks = random_calibration(seed, heads=heads, top_k=16).ranks
    rng = np.random.default_rng(seed)
    check_counts(ranks, top_k, np.ones(len(ranks)))
    check_counts(ranks, top_k, rng.random(len(ranks)) * (rng.random(len(ranks)) < 0.5))


def test_trials_leave_out_texts_that_ended_but_not_misses() -> None:
    """A position without a token is no trial; one whose token's rank is too large to be kept is."""
    ranks = np.array([[0, 0], [0, MISS], [0, 7], [0, NONE], [MISS, 0], [NONE, NONE]], np.uint8)
    first, second = PathTrie(ranks, 4).count(np.array([1.0, 2.0, 4.0, 8.0, 16.0, 32.0]))
    assert (first.hits.tolist(), first.trials.tolist()) == ([15.0], [31.0])
    assert (second.hits.tolist(), second.trials.tolist()) == ([1.0], [7.0])


@looped("top_k", [1, 3, 8])
def test_find_gives_the_index_of_every_possible_path(top_k: int) -> None:
    """Paths that occur are found at their place in the level, all others give -1."""
    ranks = random_calibration(4, heads=3, top_k=8).ranks
    trie = PathTrie(ranks, top_k)
    for depth, level in enumerate(paths_of(trie)):
        wanted = list(itertools.product(range(top_k), repeat=depth))
        found = trie.find(np.array(wanted, np.int32).reshape(len(wanted), depth))
        index = {path: i for i, path in enumerate(level)}
        assert found.tolist() == [index.get(path, -1) for path in wanted]


def test_child_broadcasts_parents_against_ranks() -> None:
    """A column of parents and a row of ranks give a table; a parent that does not occur has no children."""
    trie = PathTrie(np.array([[0, 2], [1, 0], [1, 2]], np.uint8), 3)  # level 1: (0, 2), (1, 0), (1, 2)
    table = trie.child(1, np.array([0, 1, -1])[:, None], np.arange(3)[None, :])
    assert table.tolist() == [[-1, -1, 0], [1, -1, 2], [-1, -1, -1]]


def test_empty_levels_have_no_paths() -> None:
    """Heads that never hit leave their levels, and all below, without paths; their trials are counted all the same."""
    ranks = np.array([[1, MISS, 0], [0, MISS, 0]], np.uint8)
    trie = PathTrie(ranks, 4)
    assert [len(keys) for keys in trie.keys] == [2, 0, 0]
    assert [counts.trials.tolist() for counts in trie.count(np.ones(2))] == [[2.0], [1.0, 1.0], []]
    assert trie.find(np.array([[0, 0, 0], [1, 1, 1]], np.int32)).tolist() == [-1, -1]
    check_counts(np.full((3, 2), MISS, np.uint8), 4, np.ones(3))


def test_no_position_is_no_path() -> None:
    """Without any positions all counts are empty, but the root has its trials: none."""
    counts = PathTrie(np.zeros((0, 2), np.uint8), 4).count(np.zeros(0))
    assert [(level.hits.tolist(), level.trials.tolist()) for level in counts] == [([], [0.0]), ([], [])]
