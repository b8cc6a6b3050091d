"""Methods of building a tree, and the choice among them by cross-validation over texts.

Candidates are the Medusa tree and joint trees of several prior strengths. Each is fitted to four fifths of the texts
and replayed on the rest, for every fifth. The one with the most tokens per step is chosen. The Medusa tree is built
where no other candidate is better, or where there are too few texts.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treeopt.calibration import Calibration
from treeopt.defaults import VALUES, WEIGHTS
from treeopt.errors import Code, TreeoptError, check_choice
from treeopt.optimize.grow import Growth, grow, grow_paths
from treeopt.optimize.replay import TextSums, TraceRows, visits
from treeopt.optimize.trie import Counts, Floats, PathTrie
from treeopt.optimize.values import IndependentValues, JointValues, Values, falling_rows
from treeopt.progress import Meter, Progress, silent
from treeopt.traces import NONE
from treeopt.tree import Tree

STRENGTHS = (64.0, 256.0, 1024.0)
FOLDS = 5
_SETTLING_STRENGTH = 256.0
_ROUNDS = 4  # trees change no further by then, or repeat


@dataclass(frozen=True)
class Method:
    """How the values of a tree's nodes are estimated.

    `strength` is the weight of the prior of joint values, in observations; 0 for independent values.
    """

    values: str
    weights: str
    strength: float = 0.0

    def __str__(self) -> str:
        return f"{self.values}, {self.weights}" + (f", strength {self.strength:g}" if self.strength else "")


MEDUSA = Method("independent", "uniform")


def candidates(values: str, weights: str, *, exactly: bool = False) -> list[Method]:
    """The candidate methods for these options, the simplest first; ValueError where a name is unknown.

    The Medusa tree is one unless `exactly` these values and weights are to be used. Joint values have each strength.
    """
    check_choice("values", values, VALUES)
    check_choice("weights", weights, WEIGHTS)
    strengths = STRENGTHS if values == "joint" else (0.0,)
    found = [Method(values, weights, strength) for strength in strengths]
    return found if exactly or MEDUSA in found else [MEDUSA, *found]


@dataclass(frozen=True)
class Limits:
    """Limits of a tree."""

    nodes: int  # root counted
    top_k: int  # K, ranks of each head
    max_depth: int | None = None  # the length of the longest path
    contiguous: int = 0  # number of first levels whose siblings have the ranks 0, 1, .. without a gap
    path_tokens: int | None = None  # leaves * (depth + 1), at least the number of nodes; `nodes` is then the same


@dataclass(frozen=True)
class MethodFit:
    """The chosen method and its tree from all texts, with cross-validated figures where there are enough texts."""

    growth: Growth  # nodes by decreasing value, for every budget up to the limit
    method: Method
    trials: dict[str, int]  # steps of each candidate, for as many tokens
    sums: TextSums | None  # tokens and steps of the chosen method on each text

    @functools.cached_property
    def tree(self) -> Tree:
        """The tree of the largest size."""
        return self.growth.tree()


class Fitter:
    """The texts of a calibration, and the trees fitted to all or some of them."""

    def __init__(self, calibration: Calibration, limits: Limits, *, progress: Progress = silent) -> None:
        self.calibration = calibration
        self.limits = limits
        if not calibration.positions:
            raise TreeoptError(Code.PROMPTS_EMPTY, "the calibration holds no text")
        self._meter = Meter(progress)
        self._lengths = np.diff(calibration.offsets)

    @functools.cached_property
    def can_leave_out(self) -> bool:
        """Whether there are enough different texts for cross-validation."""
        return len(set(self.calibration.clusters)) >= FOLDS

    @functools.cached_property
    def trie(self) -> PathTrie:
        return PathTrie(self.calibration.ranks, self.limits.top_k, self.calibration.target)

    def build(self, method: Method, texts: NDArray[np.bool_] | None = None) -> Growth:
        """The growth of a method from some of the texts (bool [S]); from all where None."""
        return self._part(texts).growth(method)

    def reached(self, method: Method) -> int:
        """The largest size that a tree of the method reaches within the limits."""
        return self.limits.path_tokens or len(self.build(method).values) + 1

    def growths(self, method: Method, sizes: Sequence[int]) -> list[Growth]:
        """The growth of a method from all texts for each size: of nodes all are the same, of path tokens its own."""
        return self._part(None).growths(method, sizes)

    def estimate(self, method: Method) -> Values:
        """The node values of a method from all texts, with visits of trees of the limit's size."""
        return self._part(None).estimate(method)

    def _part(self, texts: NDArray[np.bool_] | None) -> _FittedPart:
        chosen = np.ones(len(self._lengths)) if texts is None else texts.astype(np.float64)
        return _FittedPart(self, np.repeat(chosen, self._lengths))

    def accuracy(self, weights: Floats | None = None) -> Floats:
        """float64 [H, K]: accuracies under weights of the positions, float64 [P]; all 1 where None."""
        weights = np.ones(self.calibration.positions) if weights is None else weights
        rows, target, top_k = [], self.calibration.target, self.limits.top_k
        for level, column in enumerate(self.calibration.ranks.T):
            hits = np.bincount(column, weights=weights, minlength=NONE + 1)
            trials = hits[:NONE].sum()
            if target is not None:
                traced = min(target.ranks, top_k)
                hits[:traced] = weights @ target.probability[:, level, :traced].astype(np.float64)
            rows.append(hits[:top_k] / max(trials, 1e-300))
        return np.array(rows)

    def independent(self, weights: Floats) -> IndependentValues:
        """Independent values under weights (float64 [P]) of the positions.

        Accuracies may rise with the rank by chance; on levels whose siblings must have no gap they are made
        non-increasing, so that best-first growth leaves no rank out.
        """
        table, levels = self.accuracy(weights), self.limits.contiguous
        return IndependentValues(np.concatenate([falling_rows(table[:levels]), table[levels:]]))

    def grow(self, values: Values, path_tokens: int | None = None) -> Growth:
        """Growth within the limits; of fewer path tokens, if given."""
        budget, depth = path_tokens or self.limits.path_tokens, self.limits.max_depth
        if budget is not None:
            return grow_paths(values, budget, max_depth=depth)
        return grow(values, self.limits.nodes, max_depth=depth)

    def sums(self, tree: Tree | Growth) -> TextSums:
        """Tokens and steps of a tree on each text."""
        return TraceRows.of(self.calibration).replay(tree).sums

    def choose(self, methods: Sequence[Method]) -> MethodFit:
        """The method with the fewest cross-validated steps, fitted to all texts.

        Where there are too few texts it is the Medusa tree, or the greatest strength if that is not a candidate.
        """
        methods = list(dict.fromkeys(methods))
        winner = MEDUSA if MEDUSA in methods else max(methods, key=lambda method: method.strength)
        if not self.can_leave_out:
            return MethodFit(self.build(winner), winner, {}, None)
        found = self._left_out(lambda part, rows: [rows.replay(part.growth(method)).sums for method in methods])
        results = dict(zip(methods, found, strict=True))
        winner = self._winner(methods, found)
        trials = {str(method): round(self._steps(sums)) for method, sums in results.items()}
        return MethodFit(self.build(winner), winner, trials, results[winner])

    def _steps(self, sums: TextSums) -> float:
        """Steps for the tokens of the texts; under sampling a step has the tokens that are expected of it."""
        if self.calibration.target is None:
            return float(sums.steps.sum())
        return self.calibration.positions / sums.tokens_per_step

    def _winner(self, methods: Sequence[Method], results: Sequence[TextSums]) -> Method:
        """The method with the fewest steps; of its strengths the greatest within one standard error of the best.

        The error is paired, over texts. Ties go to the first method, the Medusa tree.
        """
        best = int(np.argmin([self._steps(sums) for sums in results]))
        tau = results[best].tokens_per_step
        for i in range(len(methods) - 1, best, -1):
            if dataclasses.replace(methods[i], strength=methods[best].strength) == methods[best]:
                more_tokens = results[i].tokens - results[best].tokens  # 0 unless the texts were sampled
                excess = results[i].steps - results[best].steps - more_tokens / tau
                if excess.sum() <= np.std(excess) * np.sqrt(len(excess)):
                    return methods[i]
        return methods[best]

    def cross_validated_sums(self, method: Method, sizes: Sequence[int]) -> list[TextSums]:
        """For each size: tokens and steps on each text of a tree fitted without it (with it, below 5 texts)."""
        assert max(sizes) <= self.limits.nodes
        if self.limits.path_tokens is None:
            return self._left_out(lambda part, rows: rows.sums_by_size(part.growth(method), sizes))
        return self._left_out(lambda part, rows: [rows.replay(one).sums for one in part.growths(method, sizes)])

    def folds(self) -> NDArray[np.int64]:
        """int64 [S]: the fold of each text, at random, a cluster in one; one fold where there are too few clusters."""
        different, which = np.unique(self.calibration.clusters, return_inverse=True)
        parts = np.arange(len(different)) % (FOLDS if self.can_leave_out else 1)
        return np.random.default_rng(0).permutation(parts)[which]

    def _left_out(self, replay: Callable[[_FittedPart, TraceRows], list[TextSums]]) -> list[TextSums]:
        """The sums of several trees over all texts: `replay` gets the fit to the others and the rows of each fold."""
        folds = self.folds()
        count = int(folds.max()) + 1
        self._meter.begin(count)
        found = []
        for fold in range(count):
            part = self._part(folds != fold if self.can_leave_out else None)
            found.append(replay(part, TraceRows.of(self.calibration, folds == fold)))
            self._meter.note = f"fold {fold + 1} of {count}"
            self._meter.add(1)
        return [TextSums.of_folds(folds, sums) for sums in zip(*found, strict=True)]


