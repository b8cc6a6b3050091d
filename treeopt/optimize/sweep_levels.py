"""How many levels (heads) a tree needs: tokens per step where only the first h levels are used.

arXiv:2401.10774, section 2.2.3: five heads were enough everywhere, and after tree search three or four often suffice.
A tree of few nodes does not reach the last levels; those levels then cost nothing and can be left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from treeopt.calibration import Calibration
from treeopt.defaults import DEFAULT_VALUES, DEFAULT_WEIGHTS, LEVELS_SIZES, TOLERATED_LOSS
from treeopt.optimize.intervals import Interval, by_text, ratio_interval, sampling_interval
from treeopt.optimize.methods import candidates
from treeopt.optimize.refine import Limits
from treeopt.optimize.select_method import Fit, Fitter
from treeopt.optimize.sums import TextSums
from treeopt.optimize.sweep_limits import check_folds, check_reached, check_sizes
from treeopt.optimize.tree_builder import DEFAULT_TOP_K, tree_limits
from treeopt.progress import Progress, silent
from treeopt.tree import Tree


@dataclass(frozen=True)
class LevelPoint:
    """Trees of at most `nodes` nodes (root counted) on the first `levels` levels.

    Args:
        levels: h.
        nodes: the budget.
        method: of the trees, chosen by cross-validation with all levels.
        used: nodes of the tree from all texts; below the budget where h levels of K ranks hold fewer.
        depth: levels that this tree reaches.
        tokens_per_step: cross-validated.
        sampling: 90 % interval of the expected tokens per step; None where there are too few texts.
        share: tokens per step / those with all levels.
        share_interval: 90 % interval of `share` (paired over texts).
    """

    levels: int
    nodes: int
    method: str
    used: int
    depth: int
    tokens_per_step: float
    sampling: Interval | None
    share: float
    share_interval: Interval | None

    @property
    def least_share(self) -> float:
        """The lower end of `share_interval`; the share where there is none."""
        return self.share if self.share_interval is None else self.share_interval.low


@dataclass(frozen=True)
class LevelSweep:
    """The result of `sweep_levels`: points by nodes, then by levels."""

    points: tuple[LevelPoint, ...]

    def enough(self, nodes: int) -> int:
        """The fewest levels of which it is likely that they lose less than 1 % of the tokens per step at this budget.

        The lower end of the share's interval is above 99 %; the share itself where there is no interval.
        """
        return min(one.levels for one in self.points if one.nodes == nodes and one.least_share > 1.0 - TOLERATED_LOSS)


def sweep_levels(
    calibration: Calibration,
    *,
    sizes: Sequence[int] = LEVELS_SIZES,
    top_k: int = DEFAULT_TOP_K,
    progress: Progress = silent,
) -> LevelSweep:
    """Tokens per step of trees on the first 1, 2, ... H levels, on texts that were left out of their fit.

    Source: arXiv:2401.10774, section 2.2.3.

    Args:
        calibration: the rank traces, of heads or of any drafter with levels.
        sizes: budgets of nodes, root counted.
        top_k: K, the ranks of each level that are considered.
        progress: called after each size.

    Raises:
        TreeoptError: E102 where the traces hold no tree of a size with all levels; E303 where there are fewer than five
            different texts.
        ValueError: where a number is out of range.
    """
    check_sizes(sizes)
    check_folds(calibration)
    points: list[LevelPoint] = []
    for done, nodes in enumerate(sorted(set(sizes)), start=1):
        points += _of_size(calibration, tree_limits(calibration, nodes, top_k=top_k))
        progress(done, len(set(sizes)), f"{nodes} nodes")
    return LevelSweep(tuple(points))


def _of_size(calibration: Calibration, limits: Limits) -> list[LevelPoint]:
    """The points of one budget, by levels; all trees by the method that is chosen with all levels."""
    fitter = Fitter(calibration, limits)
    fit = fitter.choose(candidates(DEFAULT_VALUES, DEFAULT_WEIGHTS, refined=False))
    check_reached(fit.growth, [limits.nodes], calibration, limits)
    assert fit.sums is not None
    points = []
    for levels in range(1, calibration.num_heads + 1):
        limited = Fitter(calibration, dataclasses.replace(limits, max_depth=levels))
        [(_, tree)] = limited.build([fit.method])
        [sums] = limited.cross_validated_sums(fit.method, [limits.nodes])
        points.append(_point(calibration, fit, (levels, limits.nodes, tree), sums))
    return points


def _point(calibration: Calibration, fit: Fit, key: tuple[int, int, Tree], sums: TextSums) -> LevelPoint:
    """The point of a number of levels, a budget and the tree from all texts, beside the fit with all levels."""
    assert fit.sums is not None
    one, other = (by_text(calibration.token_hashes, each.tokens, each.steps) for each in (sums, fit.sums))
    levels, nodes, tree = key
    return LevelPoint(
        levels,
        nodes,
        str(fit.method),
        tree.nodes,
        tree.depth,
        sums.tokens_per_step,
        sampling_interval(*one),
        share=sums.tokens_per_step / fit.sums.tokens_per_step,
        share_interval=ratio_interval(*one, *other),
    )
