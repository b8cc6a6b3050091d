"""The curve: tokens per step, and with a latency profile overhead and speedup, for every size of tree."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treeopt.calibration import Calibration
from treeopt.latency import LatencyProfile
from treeopt.optimize.intervals import Interval, by_text, prediction_interval, sampling_interval
from treeopt.optimize.methods import Method
from treeopt.optimize.per_step import steps_by_size, traced_steps
from treeopt.optimize.select_method import Fitter
from treeopt.policy import STEP_SIZES


@dataclass(frozen=True)
class CurvePoint:
    """One size. Tokens per step are on texts that the tree was not fitted to; seconds and what follows by the profile.

    `sampling` is the interval for all such texts, `prediction` for as many new ones; None below two different texts.
    """

    nodes: int
    tokens_per_step: float
    sampling: Interval | None
    prediction: Interval | None
    seconds: float | None
    overhead: float | None
    speedup: float | None


@dataclass(frozen=True)
class Curve:
    """The points by size, and the size of the greatest speedup (None without a profile).

    `expected` holds, for every size from 1 on, what the growth from all texts promises on these very texts: 1 + the sum
    of its values; more than the points, which are of texts left out. Of trees chosen per step it is the drafter's own
    mean estimate, over all positions.
    """

    points: tuple[CurvePoint, ...]
    best: int | None
    method: str
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
    [(growth, _)] = fitter.build([method])
    sizes = [size for size in sizes if size <= len(growth.values) + 1]
    found = zip(sizes, fitter.unseen_by_size(method, sizes), strict=True)
    points = _points(fitter.calibration, found, profile, batch, context)
    return Curve(points, _best(points), str(method), tuple(growth.expected().tolist()))


def policy_curve(
    calibration: Calibration,
    sizes: Sequence[int],
    *,
    profile: LatencyProfile | None = None,
    batch: int = 1,
    context: int | None = None,
) -> Curve:
    """The same for trees chosen per step, each size replayed over the traces.

    Raises:
        TreeoptError: E220 where the calibration did not trace trees of steps; E230 as `measure_curve`.
    """
    steps = traced_steps(calibration)
    found = ((size, steps_by_size(calibration, size)) for size in sizes if size <= STEP_SIZES[-1])
    points = _points(calibration, found, profile, batch, context)
    expected = np.interp(range(1, points[-1].nodes + 1), STEP_SIZES, steps.expected_tokens.mean(0))
    return Curve(points, _best(points), "chosen per step", tuple(expected.tolist()))


def _best(points: Sequence[CurvePoint]) -> int | None:
    """The size of the greatest speedup, the smallest of equal ones."""
    timed = [point for point in points if point.speedup is not None]
    return max(timed, key=lambda point: (point.speedup or 0.0, -point.nodes)).nodes if timed else None


def _points(
    calibration: Calibration,
    found: Iterable[tuple[int, NDArray[np.int64]]],
    profile: LatencyProfile | None,
    batch: int,
    context: int | None,
) -> tuple[CurvePoint, ...]:
    """The points of sizes and the steps that each text takes with them."""
    tokens = np.diff(calibration.offsets)
    alone = None if profile is None else profile.seconds(1, batch, context)
    points = []
    for nodes, steps in found:
        tau = float(tokens.sum() / steps.sum())
        texts = by_text(calibration.token_hashes, tokens, steps)
        seconds = None if profile is None else profile.seconds(nodes, batch, context)
        overhead = None if seconds is None or alone is None else seconds / alone
        points.append(
            CurvePoint(
                nodes=nodes,
                tokens_per_step=tau,
                sampling=sampling_interval(*texts),
                prediction=prediction_interval(*texts),
                seconds=seconds,
                overhead=overhead,
                speedup=None if overhead is None else tau / overhead,
            )
        )
    return tuple(points)
