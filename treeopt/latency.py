"""The latency record: seconds of a decode step by the number of nodes, the batch and the context length.

A calibration gives tokens per step, this record seconds per step; `treeopt.optimize.budget` divides the two.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from treeopt.defaults import PATH_TOKENS, TOO_LARGE
from treeopt.errors import Code, TreeoptError, counted

_FIX = "measure it: treeopt profile --sizes ... --context ... --batch-size ..."


@dataclass(frozen=True)
class LatencyPoint:
    """Seconds of one decode step of a tree of `nodes` nodes (root counted): median, lower and upper quartile.

    A step drafts with the heads, verifies `batch` x `nodes` tokens after `context` cached ones, accepts, and updates
    the cache. The step of `ONE_NODE` runs no heads, because the root alone needs none; overheads refer to it.

    Raises:
        TreeoptError: E230 where a rule above is broken.
    """

    nodes: int  # N, at least 1; the path tokens, where the profile is of these
    batch: int  # texts decoded together, at least 1
    context: int  # tokens in the cache before the step, at least 1
    seconds: float  # the median; above 0
    low: float  # the lower quartile; equal to `seconds` where the profile is modelled
    high: float  # the upper quartile, likewise
    # seconds of the part that chooses a per-step tree of this size, with its tokens; contained in `seconds`. None where
    # it was not measured
    drafting: float | None = None

    def __post_init__(self) -> None:
        for name in ("nodes", "batch", "context"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Integral) or not 1 <= int(value) < TOO_LARGE:
                raise _invalid(f"{name} is {value!r:.40}, not a whole number from 1 to {TOO_LARGE - 1:,}")
            object.__setattr__(self, name, int(value))  # files take no integers of numpy
        if not 0.0 < self.low <= self.seconds <= self.high < math.inf:
            order = f"low {self.low}, seconds {self.seconds}, high {self.high}"
            raise _invalid(f"{_named(self.key)} has {order}; these must be positive and ascending")
        if self.drafting is not None and not 0.0 < self.drafting < math.inf:
            raise _invalid(f"{_named(self.key)} has drafting {self.drafting}, not a positive number")

    @property
    def key(self) -> tuple[int, int, int]:
        """(batch, context, nodes): the sort key of a profile, in which it is unique."""
        return self.batch, self.context, self.nodes


@dataclass(frozen=True)
class LatencyProfile:
    """Seconds per step of one model on one device: measured or modelled points, a curve for each batch and context.

    Args:
        points: at least one, sorted by (batch, context, nodes), each size once; `from_points` sorts.
        provenance: how the seconds were measured: made_by, model, heads, kind, unit, drafter, device, dtype, threads,
            attention, repeats, versions; empty where they were not.

    Raises:
        TreeoptError: E230 where points are missing, repeated or not sorted.
    """

    points: tuple[LatencyPoint, ...]
    provenance: Mapping[str, Any] = field(default_factory=dict, repr=False, hash=False)

    def __post_init__(self) -> None:
        if not self.points:
            raise _invalid("it has no points")
        for i in repeated(self.points):
            raise _invalid(f"{_named(self.points[i].key)} occurs twice")
        keys = [point.key for point in self.points]
        if keys != sorted(keys):
            raise _invalid("points are not sorted by (batch, context, nodes); LatencyProfile.from_points sorts them")

    @classmethod
    def from_points(cls, points: Iterable[LatencyPoint], provenance: Mapping[str, Any] | None = None) -> Self:
        """The profile of these points in any order."""
        return cls(tuple(sorted(points, key=lambda point: point.key)), provenance or {})

    @property
    def kind(self) -> str | None:
        """The kind of the trees whose steps were timed, one of `PROFILE_KINDS`; None where it is not stated."""
        return self.provenance.get("kind")

    @property
    def path_tokens(self) -> bool:
        """Whether sizes are path tokens, of a model that verifies the paths of a tree as a batch."""
        return self.provenance.get("unit") == PATH_TOKENS

    @property
    def drafter(self) -> str | None:
        """Id of the drafter whose steps were timed, empty for the guesses of the heads; None without provenance."""
        return self.provenance.get("drafter", "") if self.provenance else None

    @property
    def batches(self) -> tuple[int, ...]:
        """The batches measured, ascending."""
        return tuple(sorted({point.batch for point in self.points}))

    @property
    def contexts(self) -> tuple[int, ...]:
        """The contexts measured with any batch, ascending, in tokens."""
        return tuple(sorted({point.context for point in self.points}))

    def curve(self, batch: int = 1, context: int | None = None) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """The measured medians of one batch and context.

        Args:
            batch: texts decoded together.
            context: cached tokens; the largest measured with this batch where None.

        Returns:
            Sizes int64 [n] in nodes (root counted), ascending, and seconds float64 [n].

        Raises:
            TreeoptError: E230 where this batch or context was not measured.
        """
        chosen = self._chosen(batch, context)
        return np.array([point.nodes for point in chosen]), np.array([point.seconds for point in chosen])

    def drafting_curve(
        self, batch: int = 1, context: int | None = None
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """The measured medians of drafting alone, with the arguments, results and errors of `curve`.

        Sizes without such a figure are left out; there are none where drafting was not measured.
        """
        chosen = [point for point in self._chosen(batch, context) if point.drafting is not None]
        sizes = np.array([point.nodes for point in chosen], np.int64)
        return sizes, np.array([point.drafting for point in chosen], np.float64)

    def _chosen(self, batch: int, context: int | None) -> list[LatencyPoint]:
        """The points of one batch and context, by size."""
        longest = max((point.context for point in self.points if point.batch == batch), default=None)
        length = longest if context is None else context
        chosen = [point for point in self.points if (point.batch, point.context) == (batch, length)]
        if not chosen:
            pairs = dict.fromkeys(f"batch {point.batch} with context {point.context}" for point in self.points)
            missing = f"batch {batch}" + ("" if length is None else f" with context {length}")
            raise unmeasured(missing, ", ".join(pairs))
        return chosen

    def largest(self, batch: int = 1, context: int | None = None) -> int:
        """The largest size measured with this batch and context; E230 where they were not measured."""
        return int(self.curve(batch, context)[0][-1])


def repeated(points: Sequence[LatencyPoint]) -> list[int]:
    """Indices of the points whose batch, context and nodes an earlier one has already."""
    first: dict[tuple[int, int, int], int] = {}
    return [i for i, point in enumerate(points) if first.setdefault(point.key, i) != i]


def _named(key: tuple[int, int, int]) -> str:
    batch, context, nodes = key
    return f"the point of {counted(nodes, 'node')}, batch {batch}, context {context}"


def _invalid(fault: str) -> TreeoptError:
    return TreeoptError(Code.PROFILE_INVALID, f"not a latency profile: {fault}")


def unmeasured(missing: str, measured: str) -> TreeoptError:
    """E230 for a size, batch or context that a profile does not hold."""
    why = "seconds are interpolated between measured sizes, and not extrapolated"
    what = f"the profile does not hold {missing}; it holds {measured}"
    return TreeoptError(Code.PROFILE_INVALID, what, why=why, fix=_FIX)
