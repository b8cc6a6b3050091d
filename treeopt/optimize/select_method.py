"""Methods of building a tree, and the choice among them by cross-validation over texts.

Candidates are the Medusa tree, joint trees of several prior strengths, and the best of them refined. Each is fitted to
four fifths of the texts and replayed on the rest, for every fifth. The one with the most tokens per step is chosen.
The Medusa tree is built where no other candidate is better, or where there are too few texts.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treeopt.calibration import NONE, Calibration
from treeopt.defaults import VALUES, WEIGHTS
from treeopt.errors import Code, TreeoptError, check_choice
from treeopt.optimize.grow import Growth, grow, grow_contiguous
from treeopt.optimize.refine import Limits, refine
from treeopt.optimize.replay import TextSums, TraceRows, visits
from treeopt.optimize.trie import Counts, Floats, PathTrie
from treeopt.optimize.values import IndependentValues, JointValues, Values
from treeopt.progress import Meter, Progress, silent
from treeopt.tree import Tree

STRENGTHS = (64.0, 256.0, 1024.0)


@dataclass(frozen=True)
class Method:
    """How a tree is estimated and grown.

    `strength` is the weight of the prior of joint values, in observations; 0 for independent values.
    """

    values: str
    weights: str
    strength: float = 0.0
    refined: bool = False

    @property
    def is_medusa(self) -> bool:
        """Whether this method builds the Medusa tree."""
        return self.values == "independent" and self.weights == "uniform" and not self.refined

    def __str__(self) -> str:
        name = f"{self.values}, {self.weights}"
        name += f", strength {self.strength:g}" if self.strength else ""
        return f"{name}, refined" if self.refined else name


MEDUSA = Method("independent", "uniform")


def candidates(values: str, weights: str, *, refined: bool, exactly: bool = False) -> list[Method]:
    """The candidate methods for these options, the simplest first.

    The Medusa tree is the first candidate, unless `exactly` these values and weights are to be used. Joint values are
    candidates with each strength.

    Raises:
        ValueError: where values or weights are not of `VALUES` or `WEIGHTS`.
    """
    check_choice("values", values, VALUES)
    check_choice("weights", weights, WEIGHTS)
    if values == "joint":
        found = [Method(values, weights, strength) for strength in STRENGTHS]
    else:
        found = [Method(values, weights)]
    if not exactly and MEDUSA not in found:
        found = [MEDUSA, *found]
    if refined:
        found += [Method(m.values, m.weights, m.strength, refined=True) for m in found]
    return found


FOLDS = 5
_SETTLING_STRENGTH = 256.0
_ROUNDS = 4  # trees change no further by then, or repeat


@dataclass(frozen=True)
class Fit:
    """The chosen method, its tree from all texts, and the cross-validated steps of the candidates.

    Args:
        growth: nodes by decreasing value, for every budget up to the limit.
        tree: the tree of the largest size, refined where the method says so.
        method: the chosen method.
        trials: cross-validated (weighted) steps of each candidate, for as many tokens; empty where there were too few
            texts.
        sums: cross-validated tokens and steps of the chosen method on each text; None where there were too few.
    """

    growth: Growth
    tree: Tree
    method: Method
    trials: dict[str, int]
    sums: TextSums | None


class Fitter:
    """The texts of a calibration with their weights, and the trees fitted to all or some of them.

    Args:
        calibration: the rank traces.
        limits: of the trees.
        text_weights: float64 [S], importance of each text (mixtures of tasks); all 1 where None.
        refine_seconds: time for refinement, that in cross-validation included.
        progress: called after each growth, and during refinement.

    Raises:
        TreeoptError: E303 where the calibration holds no text.
        ValueError: where `refine_seconds` is not a finite number from 0.
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
        if isinstance(refine_seconds, bool) or not 0 <= refine_seconds < math.inf:
            raise ValueError(f"refine_seconds {refine_seconds!r}: it must be a finite number from 0")
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
        """Whether there are enough different texts for cross-validation."""
        return len(set(self.calibration.token_hashes)) >= FOLDS

    @functools.cached_property
    def trie(self) -> PathTrie:
        """The paths of ranks in the traces."""
        return PathTrie(self.calibration.ranks, self.limits.top_k, self.calibration.target)

    def build(self, methods: Sequence[Method], texts: NDArray[np.bool_] | None = None) -> list[tuple[Growth, Tree]]:
        """Growth and tree of each method from some of the texts (bool [S]); from all where None.

        Methods share their counts, so several take little more time than one.
        """
        part = self._part(texts)
        return [(part.growth(method), part.tree(method)) for method in methods]

    def estimate(self, method: Method) -> Values:
        """The node values of a method from all texts, with visits of trees of the limit's size."""
        return self._part(None).estimate(method)

    def _part(self, texts: NDArray[np.bool_] | None) -> _FittedPart:
        chosen = self._weights if texts is None else self._weights * texts
        return _FittedPart(self, np.repeat(chosen, self._lengths))

    def accuracy(self) -> Floats:
        """float64 [H, K]: weighted accuracies over all texts."""
        return self.independent(np.repeat(self._weights, self._lengths)).accuracy

    def independent(self, weights: Floats) -> IndependentValues:
        """Independent values under weights (float64 [P]) of the positions."""
        rows, target, top_k = [], self.calibration.target, self.limits.top_k
        for level, column in enumerate(self.calibration.ranks.T):
            hits = np.bincount(column, weights=weights, minlength=NONE + 1)
            trials = hits[:NONE].sum()
            if target is not None:
                traced = min(target.ranks, top_k)
                hits[:traced] = weights @ target.probability[:, level, :traced].astype(np.float64)
            rows.append(hits[:top_k] / max(trials, 1e-300))
        return IndependentValues(np.array(rows))

    def grow(self, values: Values) -> Growth:
        """Growth within the limits."""
        growth = self.grow_to(values, self.limits.nodes)
        self.meter.add(1)
        return growth

    def sums(self, tree: Tree | Growth, texts: NDArray[np.bool_] | None = None) -> TextSums:
        """Tokens and steps of a tree on each of some texts (bool [S]); on all where None."""
        return TraceRows.of(self.calibration, texts).sums(tree)

    def grow_to(self, values: Values, nodes: int) -> Growth:
        """Growth to a number of nodes, within the other limits."""
        limits = self.limits
        if limits.contiguous:
            return grow_contiguous(values, nodes, limits.contiguous, max_depth=limits.max_depth)
        return grow(values, nodes, max_depth=limits.max_depth)

    def choose(self, methods: Sequence[Method], *, seed: int = 0) -> Fit:
        """The method with the fewest cross-validated (weighted) steps, fitted to all texts.

        Where there are too few texts it is the Medusa tree, or the greatest strength if that is not a candidate.
        """
        self.meter.begin(_growths(methods) * (FOLDS if self.can_leave_out else 0) + _growths(methods[-1:]))
        winner, sums = methods[0], None
        results: dict[Method, TextSums] = {}
        if not self.can_leave_out:
            unrefined = [method for method in methods if not method.refined]
            winner = MEDUSA if MEDUSA in methods else max(unrefined, key=lambda method: method.strength)
        else:
            folds = self._folds(seed)
            unrefined = list(dict.fromkeys(method for method in methods if not method.refined))
            results = dict(zip(unrefined, self._cross_validate(unrefined, folds), strict=True))
            winner = self._winner(unrefined, list(results.values()))
            refined = dataclasses.replace(winner, refined=True)
            if refined in methods:  # refinement is slow, so only the best method is refined
                [results[refined]] = self._cross_validate([refined], folds)
                winner = min(winner, refined, key=lambda method: self._steps(results[method]))
            sums = results[winner]
        trials = {str(method): round(self._steps(found)) for method, found in results.items()}
        self.meter.note = "all texts"
        [(growth, tree)] = self.build([winner])
        self.meter.end()
        return Fit(growth, tree, winner, trials, sums)

    def _steps(self, sums: TextSums) -> float:
        """Weighted steps for the tokens of the texts; under sampling a step has the tokens that are expected of it."""
        if self.calibration.target is None:
            return float(sums.steps @ self._weights)
        tau = (sums.tokens @ self._weights) / (sums.steps @ self._weights)
        return float(self._lengths @ self._weights / tau)

    def _winner(self, methods: Sequence[Method], results: Sequence[TextSums]) -> Method:
        """The method with the fewest steps; among its strengths, the greatest that is not clearly worse.

        The one-standard-error rule: strengths differ by less than their standard error, so the greatest strength within
        one standard error (paired, over texts) of the best is taken. Ties go to the first method, the Medusa tree.
        """
        best = int(np.argmin([self._steps(sums) for sums in results]))
        tau = (results[best].tokens @ self._weights) / (results[best].steps @ self._weights)
        for i in range(len(methods) - 1, best, -1):
            if dataclasses.replace(methods[i], strength=methods[best].strength) == methods[best]:
                more_tokens = results[i].tokens - results[best].tokens  # 0 unless the texts were sampled
                excess = (results[i].steps - results[best].steps - more_tokens / tau) * self._weights
                if excess.sum() <= np.std(excess) * np.sqrt(len(excess)):
                    return methods[i]
        return methods[best]

    def cross_validated_sums(self, method: Method, sizes: Sequence[int], *, seed: int = 0) -> list[TextSums]:
        """For each size: tokens and steps on every text of a tree that was fitted without it (with it, below 5 texts).

        All sizes of a fold come from one growth to the limit; with contiguous siblings, from one growth each.
        """
        assert max(sizes) <= self.limits.nodes
        folds = self._folds(seed)
        self.meter.begin(_growths([method]) * len(np.unique(folds)))
        found = []
        for fold in np.unique(folds):
            self.meter.note = f"all sizes, fold {fold + 1}"
            part = self._part(folds != fold if self.can_leave_out else None)
            found.append(part.sums(method, sizes, TraceRows.of(self.calibration, folds == fold)))
        self.meter.end()
        return [TextSums.of_folds(folds, sums) for sums in zip(*found, strict=True)]

    def _folds(self, seed: int) -> NDArray[np.int64]:
        """int64 [S]: the fold of each text, at random and of equal sizes; one fold where there are too few texts.

        Equal texts are in one fold, so that no text is replayed by a tree that was fitted to it.
        """
        different, which = np.unique(self.calibration.token_hashes, return_inverse=True)
        parts = np.arange(len(different)) % (FOLDS if self.can_leave_out else 1)
        folds: NDArray[np.int64] = np.random.default_rng(seed).permutation(parts)[which]
        return folds

    def _cross_validate(self, methods: Sequence[Method], folds: NDArray[np.int64]) -> list[TextSums]:
        """For each method: tokens and steps on every text of a tree that was fitted without it."""
        found = []
        for fold in range(FOLDS):
            self.meter.note = f"cross-validation: fold {fold + 1} of {FOLDS}"
            part = self._part(folds != fold)
            trees = (part.tree(method) if method.refined else part.growth(method) for method in methods)
            found.append([self.sums(tree, folds == fold) for tree in trees])
        return [TextSums.of_folds(folds, sums) for sums in zip(*found, strict=True)]


