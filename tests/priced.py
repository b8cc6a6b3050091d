"""Step times and counters that tests of settings share."""

from __future__ import annotations

from treeopt.latency import LatencyPoint, LatencyProfile
from treeopt.optimize.chains import MeasuredAcceptance

# 10,000 steps of an engine with chains of 4 drafts.
COUNTED = MeasuredAcceptance(2.5, (3000, 2500, 2000, 1500, 1000))
# Seconds per step by batch: a node costs more in a larger batch.
COSTS = {1: 0.05, 4: 0.2, 16: 0.5, 64: 3.0}


def priced(costs: dict[int, float] = COSTS, largest: int = 16) -> LatencyProfile:
    """A profile whose steps take 1 second and `cost` for each draft."""
    sizes = [size for size in (1, 2, 3, 4, 5, 6, 8, 16, 32) if size <= largest]
    points = [(n, batch, 1 + cost * (n - 1)) for batch, cost in costs.items() for n in sizes]
    return LatencyProfile.from_points(LatencyPoint(n, batch, 512, s, s, s) for n, batch, s in points)
