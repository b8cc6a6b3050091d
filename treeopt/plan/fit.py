"""The efficiency of a device, fitted to measured steps, with its error on steps that were left out.

The logarithms of modelled and measured seconds are compared, so that a step of 1 ms counts as much as one of 1 s. The
five numbers of `Efficiency` are found by least squares on their logarithms, which keeps them positive
(`scipy.optimize.least_squares`), from several starting points.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treeopt.latency import ONE_NODE, LatencyPoint, LatencyProfile
from treeopt.plan.operators import Floats
from treeopt.plan.step_model import Efficiency, StepModel
from treeopt.shape import shape_error

FEWEST_POINTS = 6  # one more than the numbers that are fitted
_STARTS = ((0.5, 0.5, 1e-6), (0.1, 0.5, 1e-5), (0.5, 0.1, 1e-5), (0.05, 0.05, 1e-4))  # compute, bandwidth, launch
_LEAST_SECONDS = 1e-9  # for launch, step and tree: less cannot be seen in a step
_SHARES, _MOST_SECONDS = (1e-5, 1e3), 1.0


@dataclass(frozen=True)
class MeasuredSteps:
    """The measured steps of a known model: a profile, and the model whose steps they are, of any efficiency."""

    profile: LatencyProfile
    model: StepModel


@dataclass(frozen=True)
class HeldOut:
    """Errors of steps that the fit did not see.

    Args:
        by: what was left out at a time: `nodes`, `batch and context`, or `model`.
        errors: |modelled / measured - 1| of every step that was left out.
    """

    by: str
    errors: tuple[float, ...]

    @property
    def median(self) -> float:
        """The median error."""
        return float(np.median(self.errors))

    @property
    def largest(self) -> float:
        """The largest error."""
        return max(self.errors)


@dataclass(frozen=True)
class EfficiencyFit:
    """The result of `fit_efficiency`: the efficiency from all steps, their errors, and those of steps left out."""

    efficiency: Efficiency
    fitted: HeldOut
    held_out: tuple[HeldOut, ...]


def fit_efficiency(sources: Sequence[MeasuredSteps]) -> EfficiencyFit:
    """The efficiency of a device from measured steps of one or more models.

    Held-out errors are by size (the steps of one number of nodes are left out at a time), by batch and context, and by
    model where there are several. The folds are those of the data, so the result is the same in every run.

    Args:
        sources: profiles of one device, each with its model's shape, setting and drafting.

    Raises:
        TreeoptError: E240 where there are fewer than `FEWEST_POINTS` steps.
    """
    rows = [_Row.of(source.model, point, i) for i, source in enumerate(sources) for point in source.profile.points]
    if len(rows) < FEWEST_POINTS:
        what = f"{len(rows)} measured steps are too few to fit {len(vars(Efficiency()))} numbers"
        raise shape_error(what, fix="treeopt profile with more --sizes, --batch or --context")
    efficiency = _fit(rows)
    folds: list[tuple[str, Callable[[_Row], object]]] = [
        ("nodes", lambda row: row.point.nodes),
        ("batch and context", lambda row: (row.point.batch, row.point.context)),
        ("model", lambda row: row.source),
    ]
    used = [(name, key) for name, key in folds if len({key(row) for row in rows}) > 1]
    fitted = HeldOut("none", tuple(row.error(efficiency) for row in rows))
    return EfficiencyFit(efficiency, fitted, tuple(HeldOut(name, tuple(_left_out(rows, key))) for name, key in used))


def extrapolated(efficiency: Efficiency, other: MeasuredSteps) -> HeldOut:
    """The errors of an efficiency on the measured steps of another model of the same device."""
    rows = [_Row.of(other.model, point, 0) for point in other.profile.points]
    return HeldOut("model", tuple(row.error(efficiency) for row in rows))


@dataclass(frozen=True)
class _Row:
    """A measured step: seconds of computing and moving of each operator at the peak figures, and the calls."""

    point: LatencyPoint
    source: int
    computing: NDArray[np.float64]
    moving: NDArray[np.float64]
    calls: float
    host: float

    @classmethod
    def of(cls, model: StepModel, point: LatencyPoint, source: int) -> _Row:
        bare = StepModel(model.shape, model.device, model.setting, model.drafting)
        operators = bare.operators([point.nodes], point.batch, point.context)
        times = np.array([[float(time[0]) for time in bare.times(one)] for one in operators])
        calls = sum(float(one.calls[0]) for one in operators)
        host = bare.drafting.host_seconds if point.nodes > ONE_NODE else 0.0
        return cls(point, source, times[:, 0], times[:, 1], calls, host)

    def seconds(self, efficiency: Efficiency) -> float:
        """The modelled seconds, as `StepModel.seconds`."""
        work = np.maximum(self.computing / efficiency.compute, self.moving / efficiency.bandwidth).sum()
        drafted = self.host + efficiency.tree if self.point.nodes > ONE_NODE else 0.0
        return float(work) + self.calls * efficiency.launch + efficiency.step + drafted

    def error(self, efficiency: Efficiency) -> float:
        return abs(self.seconds(efficiency) / self.point.seconds - 1.0)


def _left_out(rows: Sequence[_Row], key: Callable[[_Row], object]) -> Iterator[float]:
    """The error of each step by a fit to the steps of other keys."""
    for value in dict.fromkeys(key(row) for row in rows):
        rest = [row for row in rows if key(row) != value]
        efficiency = _fit(rest)
        yield from (row.error(efficiency) for row in rows if key(row) == value)


def _fit(rows: Sequence[_Row]) -> Efficiency:
    """The efficiency with the least squares of log seconds."""
    from scipy.optimize import least_squares

    measured = np.log([row.point.seconds for row in rows])
    low = np.log([_SHARES[0]] * 2 + [_LEAST_SECONDS] * 3)
    high = np.log([_SHARES[1]] * 2 + [_MOST_SECONDS] * 3)

    def residuals(logs: Floats) -> Floats:
        efficiency = Efficiency(*map(math.exp, logs))
        return np.log([row.seconds(efficiency) for row in rows]) - measured

    shortest = min(row.point.seconds for row in rows)
    found = []
    for compute, bandwidth, launch in _STARTS:
        start = np.log([compute, bandwidth, launch, shortest / 10, shortest / 10])
        found.append(least_squares(residuals, np.clip(start, low, high), bounds=(low, high)))
    best = min(found, key=lambda one: float(one.cost))
    return Efficiency(*map(math.exp, best.x))
