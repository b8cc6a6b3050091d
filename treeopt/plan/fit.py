"""The efficiency of a device, fitted to measured steps, with its error on steps that were left out.

The logarithms of modelled and measured seconds are compared, so that a step of 1 ms counts as much as one of 1 s. The
five numbers of `Efficiency` are found by least squares on their logarithms, which keeps them positive
(`scipy.optimize.least_squares`), from several starting points. Steps of one model do not tell the time around a step
from that of its operators, whose number is always the same; then `step` is 0 and `launch` contains it, so that it grows
with the number of layers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treeopt.defaults import ONE_NODE, PATH_TOKENS, WITH_DRAFT
from treeopt.facts import Fact, Part, picked
from treeopt.latency import LatencyProfile
from treeopt.plan.devices import BYTES
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
    """Errors of steps that the fit did not see."""

    by: str  # what was left out at a time: `nodes`, `batch and context`, or `model`
    errors: tuple[float, ...]  # |modelled / measured - 1| of every step that was left out
    skipped: tuple[str, ...] = ()  # what was not left out, because the other steps do not determine the numbers

    @property
    def median(self) -> float:
        return float(np.median(self.errors)) if self.errors else np.nan

    @property
    def largest(self) -> float:
        return max(self.errors, default=np.nan)


@dataclass(frozen=True)
class EfficiencyFit:
    """The result of `fit_efficiency`: the efficiency from all steps, their errors, and those of steps left out."""

    efficiency: Efficiency
    fitted: HeldOut
    held_out: tuple[HeldOut, ...]
    undetermined: tuple[str, ...] = ()  # numbers on which no step depends: shares are 1 then, and seconds 0

    def parts(self) -> Iterator[Part]:
        """The fitted numbers, and the errors of steps that were fitted and left out."""
        found = {}
        for one in (self.fitted, *self.held_out):
            found[one.by] = {**picked(one if one.errors else None, "median", "largest"), "skipped": one.skipped}
        yield Fact(None, found, key="fit")
        yield Fact(None, self.undetermined, key="fit_undetermined")
        numbers = vars(self.efficiency)
        shares = ", ".join(f"{name} {numbers[name]:.3g}" for name in ("compute", "bandwidth"))
        times = ", ".join(f"{name} {numbers[name] * 1e6:.3g} us" for name in ("launch", "step", "tree"))
        yield f"efficiency, fitted to {len(self.fitted.errors)} measured steps: {shares}; {times}"
        for name in self.undetermined:
            yield f"{name} is not determined: no step depends on it (treeopt profile with other --sizes, --batch-size)"
        for one in (self.fitted, *self.held_out):
            left_out = "fitted steps" if one is self.fitted else f"steps left out by {one.by}"
            errors = f"median {one.median:.1%}, largest {one.largest:.1%}" if one.errors else "none"
            skipped = f"; not left out: {'; '.join(one.skipped)} (the other steps do not determine 5 numbers)"
            yield f"error of {left_out}: {errors}{skipped if one.skipped else ''}"
        if all(one.by != "model" for one in self.held_out):
            yield "steps of one model do not separate bandwidth from launch: for another model, fit two or more"


def check_fittable(source: Mapping[str, Any], file: str) -> None:
    """Raise E240 where a profile of this provenance cannot be fitted."""
    dtype, drafted = source.get("dtype"), source.get("drafter_name") in WITH_DRAFT
    lacks = "the shape of the draft, whose forwards the steps contain, is not in it"
    of = f"has the dtype {dtype}" if dtype else "has no dtype"
    for refused, fault, why in (
        (source.get("modelled"), "was modelled", "the model is fitted to measured steps"),
        (not source.get("model"), "names no model", "the model is fitted to measured steps of a known shape"),
        (drafted, "is of a draft model or module", lacks),
        (source.get("unit") == PATH_TOKENS, "is by path tokens", "such a step has a copy of the cache for each path"),
        (dtype not in BYTES, of, "FLOP/s and bytes follow from the dtype"),
    ):
        if refused:
            fix = "--fit: a file of treeopt profile, with heads or n-grams, in one of these dtypes: " + ", ".join(BYTES)
            raise shape_error(f"{file} {fault}", at=f"--fit {file}", why=why, fix=fix)


def fit_efficiency(sources: Sequence[MeasuredSteps]) -> EfficiencyFit:
    """The efficiency of a device: from measured steps of one or more models.

    Held-out errors are by size (the steps of one number of nodes are left out at a time), by batch and context, and by
    model where there are several. Steps of one node are in every fit by size: overheads are relative to them, and only
    they separate `step` from `tree`. What leaves fewer than `FEWEST_POINTS` steps, or none of a tree, is not left out.
    The folds are those of the data, so the result is the same in every run.

    Args:
        sources: profiles of one device, each with its model's shape, setting and drafting.

    Raises:
        TreeoptError: E240 where there are fewer than `FEWEST_POINTS` steps.
    """
    steps = _Steps.of(sources)
    if len(steps.seconds) < FEWEST_POINTS:
        what = f"{len(steps.seconds)} measured steps are too few to fit {len(vars(Efficiency()))} numbers"
        raise shape_error(what, fix="treeopt profile with more --sizes, --batch-size or --context")
    efficiency = _fit(steps)
    points = [(source.model.shape.name, point) for source in sources for point in source.profile.points]
    folds: dict[str, list[str | None]] = {
        "nodes": [f"{point.nodes} nodes" if point.nodes > ONE_NODE else None for _, point in points],
        "batch and context": [f"batch {point.batch}, context {point.context}" for _, point in points],
        "model": [name for name, _ in points],
    }
    held_out = (_held_out(by, steps, fold) for by, fold in folds.items() if len(set(fold)) > 1)
    fitted = HeldOut("none", steps.errors(efficiency))
    return EfficiencyFit(efficiency, fitted, tuple(held_out), steps.undetermined(efficiency))


@dataclass(frozen=True)
class _Steps:
    """R measured steps, with what their operators, at most O, take at the peak figures."""

    seconds: Floats  # [R]
    computing: Floats  # [R, O], seconds; 0 for operators that a model has not
    moving: Floats  # [R, O], seconds
    calls: Floats  # [R]
    host: Floats  # [R], seconds of drafting on the host
    drafts: NDArray[np.bool_]  # [R], whether the step has more than one node

    @classmethod
    def of(cls, sources: Sequence[MeasuredSteps]) -> _Steps:
        rows = [(source.model, point) for source in sources for point in source.profile.points]
        operators = [model.operators([point.nodes], point.batch, point.context) for model, point in rows]
        times = np.zeros((2, len(rows), max(map(len, operators))))
        for row, (model, _) in enumerate(rows):
            bare = dataclasses.replace(model, efficiency=Efficiency())
            times[:, row, : len(operators[row])] = np.array([bare.times(one) for one in operators[row]])[..., 0].T
        drafts = np.array([point.nodes > ONE_NODE for _, point in rows])
        return cls(
            seconds=np.array([point.seconds for _, point in rows]),
            computing=times[0],
            moving=times[1],
            calls=np.array([sum(float(one.calls[0]) for one in each) for each in operators]),
            host=np.array([model.drafting.host_seconds for model, _ in rows]) * drafts,
            drafts=drafts,
        )

    def chosen(self, rows: NDArray[np.bool_]) -> _Steps:
        """Some of the steps."""
        return _Steps(*(getattr(self, one.name)[rows] for one in dataclasses.fields(self)))

    def modelled(self, efficiency: Efficiency) -> Floats:
        """float64 [R]: the modelled seconds, as `StepModel.seconds`."""
        work = np.maximum(self.computing / efficiency.compute, self.moving / efficiency.bandwidth).sum(1)
        around = self.calls * efficiency.launch + efficiency.step + self.host + self.drafts * efficiency.tree
        found: Floats = work + around
        return found

    def undetermined(self, efficiency: Efficiency) -> tuple[str, ...]:
        """The numbers on which no step depends."""
        beyond = self.computing / efficiency.compute - self.moving / efficiency.bandwidth
        free = {"compute": (beyond <= 0).all(), "bandwidth": (beyond >= 0).all(), "tree": not self.drafts.any()}
        return tuple(name for name, alone in free.items() if alone)

    def errors(self, efficiency: Efficiency) -> tuple[float, ...]:
        """|modelled / measured - 1| of each step."""
        return tuple(np.abs(self.modelled(efficiency) / self.seconds - 1.0).tolist())


def _held_out(by: str, steps: _Steps, fold: Sequence[str | None]) -> HeldOut:
    """The error of each step by a fit to the steps of other folds; steps of the fold None are in every fit."""
    errors, seen = np.zeros(len(fold)), np.zeros(len(fold), dtype=bool)
    skipped = []
    for value in dict.fromkeys(one for one in fold if one is not None):
        left = np.array([one == value for one in fold])
        rest = steps.chosen(~left)
        if len(rest.seconds) < FEWEST_POINTS or not rest.drafts.any():
            skipped.append(value)
            continue
        errors[left], seen[left] = steps.chosen(left).errors(_fit(rest)), True
    return HeldOut(by, tuple(errors[seen].tolist()), tuple(skipped))


def _fit(steps: _Steps) -> Efficiency:
    """The efficiency with the least squares of log seconds."""
    from scipy.optimize import least_squares

    measured, around = np.log(steps.seconds), len(set(steps.calls[~steps.drafts].tolist())) > 1
    low = np.log([_SHARES[0]] * 2 + [_LEAST_SECONDS] * 3)
    high = np.log([_SHARES[1]] * 2 + [_MOST_SECONDS] * 3)

    def residuals(logs: Floats) -> Floats:
        return np.log(steps.modelled(efficiency_of(logs))) - measured

    def efficiency_of(logs: Floats) -> Efficiency:
        compute, bandwidth, launch, step, tree = np.exp(logs).tolist()
        return Efficiency(compute, bandwidth, launch, step * around, tree)

    found = []
    for compute, bandwidth, launch in _STARTS:
        start = np.log([compute, bandwidth, launch, steps.seconds.min() / 10, steps.seconds.min() / 10])
        found.append(least_squares(residuals, np.clip(start, low, high), bounds=(low, high)))
    fitted = efficiency_of(min(found, key=lambda one: float(one.cost)).x)
    neutral = {"compute": max(1.0, fitted.compute), "bandwidth": max(1.0, fitted.bandwidth), "tree": 0.0}
    return dataclasses.replace(fitted, **{name: neutral[name] for name in steps.undetermined(fitted)})
