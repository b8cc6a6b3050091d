"""Several tasks: tokens per step of each task's tree on every task, and one tree for all tasks."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treeopt.calibration import Calibration
from treeopt.errors import Code, TreeoptError
from treeopt.optimize.replay import TraceRows
from treeopt.optimize.select_method import Fitter, Limits, Method, MethodFit
from treeopt.optimize.trie import Floats
from treeopt.progress import Progress, silent
from treeopt.traces import TargetTraces, joined
from treeopt.tree import Tree

_ROUNDS = 12
_RATE = 8.0  # of the exponential update: the weight of a task that loses 5 % is multiplied by 1.5 in a round


@dataclass(frozen=True)
class Mixed:
    """One tree for several tasks."""

    fit: MethodFit
    fitter: Fitter  # the texts of all tasks with their weights
    tokens_per_step: Floats  # [T], of the tree on each task; not cross-validated
    shares: Floats  # [T], the weight of each task in the fit, summing to 1
    matrix: Floats  # as `Tasks.matrix`


class Tasks:
    """Calibrations of one model and heads, one for each task, with the limits and candidate methods of their trees."""

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
        self.joined, self.task = join_tasks(calibrations)
        # The fit to the texts of each task alone.
        self.alone = [Fitter(one, limits, progress=progress).choose(methods) for one in calibrations]

    @functools.cached_property
    def matrix(self) -> Floats:
        """float64 [T, T]: tokens per step of the row task's tree on the column's; cross-validated on the diagonal."""
        table = self._replayed.copy()
        for i, fit in enumerate(self.alone):
            if fit.sums is not None:
                table[i, i] = fit.sums.tokens_per_step
        return table

    @functools.cached_property
    def _replayed(self) -> Floats:
        return np.array([self._by_task(fit.tree) for fit in self.alone])

    def weighted(self, shares: Sequence[float]) -> Mixed:
        """The best tree where the tokens of each task have this share of the weight (any positive numbers)."""
        weights = np.array(shares, np.float64)
        if not (weights > 0).all() or not np.isfinite(weights).all():
            raise ValueError(f"shares {list(shares)}: positive numbers, one a task")
        weights = np.ldexp(weights, -np.frexp(weights.max())[1])  # exact, and the sum stays finite
        weights /= weights.sum()
        return self._mixed(weights, self._methods)

    def robust(self) -> Mixed:
        """The tree whose worst task loses least, compared with the tree fitted to that task alone.

        In each round the weight of a task grows with its loss (multiplicative weights); the best round counts.
        """
        alone = self._replayed.diagonal()
        shares = np.full(len(alone), 1.0 / len(alone))
        method = self._fitter(shares).choose(self._methods).method
        best_shares, best_worst = shares, -np.inf
        for done in range(_ROUNDS):
            ratios = self._by_task(self._fitter(shares).build(method).tree()) / alone
            if ratios.min() > best_worst:
                best_shares, best_worst = shares, float(ratios.min())
            shares = shares * np.exp(_RATE * (1.0 - ratios))
            shares /= shares.sum()
            self._progress(done + 1, _ROUNDS, f"worst task at {best_worst:.3f} of its tree alone")
        return self._mixed(best_shares, [method])

    def _mixed(self, shares: Floats, methods: Sequence[Method]) -> Mixed:
        fitter = self._fitter(shares)
        fit = fitter.choose(methods)
        return Mixed(fit, fitter, self._by_task(fit.tree), shares, self.matrix)

    def _fitter(self, shares: Floats) -> Fitter:
        """All texts, weighted so that the tokens of each task have its share of the weight.

        The weights sum to Kish's effective sample size, or a small task with a large share would outweigh the priors.
        """
        tokens = np.array([calibration.positions for calibration in self.calibrations], np.float64)
        per_token = shares / np.maximum(tokens, 1)
        per_token *= (per_token @ tokens) / (per_token**2 @ tokens)
        return Fitter(self.joined, self.limits, text_weights=per_token[self.task], progress=self._progress)

    def _by_task(self, tree: Tree) -> Floats:
        """float64 [T]: tokens per step on each task."""
        return np.array([TraceRows.of(one).replay(tree).tokens_per_step for one in self.calibrations])


def join_tasks(calibrations: Sequence[Calibration]) -> tuple[Calibration, NDArray[np.int64]]:
    """All texts as one calibration, and the task of each, int64 [S]. A prompt in two tasks is two texts.

    Traces of per-step trees, and target probabilities, are kept where all tasks have them. E221 where the tasks are of
    different models, heads, drafters or temperatures.
    """
    first = calibrations[0]
    for other in calibrations[1:]:
        first.check_comparable(other, settings=False)  # tasks may differ in the length or kind of their answers
    temperatures = {calibration.temperature or 0.0 for calibration in calibrations}
    if len(temperatures) > 1:
        raise TreeoptError(
            Code.CALIBRATION_MISMATCH,
            "the calibrations are of texts at different temperatures",
            at="\n".join(f"temperature {temperature:g}" for temperature in sorted(temperatures)),
            why="one tree for several tasks is fitted to the tokens per step at one temperature",
            fix="treeopt calibrate again, with one --temperature",
        )
    lengths = np.concatenate([np.diff(calibration.offsets) for calibration in calibrations])
    task = np.repeat(np.arange(len(calibrations)), [calibration.sequences for calibration in calibrations])
    ids = [f"{t:04}/{prompt}" for t, calibration in enumerate(calibrations) for prompt in calibration.prompt_ids]
    prompts = {key: name for calibration in calibrations for key, name in calibration.provenance.prompts.items()}
    all_have_steps = all(calibration.steps is not None for calibration in calibrations)
    whole = Calibration(
        ranks=np.concatenate([calibration.ranks for calibration in calibrations]),
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        prompt_ids=tuple(ids),
        token_hashes=tuple(token for calibration in calibrations for token in calibration.token_hashes),
        top_k=first.top_k,
        provenance=dataclasses.replace(first.provenance, prompts=prompts),
        steps=joined([calibration.steps for calibration in calibrations]) if all_have_steps else None,
        target=_joined_target(calibrations, places=all_have_steps),
    )
    return whole, task


def _joined_target(calibrations: Sequence[Calibration], *, places: bool) -> TargetTraces | None:
    """The target's probabilities of all texts; None unless all have them, of as many candidates."""
    known = [calibration.target for calibration in calibrations if calibration.target is not None]
    if len(known) < len(calibrations) or len({target.ranks for target in known}) > 1:
        return None
    return joined([target if places else dataclasses.replace(target, places=None) for target in known])
