"""How many prompts a calibration needs: tokens per step lost by trees from n prompts, on texts left out.

In each random draw the different texts are shuffled and split into five parts. Every part is judged by trees that were
fitted to the first n of the other texts, for every n. So the texts of a smaller calibration are among those of a larger
one, and all of them are judged on the same texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treeopt.calibration import Calibration
from treeopt.defaults import DEFAULT_VALUES, DEFAULT_WEIGHTS, SWEEP_DRAWS, SWEEP_NODES, TOLERATED_LOSS
from treeopt.errors import check_counts
from treeopt.optimize.intervals import Interval, ratio_interval
from treeopt.optimize.methods import MEDUSA, Method, candidates
from treeopt.optimize.select_method import FOLDS, Fitter
from treeopt.optimize.sums import TextSums
from treeopt.optimize.sweep_limits import check_reached, check_texts
from treeopt.optimize.trace_rows import TraceRows
from treeopt.optimize.tree_builder import DEFAULT_TOP_K, tree_limits
from treeopt.progress import Progress, silent
from treeopt.sampling import check_seed

FEWEST = 10  # prompts of the smallest calibration
_SERIES = (1, 2, 5)  # of each power of ten
_NEARLY = 0.8  # of all texts

Masks = NDArray[np.bool_]


@dataclass(frozen=True)
class TextsPoint:
    """Trees from `texts` prompts, by one method.

    Args:
        method: of the trees.
        texts: n, different texts that each tree is fitted to.
        tokens_per_step: on the texts left out, all draws together.
        lost: 1 - tokens per step / those of trees from all other texts.
        interval: 90 % interval of `lost` (draws and texts are resampled, paired); None where there are too few texts.
        worst: the greatest `lost` of one draw.
    """

    method: str
    texts: int
    tokens_per_step: float
    lost: float
    interval: Interval | None
    worst: float


@dataclass(frozen=True)
class TextsSweep:
    """The result of `sweep_texts`.

    Args:
        points: by method, then by texts.
        nodes: of each tree, root counted.
        texts: different texts of the calibration, each of which is judged once a draw.
        fitted: texts that the trees of "all others" are fitted to.
        draws: random draws.
    """

    points: tuple[TextsPoint, ...]
    nodes: int
    texts: int
    fitted: int
    draws: int

    def enough(self, method: str) -> TextsPoint | None:
        """The fewest texts from which on the interval of the loss ends below 1 %; None where no fewer than all do."""
        found = None
        for point in sorted((one for one in self.points if one.method == method), key=lambda one: -one.texts):
            if point.interval is None or point.interval.high >= TOLERATED_LOSS:
                break
            found = point
        return None if found is None or found.texts == self.fitted else found


def text_counts(largest: int) -> list[int]:
    """10, 20, 50, 100, 200, ... and `largest`; without numbers that are nearly `largest`."""
    counts, power = {FEWEST, largest}, FEWEST
    while power <= largest:
        counts |= {power * factor for factor in _SERIES if power * factor <= _NEARLY * largest}
        power *= 10
    return sorted(counts)


def sweep_texts(
    calibration: Calibration,
    *,
    nodes: int = SWEEP_NODES,
    draws: int = SWEEP_DRAWS,
    top_k: int = DEFAULT_TOP_K,
    seed: int = 0,
    progress: Progress = silent,
) -> TextsSweep:
    """Tokens per step that trees from n prompts lose against trees from all others, on texts left out of both.

    The Medusa tree (arXiv:2401.10774, section 2.3.3 and appendix C, there from the prompts of Alpaca-eval) and the
    method that cross-validation over all texts chooses. Equal texts count once.

    Args:
        calibration: the rank traces.
        nodes: of each tree, root counted.
        draws: random draws of the texts.
        top_k: K, the ranks of each level that are considered.
        seed: of the draws.
        progress: called after each number of prompts of each draw.

    Raises:
        TreeoptError: E102 where the traces hold no tree of this size; E303 where there are fewer than 13 different
            texts, so that fewer than 10 would be left to fit.
        ValueError: where a number is out of range.
    """
    check_counts(nodes=nodes, draws=draws)
    check_seed(seed)
    fewest = next(count for count in range(FEWEST, 2 * FEWEST) if _left(count) >= FEWEST)
    check_texts(calibration, fewest, f"a fifth is judged, and the smallest calibration has {FEWEST} prompts")
    different = calibration.select(_first_of_equal(calibration))
    limits = tree_limits(different, nodes, top_k=top_k)
    fitter = Fitter(different, limits)
    best = fitter.choose(candidates(DEFAULT_VALUES, DEFAULT_WEIGHTS, refined=False)).method
    methods = list(dict.fromkeys([MEDUSA, best]))
    for growth, _ in fitter.build(methods):
        check_reached(growth, [nodes], different, limits)
    fitted = _left(different.sequences)
    counts = text_counts(fitted)
    rng = np.random.default_rng(seed)
    shuffles = [rng.permutation(different.sequences) for _ in range(draws)]
    sums = _judged(fitter, methods, shuffles, counts, progress)
    points = [
        _point(method, count, sums[method, count], sums[method, fitted]) for method in methods for count in counts
    ]
    return TextsSweep(tuple(points), nodes, different.sequences, fitted, draws)


def judged_and_fitted(order: NDArray[np.int64], count: int) -> list[tuple[Masks, Masks]]:
    """For each of five parts, bool [S]: the texts that are judged, and the `count` texts that trees are fitted to.

    Args:
        order: int64 [S], a permutation of the texts.
        count: n, the first of the other texts in this order.
    """
    parts = np.arange(len(order)) % FOLDS
    found = []
    for part in range(FOLDS):
        judged, fitted = np.zeros((2, len(order)), np.bool_)
        judged[order[parts == part]] = True
        fitted[order[parts != part][:count]] = True
        found.append((judged, fitted))
    return found


def _left(texts: int) -> int:
    """Texts that are left where the largest of five parts is judged."""
    return texts - -(-texts // FOLDS)


def _first_of_equal(calibration: Calibration) -> list[int]:
    """The first sequence of each different text that is not empty."""
    first: dict[str, int] = {}
    for s in np.flatnonzero(np.diff(calibration.offsets)).tolist():
        first.setdefault(calibration.token_hashes[s], s)
    return list(first.values())


def _judged(
    fitter: Fitter,
    methods: Sequence[Method],
    shuffles: Sequence[NDArray[np.int64]],
    counts: Sequence[int],
    progress: Progress,
) -> dict[tuple[Method, int], list[TextSums]]:
    """For each method and count, the tokens and steps of every text in each draw."""
    found: dict[tuple[Method, int], list[TextSums]] = {(method, count): [] for method in methods for count in counts}
    for draw, order in enumerate(shuffles):
        parts = np.empty(len(order), np.int64)
        parts[order] = np.arange(len(order)) % FOLDS
        for done, count in enumerate(counts, start=1):
            sums: dict[Method, list[TextSums]] = {method: [] for method in methods}
            for judged, fitted in judged_and_fitted(order, count):
                rows = TraceRows.of(fitter.calibration, judged)
                for method, (growth, _) in zip(methods, fitter.build(methods, fitted), strict=True):
                    sums[method].append(rows.sums(growth))
            for method in methods:
                found[method, count].append(TextSums.of_folds(parts, sums[method]))
            progress(draw * len(counts) + done, len(shuffles) * len(counts), f"{count} prompts")
    return found


def _point(method: Method, count: int, sums: Sequence[TextSums], whole: Sequence[TextSums]) -> TextsPoint:
    """The point of the draws' sums, against those of trees from all other texts."""
    stacked = [np.stack([getattr(one, name) for one in each]) for each in (sums, whole) for name in ("tokens", "steps")]
    taus = [one.tokens_per_step for one in sums]
    lost = [1.0 - tau / other.tokens_per_step for tau, other in zip(taus, whole, strict=True)]
    tokens, steps, all_tokens, all_steps = (float(each.sum()) for each in stacked)
    tau = tokens / steps
    ratio = ratio_interval(*stacked)
    interval = None if ratio is None else Interval(1.0 - ratio.high, 1.0 - ratio.low, ratio.level)
    return TextsPoint(str(method), count, tau, 1.0 - tau / (all_tokens / all_steps), interval, max(lost))
