"""Mixtures: calibrations of several tasks, what the tree of each does on the others, and one tree for all of them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treeopt.calibration import Calibration
from treeopt.optimize.methods import Method
from treeopt.optimize.refine import Limits
from treeopt.optimize.select_method import Fit, Fitter
from treeopt.optimize.trie import Floats
from treeopt.progress import Progress, silent
from treeopt.tree import Tree

_ROUNDS = 12
_RATE = 8.0  # how fast weight moves to the worst task: a task 5 % behind gains half as much again in a round


@dataclass(frozen=True)
class Matrix:
    """Tokens per step, float64 [T, T]: the tree fitted to the row's task, on the column's; on its own task, unseen."""

    tokens_per_step: Floats
    trees: tuple[Tree, ...]


@dataclass(frozen=True)
class Mixed:
    """One tree for several tasks.

    Args:
        fit: the tree.
        fitter: what it was fitted with.
        tokens_per_step: float64 [T], of the tree on each task (fitted to them).
        shares: float64 [T], the weight of each task in the fit, summing to 1.
    """

    fit: Fit
    fitter: Fitter
    tokens_per_step: Floats
    shares: Floats


class Tasks:
    """Calibrations of one model and heads, one a task.

    Args:
        calibrations: the tasks.
        limits: of the trees.
        methods: what competes for each tree.
        progress: told after each growth, and each round of the robust tree.

    Raises:
        TreeoptError: E221 where they are of different models, heads or drafters.
    """

    def __init__(
        self,
        calibrations: Sequence[Calibration],
        limits: Limits,
        methods: Sequence[Method],
        *,
        progress: Progress = silent,
    ) -> None:
        self.calibrations = tuple(calibrations)
        self.limits = limits
        self._methods = tuple(methods)
        self._progress = progress
        self.joined, self.task = _join(calibrations)

    @functools.cached_property
    def alone(self) -> tuple[Fit, ...]:
        """For each task the fit of its own texts alone."""
        fitters = (Fitter(own, self.limits, progress=self._progress) for own in self.calibrations)
        return tuple(fitter.choose(self._methods) for fitter in fitters)

    def matrix(self) -> Matrix:
        """What the tree of each task does on every task."""
        table = np.array([[_tau(calibration, fit.tree) for calibration in self.calibrations] for fit in self.alone])
        for i, (calibration, fit) in enumerate(zip(self.calibrations, self.alone, strict=True)):
            if fit.steps is not None:
                table[i, i] = calibration.positions / fit.steps.sum()
        return Matrix(table, tuple(fit.tree for fit in self.alone))

    def weighted(self, shares: Sequence[float]) -> Mixed:
        """The best tree where each task makes up this share of the tokens (any positive numbers)."""
        weights = np.array(shares, np.float64)
        if not (weights > 0).all() or not np.isfinite(weights).all():
            raise ValueError(f"shares {list(shares)}: positive numbers, one a task")
        weights = np.ldexp(weights, -np.frexp(weights.max())[1])  # exact, and the sum stays finite
        weights /= weights.sum()
        fitter = self._fitter(weights)
        fit = fitter.choose(self._methods)
        return Mixed(fit, fitter, self._by_task(fit.tree), weights)

    def robust(self) -> Mixed:
        """The tree whose worst task loses least against that task's own tree.

        Weight moves, round by round, to the tasks that a tree leaves furthest behind (multiplicative weights); the tree
        with the best worst task is kept. The method is chosen once, on equal weights.
        """
        count = len(self.calibrations)
        own = np.array([_tau(c, fit.tree) for c, fit in zip(self.calibrations, self.alone, strict=True)])
        shares = np.full(count, 1.0 / count)
        method = self._fitter(shares).choose(self._methods).method
        best_shares, best_worst = shares, -np.inf
        for done in range(_ROUNDS):
            kept = self._by_task(self._tree(shares, method)) / own
            if kept.min() > best_worst:
                best_shares, best_worst = shares, float(kept.min())
            shares = shares * np.exp(_RATE * (1.0 - kept))
            shares /= shares.sum()
            self._progress(done + 1, _ROUNDS, f"worst task {best_worst:.3f} of its own tree")
        fitter = self._fitter(best_shares)
        fit = fitter.choose([method])
        return Mixed(fit, fitter, self._by_task(fit.tree), best_shares)

    def _tree(self, shares: Floats, method: Method) -> Tree:
        [(_, tree)] = self._fitter(shares).build([method])
        return tree

    def _fitter(self, shares: Floats) -> Fitter:
        """All texts; each task's tokens together weigh its share.

        Scaled so that all weights together count as much as they tell (Kish's effective sample size): else a small task
        of great weight would outvote the priors as if it were large.
        """
        tokens = np.array([calibration.positions for calibration in self.calibrations], np.float64)
        per_token = shares / np.maximum(tokens, 1)
        per_token *= (per_token @ tokens) / (per_token**2 @ tokens)
        return Fitter(self.joined, self.limits, text_weights=per_token[self.task], progress=self._progress)

    def _by_task(self, tree: Tree) -> Floats:
        return np.array([_tau(calibration, tree) for calibration in self.calibrations])


def _tau(calibration: Calibration, tree: Tree) -> float:
    steps = Fitter(calibration, Limits(tree.nodes, 1)).steps(tree)
    return float(calibration.positions / max(int(steps.sum()), 1))


def _join(calibrations: Sequence[Calibration]) -> tuple[Calibration, NDArray[np.int64]]:
    """All texts as one calibration, and int64 [S]: the task of each. The same prompt in two tasks stays two texts."""
    first = calibrations[0]
    for other in calibrations[1:]:
        first.check_comparable(other, settings=False)  # tasks may differ in the length or kind of their answers
    lengths = np.concatenate([np.diff(calibration.offsets) for calibration in calibrations])
    task = np.repeat(np.arange(len(calibrations)), [calibration.sequences for calibration in calibrations])
    ids = [f"{t:04}/{prompt}" for t, calibration in enumerate(calibrations) for prompt in calibration.prompt_ids]
    prompts = {key: name for calibration in calibrations for key, name in calibration.provenance.prompts.items()}
    joined = Calibration(
        ranks=np.concatenate([calibration.ranks for calibration in calibrations]),
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        prompt_ids=tuple(ids),
        token_hashes=tuple(token for calibration in calibrations for token in calibration.token_hashes),
        top_k=first.top_k,
        provenance=dataclasses.replace(first.provenance, prompts=prompts),
    )
    return joined, task
