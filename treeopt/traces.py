"""The arrays of traces: one row for each decode position of the texts, one column for each head or level."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from treeopt.defaults import STEP_SIZES

MISS = 254  # the true token's rank is K or more
NONE = 255  # there is no true token: the position is past the end of the text
MAX_RANKS = 253  # the greatest K of a calibration
TARGET_RANKS = 32  # candidates of each level whose target probability is traced

Ranks = NDArray[np.uint8]
_BLOCK = 1 << 16  # positions checked at once: the checks' arrays take more bytes a position than the traces
_ROUNDING = 0.01  # of a sum of float16 numbers that is 1
T = TypeVar("T", "StepTraces", "TargetTraces")


class ArrayRows:
    """A record whose fields are all arrays with as many rows, or None."""

    def rows(self, chosen: slice | NDArray[Any]) -> Self:
        """These rows."""
        return type(self)(*(array if array is None else array[chosen] for array in vars(self).values()))

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """The rows of all parts, in order."""
        arrays = zip(*(vars(part).values() for part in parts), strict=True)
        return cls(*(None if array[0] is None else np.concatenate(array) for array in arrays))


@dataclass(frozen=True, eq=False)
class StepTraces(ArrayRows):
    """Traces of per-step trees: one row for each position, as in `Calibration`.

    Args:
        node_rank: uint8 [P, H]; `node_rank[i, h-1]` is the index of the true path of h drafts among the nodes of
            step i's tree, sorted by probability; the root has 0. `MISS` for larger indices than the traced ones,
            `NONE` past the end of the text.
        expected_tokens: float32 [P, len(STEP_SIZES)], estimated tokens of a step whose tree has that many nodes.
        confidence: float16 [P, H], estimated probability of the token of rank 0.
        path_accepted: int8 [P, len(STEP_SIZES)], accepted drafts of a step whose tree has at most that many path
            tokens, leaves * (depth + 1). None where the base verifies trees by a mask, as `path_expected`.
        path_expected: float32 [P, len(STEP_SIZES)], estimated tokens of that step.
    """

    node_rank: Ranks
    expected_tokens: NDArray[np.float32]
    confidence: NDArray[np.float16]
    path_accepted: NDArray[np.int8] | None = None
    path_expected: NDArray[np.float32] | None = None

    def fault(self, ranks: Ranks) -> str:
        """What makes this no trace beside these ranks; empty where nothing does."""
        shapes = {"node_rank": ranks.shape, "confidence": ranks.shape, "expected_tokens": (len(ranks), len(STEP_SIZES))}
        if self.path_accepted is not None or self.path_expected is not None:
            shapes |= dict.fromkeys(("path_accepted", "path_expected"), shapes["expected_tokens"])
        for name, shape in shapes.items():
            if (found := np.shape(getattr(self, name))) != shape:
                return f"{name} are {list(found)}, not {list(shape)}"
        none = "node_rank is not uint8 with NONE exactly past the end of a text"
        if self.node_rank.dtype != np.uint8:
            return none
        for rows in blocks(len(ranks)):
            part = self.rows(rows)
            if not np.array_equal(part.node_rank == NONE, ranks[rows] == NONE):
                return none
            if np.any(part.node_rank[:, 1:] < part.node_rank[:, :-1]):
                return "a path precedes its own prefix in a per-step tree"
            estimates = part.expected_tokens, part.confidence, part.path_expected
            if not all(np.isfinite(one).all() for one in estimates if one is not None):
                return "an estimate is not finite"
            left = (ranks[rows] != NONE).sum(1)[:, None]
            accepted = part.path_accepted
            if accepted is not None and not (
                accepted.dtype == np.int8 and ((accepted >= 0) & (accepted <= left)).all()
            ):
                return "path_accepted is not int8 from 0 to the drafts that a text has left"
        return ""


@dataclass(frozen=True, eq=False)
class TargetTraces(ArrayRows):
    """The target's probabilities of a drafter's candidates after the true tokens, for texts that were sampled from it.

    With them the tokens of a step under sampling are a sum of probabilities, with the same mean as the count of
    accepted drafts and a smaller variance (`treeopt.optimize.replay`).

    Args:
        probability: float16 [P, H, R]; `probability[i, h-1, r]` is the target's probability, after g[i+h-1], of the
            candidate of rank r at level h; 0 where there is no such candidate, and past the end of the text.
        places: uint8 [P, H, R], the index of that candidate among the nodes of step i's tree, as
            `StepTraces.node_rank`; `MISS` where it is none of the traced ones. None without traces of per-step trees.
    """

    probability: NDArray[np.float16]
    places: Ranks | None = None

    @property
    def ranks(self) -> int:
        """R, the number of candidates of a level."""
        return int(self.probability.shape[2])

    def fault(self, ranks: Ranks, steps: StepTraces | None) -> str:
        """What makes this no trace beside these ranks and per-step trees; empty where nothing does."""
        known = self.probability
        if known.dtype != np.float16 or known.ndim != 3 or known.shape[:2] != ranks.shape or not known.shape[2]:
            return f"target probabilities are {known.dtype} {list(known.shape)}, not float16 [P, H, R]"
        if (self.places is None) != (steps is None):
            return "places of candidates and traces of per-step trees belong together"
        if self.places is not None and (self.places.dtype != np.uint8 or self.places.shape != known.shape):
            return f"places are {self.places.dtype} {list(self.places.shape)}, not uint8 {list(known.shape)}"
        parts = ((rows, None if steps is None else steps.node_rank[rows]) for rows in blocks(len(ranks)))
        faults = (_values_fault(self.rows(rows), ranks[rows], nodes) for rows, nodes in parts)
        return next(filter(None, faults), "")


def _values_fault(traces: TargetTraces, ranks: Ranks, node_rank: Ranks | None) -> str:
    """What makes values of the right shapes no trace beside these ranks; empty where nothing does."""
    known = traces.probability
    total = known.sum(axis=2, dtype=np.float32)
    if not ((known >= 0).all() and (total <= 1 + _ROUNDING).all()):  # NaN is neither
        return "target probabilities are not from 0 to 1 in sum"
    if total[ranks == NONE].any():
        return "there are target probabilities past the end of a text"
    if traces.places is None or node_rank is None:
        return ""
    row, level = np.nonzero(ranks < traces.ranks)
    if not np.array_equal(traces.places[row, level, ranks[row, level]], node_rank[row, level]):
        return "places of the true tokens are not those of their nodes"
    return ""


def blocks(positions: int) -> Iterator[slice]:
    """Slices of `_BLOCK` positions, one after another, that cover all of them."""
    return (slice(start, start + _BLOCK) for start in range(0, positions, _BLOCK))


def joined(parts: Sequence[T | None]) -> T | None:
    """The rows of all parts; None where no part has traces."""
    known = [part for part in parts if part is not None]
    assert len(known) in (0, len(parts))
    return known[0].joined(known) if len(known) > 1 else next(iter(known), None)
