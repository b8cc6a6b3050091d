"""Node values and what they rest on, the trie of rank paths and isotonic regression, against naive versions."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from helpers import pooled, random_calibration
from hypothesis import given
from hypothesis import strategies as st
from looped import looped
from numpy.typing import NDArray

from treeopt.optimize.trie import Floats, PathTrie
from treeopt.optimize.values import IndependentValues, JointValues, falling_rows, isotonic
from treeopt.traces import MISS, NONE, Ranks
from treeopt.tree import Path


@dataclass
class Naive:
    """The docstring of `JointValues` once more, with dictionaries."""

    ranks: Ranks
    top_k: int
    uniform: Floats
    visits: Floats | None
    strength: float

    def shares(self, weights: Floats, prefix: Path | None, depth: int) -> tuple[list[float], float]:
        """Weight of each rank at a depth, and of all tokens there, after exactly `prefix` (any below K if None)."""
        hits: dict[int, float] = defaultdict(float)
        trials = 0.0
        for row, weight in zip(self.ranks.tolist(), weights.tolist(), strict=True):
            before = row[:depth]
            if (max(before, default=0) < self.top_k) if prefix is None else (tuple(before) == prefix):
                hits[row[depth]] += weight
                trials += weight * (row[depth] != NONE)
        return [hits[rank] for rank in range(self.top_k)], trials

    def broad(self, weights: Floats, depth: int) -> list[float]:
        """Stage 1."""
        hits, trials = self.shares(weights, None, depth)
        return [hit / trials if trials else 0.0 for hit in hits]

    def posterior(self, weights: Floats, prefix: Path, prior: list[float], strength: float) -> list[float]:
        """Stages 2 and 3: positions with exactly these ranks, and a prior worth `strength` of them."""
        hits, trials = self.shares(weights, prefix, len(prefix))
        return [(hit + strength * p) / (trials + strength) for hit, p in zip(hits, prior, strict=True)]

    def conditional(self, prefix: Path) -> list[float]:
        """q(r | path) for every rank r."""
        broad = self.broad(self.uniform, len(prefix))
        share = self.posterior(self.uniform, prefix, broad, self.strength / 8)
        if self.visits is not None:
            visited = self.broad(self.visits, len(prefix))
            scale = [v / b if b > 0 else 1.0 for v, b in zip(visited, broad, strict=True)]
            prior = [s * factor for s, factor in zip(share, scale, strict=True)]
            share = self.posterior(self.visits, prefix, prior, self.strength)
        return [min(q, 1.0) for q in pooled(share)]


def joint(ranks: Ranks, top_k: int, uniform: Floats, visits: Floats | None, strength: float) -> JointValues:
    """The estimator itself."""
    trie = PathTrie(ranks, top_k)
    return JointValues(trie, trie.count(uniform), strength, None if visits is None else trie.count(visits))


def as_rows(paths: Sequence[Path], depth: int) -> NDArray[np.int32]:
    """int32 [n, depth]."""
    return np.array(paths, np.int32).reshape(len(paths), depth)


@looped("visited", [False, True])
@looped("seed, top_k, strength", [(0, 4, 64.0), (1, 3, 8.0), (2, 8, 1024.0), (3, 2, 0.5)])
def test_joint_equals_a_naive_version(seed: int, top_k: int, strength: float, visited: bool) -> None:
    """Children of paths that occur often, seldom or never have the values of three stages and falling smoothing."""
    ranks = random_calibration(seed, sequences=8, length=20, heads=3, top_k=8).ranks
    rng = np.random.default_rng(seed)
    uniform = rng.integers(1, 4, len(ranks)).astype(np.float64)
    visits = uniform * (rng.random(len(ranks)) < 0.4) if visited else None
    naive = Naive(ranks, top_k, uniform, visits, strength)
    estimator = joint(ranks, top_k, uniform, visits, strength)
    assert estimator.shape == (3, top_k)
    seldom = 0
    for depth in range(3):
        paths = list(itertools.product(range(top_k), repeat=depth))
        own = rng.random(len(paths))
        table = estimator.children(as_rows(paths, depth), own)
        wanted = [[value * q for q in naive.conditional(path)] for path, value in zip(paths, own.tolist(), strict=True)]
        np.testing.assert_allclose(table, wanted, rtol=1e-9, atol=1e-15)
        seldom += sum(sum(naive.shares(uniform, path, depth)[0]) == 0 for path in paths)
    assert seldom or top_k < 4  # the case of paths that never came was there


@looped("strength", [1e-9, 1.0, 256.0])
@looped("seed", range(4))
def test_no_child_exceeds_its_parent(seed: int, strength: float) -> None:
    """Even where visiting blows a rank's share up, a child's value is at most its parent's and never below 0."""
    rng = np.random.default_rng(seed)
    ranks = random_calibration(seed, sequences=6, length=15, heads=3, top_k=8).ranks
    visits = rng.random(len(ranks)) * (rng.random(len(ranks)) < 0.1) * 50
    estimator = joint(ranks, 6, np.ones(len(ranks)), visits, strength)
    for depth in range(3):
        paths = as_rows(list(itertools.product(range(6), repeat=depth)), depth)
        own = rng.random(len(paths))
        table = estimator.children(paths, own)
        assert (table <= own[:, None]).all()
        assert (table >= 0).all()


