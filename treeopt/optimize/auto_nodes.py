"""Sizes: the number of nodes that is fastest on a machine, by traces and a latency profile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from treeopt.latency import LatencyProfile
from treeopt.optimize.budget import Budget, best_budget, budget_at
from treeopt.optimize.curve import default_sizes
from treeopt.optimize.methods import Method
from treeopt.optimize.select_method import Fitter

REFERENCE_NODES = 64  # the size that everybody copies


@dataclass(frozen=True)
class SizeChoice:
    """The fastest size, and what 64 nodes would give; None where the profile does not reach as far."""

    best: Budget
    at_64: Budget | None


def best_size(
    fitter: Fitter, methods: Sequence[Method], profile: LatencyProfile, batch: int = 1, context: int | None = None
) -> SizeChoice:
    """The number of nodes, up to the fitter's limit, with the most tokens per second.

    Tokens per step are replayed on texts left out of the fit (where there are enough different ones), by prefixes of
    one growth, and interpolated between the sizes that are tried. Sizes that no growth reaches are not considered.

    Args:
        fitter: the traces, with the largest size as its limit.
        methods: what competes for the tree.
        profile: seconds per step.
        batch: of the profile.
        context: of the profile; its longest where None.

    Raises:
        TreeoptError: E230 where the profile lacks a size, the batch, the context or the one-node step.
    """
    fit = fitter.choose(methods)
    method, largest = fit.method, len(fit.growth.values) + 1
    sizes = default_sizes(largest)
    tokens = fitter.calibration.positions
    known = [tokens / max(int(steps.sum()), 1) for steps in fitter.unseen_by_size(method, sizes)]
    expected = np.interp(np.arange(1, largest + 1), sizes, known)
    at_64 = budget_at(expected, profile, REFERENCE_NODES, batch, context) if largest >= REFERENCE_NODES else None
    return SizeChoice(best_budget(expected, profile, batch, context), at_64)
