"""Fit: which estimator makes the best tree on texts it has not seen.

Candidates (the paper's tree, joint trees of several back-off strengths, refined ones) are built on part of the texts
and replayed on the rest, in turn for every part; the one with the fewest steps is built again on all texts. So the
default is the paper's tree wherever the data cannot show that another is better.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treeopt.build.grow import Growth, grow
from treeopt.build.refine import Limits, refine
from treeopt.build.replay import accepted_drafts, visits
from treeopt.build.trie import Floats, PathTrie
from treeopt.build.values import IndependentValues, JointValues, Values
from treeopt.calibration import MISS, NONE, Calibration
from treeopt.tree import Tree

FOLDS = 5
STRENGTHS = (64.0, 256.0, 1024.0, 4096.0)
ROUNDS = 3  # build, replay, count where steps begin, build again: trees stop changing, or circle, by then
VALUES = ("independent", "joint")
WEIGHTS = ("uniform", "visits")


@dataclass(frozen=True)
class Method:
    """How a tree is estimated and grown.

    `strength` is the back-off of joint values (observations a prior is worth; 0 for independent values).
    """

    values: str
    weights: str
    strength: float = 0.0
    refined: bool = False

    @property
    def is_paper(self) -> bool:
        """Whether this is the paper's method."""
        return self.values == "independent" and self.weights == "uniform" and not self.refined

    def __str__(self) -> str:
        name = f"{self.values}, {self.weights}"
        name += f", strength {self.strength:g}" if self.strength else ""
        return f"{name}, refined" if self.refined else name


PAPER = Method("independent", "uniform")


@dataclass(frozen=True)
class Fit:
    """The chosen method, the tree it makes of all texts, and how each candidate did on texts it had not seen.

    Args:
        growth: nodes in order of value, for every budget up to the limit.
        tree: the tree of the limit's size, refined where the method says so.
        method: the winner.
        trials: for each candidate its steps on held-out folds; empty where there was nothing to choose.
        steps: int64 [S], the winner's steps on each text when fitted without it; None where there was no choice.
    """

    growth: Growth
    tree: Tree
    method: Method
    trials: dict[str, int]
    steps: NDArray[np.int64] | None


class Fitter:
    """The traces of a calibration, indexed for counting, with a weight for each text.

    Args:
        calibration: the rank traces.
        limits: of the trees.
        text_weights: float64 [S], importance of each text (mixtures of tasks); all 1 where None.
        refine_seconds: time for refining one tree.
    """

    def __init__(
        self,
        calibration: Calibration,
        limits: Limits,
        *,
        text_weights: Floats | None = None,
        refine_seconds: float = 0.0,
    ) -> None:
        self.calibration = calibration
        self.limits = limits
        self.refine_seconds = refine_seconds
        self._lengths = np.diff(calibration.offsets)
        self._weights = np.ones(calibration.sequences) if text_weights is None else text_weights

    @functools.cached_property
    def trie(self) -> PathTrie:
        """Built when a joint estimate first needs it."""
        return PathTrie(self.calibration.ranks, self.limits.top_k)

    def build(self, method: Method, texts: NDArray[np.bool_] | None = None) -> tuple[Growth, Tree]:
        """Growth and tree of one method from some of the texts (bool [S]); all where None."""
        chosen = self._weights if texts is None else self._weights * texts
        weights = np.repeat(chosen, self._lengths)
        growth = self._grow(self._estimate(method, weights, None))
        best = growth, growth.tree(self.limits.nodes)
        if method.weights == "visits":
            best = self._fixed_point(method, weights, best)
        if method.refined:
            tree = refine(best[1], self.calibration.ranks, weights, self.limits, seconds=self.refine_seconds)
            best = best[0], tree
        return best

    def steps(self, tree: Tree) -> NDArray[np.int64]:
        """int64 [S]: steps of a tree on every text."""
        begun = np.concatenate([[0], np.cumsum(visits(accepted_drafts(tree, self.calibration.ranks)))])
        steps: NDArray[np.int64] = np.diff(begun[self.calibration.offsets])
        return steps

    def choose(self, candidates: Sequence[Method], *, seed: int = 0) -> Fit:
        """The candidate with the fewest (weighted) steps on texts it was not fitted to, fitted to all."""
        trials: dict[str, int] = {}
        winner, unseen = candidates[0], None
        if len(candidates) > 1 and self.calibration.sequences >= FOLDS:
            folds = np.random.default_rng(seed).permutation(np.arange(self.calibration.sequences) % FOLDS)
            results = {method: self._unseen_steps(method, folds) for method in candidates}
            # `min` keeps the first of equals, and candidates come from the simplest on.
            winner = min(results, key=lambda method: float(results[method] @ self._weights))
            trials = {str(method): int(steps.sum()) for method, steps in results.items()}
            unseen = results[winner]
        growth, tree = self.build(winner)
        return Fit(growth, tree, winner, trials, unseen)

    def _unseen_steps(self, method: Method, folds: NDArray[np.int64]) -> NDArray[np.int64]:
        steps = np.zeros(self.calibration.sequences, np.int64)
        for fold in range(FOLDS):
            _, tree = self.build(method, folds != fold)
            steps[folds == fold] = self.steps(tree)[folds == fold]
        return steps

    def _fixed_point(self, method: Method, weights: Floats, first: tuple[Growth, Tree]) -> tuple[Growth, Tree]:
        """Count where the tree's own steps begin, build again, until it stays; of a circle, its best on these texts."""
        seen: dict[Tree, tuple[float, Growth]] = {}
        growth, tree = first
        for _ in range(ROUNDS + 1):
            begun = visits(accepted_drafts(tree, self.calibration.ranks))
            cost = float(weights[begun].sum())
            if tree in seen:
                break
            seen[tree] = (cost, growth)
            growth = self._grow(self._estimate(method, weights, begun))
            tree = growth.tree(self.limits.nodes)
        if tree in seen and list(seen)[-1] == tree:
            return growth, tree
        # Values of the first tree are not weighted by visits, so it does not compete.
        later = list(seen)[1:]
        best = min(later, key=lambda one: seen[one][0])
        return seen[best][1], best

    def _grow(self, values: Values) -> Growth:
        return grow(values, self.limits.nodes, max_depth=self.limits.max_depth)

    def _estimate(self, method: Method, weights: Floats, begun: NDArray[np.bool_] | None) -> Values:
        visited = None if begun is None else weights * begun
        if method.values == "independent":
            return IndependentValues(self._accuracy(weights if visited is None else visited))
        counts = None if visited is None else self.trie.count(visited)
        return JointValues(self.trie, self.trie.count(weights), method.strength, counts)

    def _accuracy(self, weights: Floats) -> Floats:
        """float64 [H, K]: weighted accuracies."""
        top_k = self.limits.top_k
        rows = []
        for column in self.calibration.ranks.T:
            hits = np.bincount(column, weights=weights, minlength=NONE + 1)
            rows.append(hits[:top_k] / max(hits[: MISS + 1].sum(), 1e-300))
        return np.array(rows)


def candidates(values: str, weights: str, *, refined: bool) -> list[Method]:
    """The methods that compete for these wishes, from the simplest on; the paper's is always among them."""
    found = [PAPER]
    if values == "joint":
        found += [Method(values, weights, strength) for strength in STRENGTHS]
    elif weights == "visits":
        found.append(Method(values, weights))
    if refined:
        found += [Method(m.values, m.weights, m.strength, refined=True) for m in found]
    return found