def test_independent_is_the_product_of_accuracies() -> None:
    """A child's value is its parent's times the accuracy of the next head at its rank, whatever the parent is."""
    estimator = IndependentValues(np.array([[0.5, 0.25], [0.1, 0.4]]))
    assert estimator.shape == (2, 2)
    assert estimator.children(np.zeros((1, 0), np.int32), np.ones(1)).tolist() == [[0.5, 0.25]]
    table = estimator.children(np.array([[0], [1]], np.int32), np.array([0.5, 0.25]))
    np.testing.assert_allclose(table, [[0.05, 0.2], [0.025, 0.1]], rtol=1e-15)


@given(st.lists(st.tuples(st.floats(0.0, 1e6), st.integers(1, 5)), min_size=1, max_size=12))
def test_isotonic_equals_pooling(pairs: list[tuple[float, int]]) -> None:
    """A weight is as many equal values; a rising sequence is the falling one of the reversed values."""
    values, weights = (np.array(column, np.float64) for column in zip(*pairs, strict=True))
    last = np.cumsum(weights).astype(np.int64) - 1
    repeated = np.repeat(values, weights.astype(np.int64)).tolist()
    fallen = np.array(pooled(repeated))[last]
    np.testing.assert_allclose(isotonic(values, weights, increasing=False), fallen, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(isotonic(values[::-1], weights[::-1])[::-1], fallen, rtol=1e-9, atol=1e-9)


@looped("width", [1, 2, 3, 7, 32])
def test_falling_equals_pooling(width: int) -> None:
    """Each row becomes the nearest row that never rises, whatever the other rows are."""
    rng = np.random.default_rng(width)
    rows = rng.random((40, width)) * (rng.random((40, width)) < 0.7)
    fitted = falling_rows(rows)
    np.testing.assert_allclose(fitted, [pooled(row) for row in rows.tolist()], rtol=1e-9, atol=1e-12)
    assert (fitted[:, 1:] <= fitted[:, :-1]).all()
    assert np.array_equal(np.concatenate([falling_rows(rows[:7]), falling_rows(rows[7:])]), fitted)


def test_falling_keeps_zeros_exact() -> None:
    """Zeros at the end of a row stay exactly 0: growth leaves out nodes of value 0."""
    rows = np.random.default_rng(1).random((50, 12))
    rows[:, 7:] = 0.0
    assert (falling_rows(rows)[:, 7:] == 0.0).all()


def by_extremes(values: list[float]) -> list[float]:
    """Isotonic regression by its min-max formula: at i the least, over ends, of the greatest mean of any stretch."""
    n = len(values)
    return [min(max(float(np.mean(values[a : b + 1])) for a in range(i + 1)) for b in range(i, n)) for i in range(n)]


def test_known_cases() -> None:
    """Violators are pooled, as far back as needed; ascending values stay."""
    cases = [
        ([2.0], [2.0]),
        ([1.0, 3.0, 2.0, 4.0], [1.0, 2.5, 2.5, 4.0]),
        ([3.0, 2.0, 1.0], [2.0, 2.0, 2.0]),
        ([1.0, 4.0, 5.0, 0.0], [1.0, 3.0, 3.0, 3.0]),
        ([1.0, 1.0, 2.0], [1.0, 1.0, 2.0]),
    ]
    for values, expected in cases:
        assert isotonic(np.array(values)).tolist() == expected


@given(st.lists(st.floats(0.001, 10.0), min_size=1, max_size=12))
def test_equals_the_min_max_formula(values: list[float]) -> None:
    """Any sequence becomes the one of the min-max formula, and never decreases."""
    smooth = isotonic(np.array(values))
    np.testing.assert_allclose(smooth, by_extremes(values), rtol=1e-12)
    assert np.all(np.diff(smooth) >= 0)


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
