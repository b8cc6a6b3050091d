"""Sizes: the number of nodes that is fastest on a machine, by traces and a latency profile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from treeopt.build.budget import Budget, best_budget, budget_at
from treeopt.build.curve import default_sizes
from treeopt.build.fit import Fitter, Method
from treeopt.build.refine import Limits
from treeopt.calibration import Calibration
from treeopt.latency import LatencyProfile

REFERENCE_NODES = 64  # the size that everybody copies


@dataclass(frozen=True)
class SizeChoice:
    """The fastest size, and what 64 nodes would give; None where the profile does not reach as far."""

    best: Budget
    at_64: Budget | None


def best_size(
    calibration: Calibration,
    profile: LatencyProfile,
    methods: Sequence[Method],
    batch: int,
    context: int | None,
    *,
    top_k: int,
    max_depth: int | None = None,
    max_rank: int | None = None,
) -> SizeChoice:
    """The number of nodes with the most tokens per second.

    Tokens per step are replayed on texts left out of the fit, at sizes up to the largest in the profile, and
    interpolated between them.

    Args:
        calibration: the rank traces.
        profile: seconds per step.
        methods: what competes for the tree.
        batch: of the profile.
        context: of the profile; its longest where None.
        top_k: as `build_tree`.
        max_depth: as `build_tree`.
        max_rank: as `build_tree`.

    Raises:
        TreeoptError: E230 where the profile lacks the batch, the context or the one-node step.
    """
    largest = int(profile.curve(batch, context)[0][-1])
    ranks = min(top_k, calibration.kept, top_k if max_rank is None else max_rank + 1)
    fitter = Fitter(calibration, Limits(largest, ranks, max_depth))
    method = fitter.choose(methods).method
    sizes = default_sizes(largest)
    tokens = calibration.positions
    known = [tokens / max(int(steps.sum()), 1) for steps in fitter.unseen_by_size(method, sizes)]
    expected = np.interp(np.arange(1, largest + 1), sizes, known)
    at_64 = budget_at(expected, profile, REFERENCE_NODES, batch, context) if largest >= REFERENCE_NODES else None
    return SizeChoice(best_budget(expected, profile, batch, context), at_64)