def _growths(methods: Sequence[Method]) -> int:
    """The greatest number of growths that these methods need for one set of texts."""
    unrefined = {dataclasses.replace(method, refined=False) for method in methods}
    settled = {method.values for method in unrefined if method.weights == "visits"}  # these start at the Medusa tree
    return len(unrefined | {MEDUSA} if settled else unrefined) + _ROUNDS * len(settled)


class _FittedPart:
    """Weighted positions (float64 [P]), and the counts and growths that the methods share."""

    def __init__(self, fitter: Fitter, weights: Floats) -> None:
        self.weights = weights
        self._fitter = fitter
        self._growths: dict[Method, Growth] = {}

    def growth(self, method: Method) -> Growth:
        """Nodes by the values of a method, up to the limit; refinement does not change them."""
        unrefined = dataclasses.replace(method, refined=False)
        if unrefined not in self._growths:
            self._growths[unrefined] = self._fitter.grow(self.estimate(unrefined))
        return self._growths[unrefined]

    def sums(self, method: Method, sizes: Sequence[int], rows: TraceRows) -> list[TextSums]:
        """For each size, tokens and steps of the method's tree of so many nodes on each text of the rows."""
        if self._fitter.limits.contiguous:  # the trees are not nested
            values = self.estimate(dataclasses.replace(method, refined=False))
            return [rows.sums(self._fitter.grow_to(values, nodes)) for nodes in sizes]
        return rows.sums_by_size(self.growth(method), sizes)

    def tree(self, method: Method) -> Tree:
        """The tree of a method, refined where it says so."""
        fitter = self._fitter
        tree = self.growth(method).tree()
        if method.refined:
            seconds = fitter.refine_seconds / (FOLDS + 1)
            traces, progress = fitter.calibration, fitter.meter.progress
            more: Any = {"seconds": seconds, "target": traces.target, "progress": progress}
            tree = refine(tree, traces.ranks, self.weights, fitter.limits, **more)
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
        """Counts where steps of joint trees begin; the strength of their prior hardly changes these positions."""
        trie = self._fitter.trie
        begun = self._settle(lambda begun: JointValues(trie, self._uniform, _SETTLING_STRENGTH, trie.count(begun)))
        return trie.count(begun)

    @functools.cached_property
    def _begun(self) -> Floats:
        return self._settle(self._fitter.independent)

    def _settle(self, estimate: Callable[[Floats], Values]) -> Floats:
        """How often a step begins at each position (float64 [P], weighted), under trees built from these very counts.

        A fixed-point iteration: grow a tree, replay it, count where steps begin, grow again, until a tree repeats or
        for four rounds. The mean over the rounds is returned, because it varies less than the last round (measured in
        docs/method.md).
        """
        growth, ranks = self.growth(MEDUSA), self._fitter.calibration.ranks
        grown: list[Growth] = []
        total = np.zeros(len(self.weights))
        while len(grown) < _ROUNDS and not any(map(growth.makes_the_tree_of, grown)):
            grown.append(growth)
            begun = self.weights * visits(growth.accepted(ranks))
            total += begun
            growth = self._fitter.grow(estimate(begun))
        self._fitter.meter.add(_ROUNDS - len(grown))
        return total / len(grown)
