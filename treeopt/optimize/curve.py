"""Tokens per step, and with a latency profile overhead and speedup, for every size of tree."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from treeopt.calibration import Calibration
from treeopt.defaults import (
    CURVE_LARGEST,
    DEFAULT_TOP_K,
    DEFAULT_VALUES,
    DEFAULT_WEIGHTS,
    KINDS,
    MAX_NODES,
    NODES,
    ONE_NODE,
    PATH_TOKENS,
    STEP_SIZES,
)
from treeopt.latency import LatencyProfile
from treeopt.optimize.budget import Budget, best_budget, check_priced, step_seconds
from treeopt.optimize.intervals import Interval, by_text, prediction_interval, sampling_interval
from treeopt.optimize.per_step import sums_by_size, traced_steps
from treeopt.optimize.replay import TextSums
from treeopt.optimize.select_method import Fitter, Method, candidates
from treeopt.optimize.tree_builder import budget_of, check_size, tree_limits
from treeopt.progress import Progress, silent


@dataclass(frozen=True)
class CurvePoint:
    """The figures of one size, cross-validated."""

    nodes: int
    tokens_per_step: float
    sampling: Interval | None  # of the expectation; None below two different texts
    prediction: Interval | None  # of the figure on as many new texts, likewise
    seconds: float | None  # None without a latency profile, as overhead and speedup
    overhead: float | None
    speedup: float | None
    overhead_quartiles: Interval | None = None  # of the timed steps; None where they are modelled, or one repeat

    @property
    def speedup_quartiles(self) -> Interval | None:
        """The speedups at the quartiles of the timed steps."""
        ends, tau = self.overhead_quartiles, self.tokens_per_step
        return None if ends is None else Interval(tau / ends.high, tau / ends.low, ends.level)


@dataclass(frozen=True)
class Curve:
    """The points by size, and the size of the greatest speedup (None without a profile)."""

    points: tuple[CurvePoint, ...]
    best: int | None
    method: str
    unit: str = NODES  # of the sizes


@dataclass(frozen=True)
class Timing:
    """A latency profile at one batch and context, the longest measured one where None."""

    profile: LatencyProfile
    batch: int = 1
    context: int | None = None

    def seconds(self, nodes: int) -> float:
        return step_seconds(self.profile, nodes, self.batch, self.context)

    def quartiles(self, nodes: int) -> Interval | None:
        """The quartiles of a step over the median of one node; None where they are equal, and of one node."""
        points = self.profile.points
        low, high = (
            step_seconds(replace(self.profile, points=tuple(map(at, points))), nodes, self.batch, self.context)
            for at in (lambda one: replace(one, seconds=one.low), lambda one: replace(one, seconds=one.high))
        )
        alone = self.seconds(ONE_NODE)
        return Interval(low / alone, high / alone, 0.5) if low < high and nodes != ONE_NODE else None

    @property
    def largest(self) -> int:
        return self.profile.largest(self.batch, self.context)


def default_sizes(largest: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, 16, 24, 32, ... up to `largest`, which is included."""
    sizes = {1, 2, 3, largest}
    power = 4
    while power <= largest:
        sizes |= {power, power * 3 // 2}
        power *= 2
    return sorted(size for size in sizes if size <= largest)


def calibration_curve(
    calibration: Calibration,
    timing: Timing | None = None,
    *,
    kind: str = KINDS[0],
    largest: int | None = None,
    top_k: int = DEFAULT_TOP_K,
    option: str = "--largest",
    progress: Progress = silent,
) -> Curve:
    """The curve of trees of a kind up to `largest` nodes, and up to the largest of a profile.

    Static trees are those of the best method, as `build` chooses it. An error names `option` as the one of `largest`.
    """
    bounds = [] if largest is None else [largest]
    bounds += [min(timing.largest, MAX_NODES)] if timing else []
    most = min(bounds, default=CURVE_LARGEST)
    if kind == KINDS[1]:
        return policy_curve(calibration, default_sizes(min(most, STEP_SIZES[-1])), timing)
    by_paths = timing is not None and timing.profile.path_tokens
    limits = tree_limits(calibration, **budget_of(most, path_tokens=by_paths), top_k=top_k)
    check_size(limits, calibration.num_heads, option)
    fitter = Fitter(calibration, limits, progress=progress)
    method = fitter.choose(candidates(DEFAULT_VALUES, DEFAULT_WEIGHTS)).method
    return measure_curve(fitter, method, default_sizes(most), timing)


def measure_curve(fitter: Fitter, method: Method, sizes: Sequence[int], timing: Timing | None = None) -> Curve:
    """Tokens per step at each size that growth reaches, cross-validated.

    All sizes of a fold come from one growth: its first nodes are each smaller tree. With visit weights the visits are
    those of the largest tree, so `build` at a smaller size can be slightly better (0.1 % at 64 of 256 nodes).
    """
    if timing is not None:
        check_priced(timing.profile, fitter.calibration, KINDS[0])
    reached = fitter.reached(method)
    sizes = [size for size in sizes if size <= reached]
    found = zip(sizes, fitter.cross_validated_sums(method, sizes), strict=True)
    points = _points(fitter.calibration, found, timing)
    return Curve(points, _best(points), str(method), NODES if fitter.limits.path_tokens is None else PATH_TOKENS)


def policy_curve(calibration: Calibration, sizes: Sequence[int], timing: Timing | None = None) -> Curve:
    """The curve of per-step trees: each size is replayed over the traces."""
    by_paths = timing is not None and timing.profile.path_tokens
    traced_steps(calibration, path_tokens=by_paths)
    if timing is not None:
        check_priced(timing.profile, calibration, KINDS[1])
    known = [size for size in sizes if size <= STEP_SIZES[-1] and (size in STEP_SIZES or not by_paths)]
    found = ((size, sums_by_size(calibration, size, path_tokens=by_paths)) for size in known)
    points = _points(calibration, found, timing)
    return Curve(points, _best(points), "per-step trees", PATH_TOKENS if by_paths else NODES)


def _best(points: Sequence[CurvePoint]) -> int | None:
    """The size with the greatest speedup; the smallest of equal ones, None without speedups."""
    timed = [point for point in points if point.speedup is not None]
    return max(timed, key=lambda point: (point.speedup or 0.0, -point.nodes)).nodes if timed else None


def _points(
    calibration: Calibration, found: Iterable[tuple[int, TextSums]], timing: Timing | None
) -> tuple[CurvePoint, ...]:
    """The point of each size, from tokens and steps of each text with trees of that size."""
    alone = None if timing is None else timing.seconds(ONE_NODE)
    points = []
    for nodes, sums in found:
        tau = sums.tokens_per_step
        texts = by_text(calibration.clusters, *sums.columns)
        seconds = None if timing is None else timing.seconds(nodes)
        overhead = None if seconds is None or alone is None else seconds / alone
        points.append(
            CurvePoint(
                nodes=nodes,
                tokens_per_step=tau,
                sampling=sampling_interval(*texts[:2]),
                prediction=prediction_interval(*texts),
                seconds=seconds,
                overhead=overhead,
                speedup=None if overhead is None else tau / overhead,
                overhead_quartiles=None if timing is None else timing.quartiles(nodes),
            )
        )
    return tuple(points)


def best_size(
    fitter: Fitter, methods: Sequence[Method], profile: LatencyProfile, batch: int = 1, context: int | None = None
) -> Budget:
    """The figures of the number of nodes, up to the fitter's limit, with the most tokens per second.

    Tokens per step are cross-validated where there are enough different texts. All sizes come from one growth, and
    tokens per step are interpolated between the sizes that are replayed. Sizes that no growth reaches are left out.
    Sizes are path tokens where those of the profile are, each with a tree of its own.
    """
    check_priced(profile, fitter.calibration, KINDS[0])
    method = fitter.choose(methods).method
    largest = fitter.reached(method)
    sizes = default_sizes(largest)
    known = [sums.tokens_per_step for sums in fitter.cross_validated_sums(method, sizes)]
    return best_budget(np.interp(np.arange(1, largest + 1), sizes, known), profile, batch, context)
