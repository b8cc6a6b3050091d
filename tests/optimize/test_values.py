"""Node values: each estimator against a naive version in plain Python, and what growth relies on."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from helpers import pooled, random_calibration
from looped import looped
from numpy.typing import NDArray

from treeopt.optimize.trie import Floats, PathTrie
from treeopt.optimize.values import IndependentValues, JointValues
from treeopt.traces import NONE, Ranks
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
