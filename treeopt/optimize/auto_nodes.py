"""The number of nodes with the most tokens per second, from rank traces and a latency profile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from treeopt.drafter import KINDS
from treeopt.latency import LatencyProfile
from treeopt.optimize.budget import Budget, best_budget, budget_at, check_priced
from treeopt.optimize.curve import default_sizes
from treeopt.optimize.methods import Method
from treeopt.optimize.select_method import Fitter

REFERENCE_NODES = 64  # of Medusa's published trees


@dataclass(frozen=True)
class SizeChoice:
    """The figures of the fastest size and of 64 nodes; the latter None where growth does not reach 64 nodes.

    All are by one growth to `largest` nodes.
    """

    best: Budget
    at_64: Budget | None
    largest: int


def best_size(
    fitter: Fitter, methods: Sequence[Method], profile: LatencyProfile, batch: int = 1, context: int | None = None
) -> SizeChoice:
    """The number of nodes, up to the fitter's limit, with the most tokens per second.

    Tokens per step are cross-validated where there are enough different texts. All sizes come from one growth, and
    tokens per step are interpolated between the sizes that are replayed. Sizes that no growth reaches are left out.

    Args:
        fitter: the traces, with the largest size as its limit.
        methods: the candidate methods.
        profile: seconds per step of static trees, by the drafter of the traces.
        batch: texts decoded together, as in the profile.
        context: cached tokens, as in the profile; the most measured where None.

    Raises:
        TreeoptError: E223 where the profile is of another drafter; E230 where it is of per-step trees, or lacks a size,
            the batch, the context or the one-node step.
    """
    check_priced(profile, fitter.calibration, KINDS[0])
    fit = fitter.choose(methods)
    method, largest = fit.method, len(fit.growth.values) + 1
    sizes = default_sizes(largest)
    known = [sums.tokens_per_step for sums in fitter.cross_validated_sums(method, sizes)]
    expected = np.interp(np.arange(1, largest + 1), sizes, known)
    at_64 = budget_at(expected, profile, REFERENCE_NODES, batch, context) if largest >= REFERENCE_NODES else None
    return SizeChoice(best_budget(expected, profile, batch, context), at_64, largest)
