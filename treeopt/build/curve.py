"""The curve: tokens per step, and with a latency profile overhead and speedup, for every size of tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from treeopt.build.fit import Fitter, Method
from treeopt.build.intervals import Interval, prediction_interval, sampling_interval
from treeopt.latency import LatencyProfile


@dataclass(frozen=True)
class CurvePoint:
    """One size. Tokens per step are on texts that the tree was not fitted to; seconds and what follows by the profile.

    `sampling` is the interval for all such texts, `prediction` for as many new ones.
    """

    nodes: int
    tokens_per_step: float
    sampling: Interval
    prediction: Interval
    seconds: float | None
    overhead: float | None
    speedup: float | None


@dataclass(frozen=True)
class Curve:
    """The points by size, and the size of the greatest speedup (None without a profile).

    `expected` holds, for every size from 1 on, what the growth from all texts promises on these very texts: 1 + the sum
    of its values; more than the points, which are of texts left out.
    """

    points: tuple[CurvePoint, ...]
    best: int | None
    method: Method
    expected: tuple[float, ...]


def default_sizes(largest: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, 16, 24, 32, ... up to and with `largest`."""
    sizes = {1, 2, 3, largest}
    power = 4
    while power <= largest:
        sizes |= {power, power * 3 // 2}
        power *= 2
    return sorted(size for size in sizes if size <= largest)


def measure_curve(
    fitter: Fitter,
    method: Method,
    sizes: Sequence[int],
    *,
    profile: LatencyProfile | None = None,
    batch: int = 1,
    context: int | None = None,
) -> Curve:
    """Tokens per step at each size, every text replayed by a tree that was fitted without it.

    All sizes of a fold come from one growth, whose first nodes make each smaller tree. With visit weights these are
    counted for the largest tree, so `build` at a smaller size can do a little better (0.1 % at 64 of 256 nodes). Sizes
    beyond what the growth reaches are left out.

    Raises:
        TreeoptError: E230 where the profile lacks a size, the batch or the context.
    """
    tokens = np.diff(fitter.calibration.offsets)
    alone = None if profile is None else profile.seconds(1, batch, context)
    [(growth, _)] = fitter.build([method])
    sizes = [size for size in sizes if size <= len(growth.values) + 1]
    points = []
    for nodes, steps in zip(sizes, fitter.unseen_by_size(method, sizes), strict=True):
        tau = float(tokens.sum() / steps.sum())
        seconds = None if profile is None else profile.seconds(nodes, batch, context)
        overhead = None if seconds is None or alone is None else seconds / alone
        points.append(
            CurvePoint(
                nodes=nodes,
                tokens_per_step=tau,
                sampling=sampling_interval(tokens, steps),
                prediction=prediction_interval(tokens, steps),
                seconds=seconds,
                overhead=overhead,
                speedup=None if overhead is None else tau / overhead,
            )
        )
    timed = [point for point in points if point.speedup is not None]
    best = max(timed, key=lambda point: (point.speedup or 0.0, -point.nodes)).nodes if timed else None
    return Curve(tuple(points), best, method, tuple(growth.expected().tolist()))