class _FittedPart:
    """Weighted positions (float64 [P]), and the counts and growths that the methods share."""

    def __init__(self, fitter: Fitter, weights: Floats) -> None:
        self.weights = weights
        self._fitter = fitter
        self.estimate = functools.cache(self._estimate)
        self.growth = functools.cache(lambda method: fitter.grow(self.estimate(method)))

    def growths(self, method: Method, sizes: Sequence[int]) -> list[Growth]:
        if self._fitter.limits.path_tokens is None:
            return [self.growth(method)] * len(sizes)
        return [self._fitter.grow(self.estimate(method), size) for size in sizes]

    def _estimate(self, method: Method) -> Values:
        uniform = method.weights == "uniform"
        if method.values == "independent":
            return self._fitter.independent(self.weights if uniform else self._settle(self._fitter.independent))
        return JointValues(self._fitter.trie, self._uniform, method.strength, None if uniform else self._visits)

    @functools.cached_property
    def _uniform(self) -> list[Counts]:
        return self._fitter.trie.count(self.weights)

    @functools.cached_property
    def _visits(self) -> list[Counts]:
        """Counts where steps of joint trees begin; the strength of their prior hardly changes these positions."""
        trie = self._fitter.trie
        begun = self._settle(lambda begun: JointValues(trie, self._uniform, _SETTLING_STRENGTH, trie.count(begun)))
        return trie.count(begun)

    def _settle(self, estimate: Callable[[Floats], Values]) -> Floats:
        """How often a step begins at each position (float64 [P], weighted), under trees built from these very counts.

        A fixed-point iteration: grow a tree, count where its steps begin, grow again, until a tree repeats or for four
        rounds. The mean over the rounds varies less than the last one (measured in docs/develop/method.md).
        """
        growth, ranks = self.growth(MEDUSA), self._fitter.calibration.ranks
        grown: list[Growth] = []
        total = np.zeros(len(self.weights))
        while len(grown) < _ROUNDS and not any(map(growth.makes_the_tree_of, grown)):
            grown.append(growth)
            begun = self.weights * visits(growth.children.accepted(ranks))
            total += begun
            growth = self._fitter.grow(estimate(begun))
        return total / len(grown)
