"""Fit: which estimator makes the best tree on texts it has not seen.

Candidates (the Medusa tree, joint trees of several back-off strengths, the best of them refined) are built on part of
the texts and replayed on the rest, in turn for every part; the one with the fewest steps is built again on all texts.
So the Medusa tree is built wherever no other did better on unseen texts, or there are too few texts to tell.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treeopt.calibration import NONE, Calibration, Ranks
from treeopt.errors import Code, TreeoptError
from treeopt.optimize.grow import Growth, grow
from treeopt.optimize.methods import MEDUSA, Method
from treeopt.optimize.refine import Limits, refine
from treeopt.optimize.replay import accepted_drafts, visits
from treeopt.optimize.trie import Counts, Floats, PathTrie
from treeopt.optimize.values import IndependentValues, JointValues, Values
from treeopt.progress import Meter, Progress, silent
from treeopt.tree import Tree

FOLDS = 5
_SETTLING_STRENGTH = 256.0
_ROUNDS = 4  # by then trees stop changing, or circle


@dataclass(frozen=True)
class Fit:
    """The chosen method, the tree it makes of all texts, and how each candidate did on texts it had not seen.

    Args:
        growth: nodes in order of value, for every budget up to the limit.
        tree: the tree of the limit's size, refined where the method says so.
        method: the winner.
        trials: for each candidate its (weighted) steps on texts left out; empty where there were too few texts.
        steps: int64 [S], the winner's steps on each text when fitted without it; None where there were too few.
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
        refine_seconds: time for refining, that of judging whether it helps (once for each fold) included.
        progress: told after each growth, and while refining.

    Raises:
        TreeoptError: E303 where the calibration holds no text.
    """

    def __init__(
        self,
        calibration: Calibration,
        limits: Limits,
        *,
        text_weights: Floats | None = None,
        refine_seconds: float = 0.0,
        progress: Progress = silent,
    ) -> None:
        self.calibration = calibration
        self.limits = limits
        self.refine_seconds = refine_seconds
        self.meter = Meter(progress)
        if not calibration.positions:
            raise TreeoptError(Code.PROMPTS_EMPTY, "the calibration holds no text")
        self._lengths = np.diff(calibration.offsets)
        self._weights = np.ones(calibration.sequences) if text_weights is None else text_weights

    @property
    def text_weights(self) -> Floats:
        """float64 [S]: importance of each text."""
        return self._weights

    @functools.cached_property
    def can_leave_out(self) -> bool:
        """Whether there are enough different texts to fit to some and judge by others."""
        return len(set(self.calibration.token_hashes)) >= FOLDS

    @functools.cached_property
    def trie(self) -> PathTrie:
        """Built when a joint estimate first needs it."""
        return PathTrie(self.calibration.ranks, self.limits.top_k)

    def build(self, methods: Sequence[Method], texts: NDArray[np.bool_] | None = None) -> list[tuple[Growth, Tree]]:
        """Growth and tree of each method from some of the texts (bool [S]); from all where None.

        Methods share what they count, so several cost little more than one.
        """
        part = self._part(texts)
        return [(part.growth(method), part.tree(method)) for method in methods]

    def _part(self, texts: NDArray[np.bool_] | None) -> _Part:
        chosen = self._weights if texts is None else self._weights * texts
        return _Part(self, np.repeat(chosen, self._lengths))

    def accuracy(self) -> Floats:
        """float64 [H, K]: weighted accuracies over all texts."""
        return self.independent(np.repeat(self._weights, self._lengths)).accuracy

    def independent(self, weights: Floats) -> IndependentValues:
        """The paper's values under weights (float64 [P]) of the positions."""
        rows = []
        for column in self.calibration.ranks.T:
            hits = np.bincount(column, weights=weights, minlength=NONE + 1)
            rows.append(hits[: self.limits.top_k] / max(hits[:NONE].sum(), 1e-300))
        return IndependentValues(np.array(rows))

    def grow(self, values: Values) -> Growth:
        """Growth within the limits."""
        growth = grow(values, self.limits.nodes, max_depth=self.limits.max_depth)
        self.meter.add(1)
        return growth

    def steps(self, tree: Tree | Growth, texts: NDArray[np.bool_] | None = None) -> NDArray[np.int64]:
        """int64 [texts]: steps of a tree on some of the texts (bool [S]); on all where None."""
        ranks, offsets = self._rows(texts)
        return _steps(tree.accepted(ranks) if isinstance(tree, Growth) else accepted_drafts(tree, ranks), offsets)

    def _rows(self, texts: NDArray[np.bool_] | None) -> tuple[Ranks, NDArray[np.int64]]:
        """The traces of some of the texts, and where each begins among them."""
        ranks, lengths = self.calibration.ranks, self._lengths
        if texts is not None:
            ranks, lengths = ranks[np.repeat(texts, lengths)], lengths[texts]
        return ranks, np.concatenate([[0], np.cumsum(lengths)])

    def choose(self, methods: Sequence[Method], *, seed: int = 0) -> Fit:
        """The method with the fewest (weighted) steps on texts it was not fitted to, fitted to all.

        Where there are too few texts to tell it is the paper's, or if that is no candidate the one that backs off most.
        """
        self.meter.begin(_growths(methods) * (FOLDS if self.can_leave_out else 0) + _growths(methods[-1:]))
        winner, unseen = methods[0], None
        results: dict[Method, NDArray[np.int64]] = {}
        if not self.can_leave_out:
            plain = [method for method in methods if not method.refined]
            winner = MEDUSA if MEDUSA in methods else max(plain, key=lambda method: method.strength)
        else:
            folds = self._folds(seed)
            plain = list(dict.fromkeys(method for method in methods if not method.refined))
            results = dict(zip(plain, self._unseen_steps(plain, folds), strict=True))
            winner = self._winner(plain, list(results.values()))
            refined = dataclasses.replace(winner, refined=True)
            if refined in methods:  # refining takes its time, so only the best is tried
                [results[refined]] = self._unseen_steps([refined], folds)
                winner = min(winner, refined, key=lambda method: float(results[method] @ self._weights))
            unseen = results[winner]
        trials = {str(method): round(float(steps @ self._weights)) for method, steps in results.items()}
        self.meter.note = "all texts"
        [(growth, tree)] = self.build([winner])
        self.meter.end()
        return Fit(growth, tree, winner, trials, unseen)

    def _winner(self, methods: Sequence[Method], results: Sequence[NDArray[np.int64]]) -> Method:
        """The method with the fewest steps; of its kin, the one that backs off most and is not clearly worse.

        Strengths differ by less than their own noise, and the cautious choice varies least: so the greatest strength
        within one standard error (paired, over texts) of the best. The paper's method, first of all, wins every tie.
        """
        best = int(np.argmin([steps @ self._weights for steps in results]))
        for i in range(len(methods) - 1, best, -1):
            if dataclasses.replace(methods[i], strength=methods[best].strength) == methods[best]:
                excess = (results[i] - results[best]) * self._weights
                if excess.sum() <= np.std(excess) * np.sqrt(len(excess)):
                    return methods[i]
        return methods[best]

    def unseen_by_size(self, method: Method, sizes: Sequence[int], *, seed: int = 0) -> list[NDArray[np.int64]]:
        """For each size int64 [S]: steps on every text by a tree that was fitted without it (with it, below 5 texts).

        The sizes of one fold come from one growth at the limit's size, which no size may exceed.
        """
        assert max(sizes) <= self.limits.nodes
        folds = self._folds(seed)
        self.meter.begin(_growths([method]) * len(np.unique(folds)))
        found = [np.zeros(self.calibration.sequences, np.int64) for _ in sizes]
        for fold in np.unique(folds):
            self.meter.note = f"all sizes, fold {fold + 1}"
            growth = self._part(folds != fold if self.can_leave_out else None).growth(method)
            ranks, offsets = self._rows(folds == fold)
            orders = growth.orders(ranks)
            for steps, nodes in zip(found, sizes, strict=True):
                steps[folds == fold] = _steps((orders < nodes).sum(axis=1, dtype=np.int8), offsets)
        self.meter.end()
        return found

    def _folds(self, seed: int) -> NDArray[np.int64]:
        """int64 [S]: a part for each text, at random and of like sizes; one part where there are too few texts.

        Equal texts share a part: none is judged by a tree that was fitted to it.
        """
        different, which = np.unique(self.calibration.token_hashes, return_inverse=True)
        parts = np.arange(len(different)) % (FOLDS if self.can_leave_out else 1)
        folds: NDArray[np.int64] = np.random.default_rng(seed).permutation(parts)[which]
        return folds

    def _unseen_steps(self, methods: Sequence[Method], folds: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """For each method int64 [S]: steps on every text by a tree that was fitted without it."""
        found = [np.zeros(self.calibration.sequences, np.int64) for _ in methods]
        for fold in range(FOLDS):
            self.meter.note = f"texts left out: part {fold + 1} of {FOLDS}"
            part = self._part(folds != fold)
            for steps, method in zip(found, methods, strict=True):
                tree = part.tree(method) if method.refined else part.growth(method)
                steps[folds == fold] = self.steps(tree, folds == fold)
        return found


def _steps(accepted: NDArray[np.int8], offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    """int64 [S]: steps of each text, by the drafts that its positions accept."""
    begun = np.concatenate([[0], np.cumsum(visits(accepted))])
    steps: NDArray[np.int64] = np.diff(begun[offsets])
    return steps


def _growths(methods: Sequence[Method]) -> int:
    """How many trees are grown to build these methods from some texts, at most."""
    plain = {dataclasses.replace(method, refined=False) for method in methods}
    settled = {method.values for method in plain if method.weights == "visits"}  # from the Medusa tree on
    return len(plain | {MEDUSA} if settled else plain) + _ROUNDS * len(settled)


class _Part:
    """Positions with their weights (float64 [P]), and what the estimates from them have in common, counted once."""

    def __init__(self, fitter: Fitter, weights: Floats) -> None:
        self.weights = weights
        self._fitter = fitter
        self._growths: dict[Method, Growth] = {}

    def growth(self, method: Method) -> Growth:
        """Nodes by the values of a method, to the limit's size; refining does not change them."""
        unrefined = dataclasses.replace(method, refined=False)
        if unrefined not in self._growths:
            self._growths[unrefined] = self._fitter.grow(self.estimate(unrefined))
        return self._growths[unrefined]

    def tree(self, method: Method) -> Tree:
        """The tree of a method, refined where it says so."""
        fitter = self._fitter
        tree = self.growth(method).tree()
        if method.refined:
            seconds = fitter.refine_seconds / (FOLDS + 1)
            ranks, told = fitter.calibration.ranks, fitter.meter.progress
            tree = refine(tree, ranks, self.weights, fitter.limits, seconds=seconds, progress=told)
        return tree

    def estimate(self, method: Method) -> Values:
        """The node values of a method."""
        uniform = method.weights == "uniform"
        if method.values == "independent":
            return self._fitter.independent(self.weights if uniform else self._begun)
        counts = None if uniform else self._visits
        return JointValues(self._fitter.trie, self._uniform, method.strength, counts)

    @functools.cached_property
    def _uniform(self) -> list[Counts]:
        return self._fitter.trie.count(self.weights)

    @functools.cached_property
    def _visits(self) -> list[Counts]:
        """Counts where steps of joint trees begin; how strongly these back off hardly moves them."""
        trie = self._fitter.trie
        begun = self._settle(lambda begun: JointValues(trie, self._uniform, _SETTLING_STRENGTH, trie.count(begun)))
        return trie.count(begun)

    @functools.cached_property
    def _begun(self) -> Floats:
        return self._settle(self._fitter.independent)

    def _settle(self, estimate: Callable[[Floats], Values]) -> Floats:
        """How often a step begins at each position (float64 [P], weighted), under trees built from that very knowledge.

        Build, replay, count where steps begin, build again, until a tree comes back with the same values or four rounds
        have passed. Then the rounds are averaged: each replay is one chain of steps out of many that nearly equal trees
        would take, and the mean of a few varies less than the last (measured in docs/method.md).
        """
        growth, ranks = self.growth(MEDUSA), self._fitter.calibration.ranks
        seen: list[Growth] = []
        total = np.zeros(len(self.weights))
        while len(seen) < _ROUNDS and not any(map(growth.makes_the_tree_of, seen)):
            seen.append(growth)
            begun = self.weights * visits(growth.accepted(ranks))
            total += begun
            growth = self._fitter.grow(estimate(begun))
        self._fitter.meter.add(_ROUNDS - len(seen))
        return total / len(seen)
