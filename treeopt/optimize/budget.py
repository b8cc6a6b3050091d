"""Budget: tokens per second by the number of nodes.

A larger tree yields more tokens per step and takes more seconds per step, so tokens per second has a maximum:

    tokens per second at N nodes = tau(N) / t(N)
    overhead = t(N) / t(1), speedup = tau(N) / overhead        t(1): one node, without heads

tau(N) comes from replay, t(N) from a latency profile. Source: arXiv:2401.10774, section 2.3.3 and appendix G.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treeopt.calibration import Calibration
from treeopt.defaults import CHAIN, HEADS, ONE_NODE
from treeopt.errors import Code, TreeoptError, counted
from treeopt.latency import LatencyProfile, unmeasured
from treeopt.optimize.trie import Floats
from treeopt.optimize.values import isotonic
from treeopt.tree import Tree

LEAST_GAIN = 0.02  # of tokens per second, with which drafting pays


@dataclass(frozen=True)
class Budget:
    """Expected figures of the best tree of `nodes` nodes (root counted), or path tokens, on one machine."""

    nodes: int
    tokens_per_step: float  # tau(N)
    seconds: float  # t(N), of one step, drafting included
    overhead: float  # t(N) / t(1)
    speedup: float  # tau(N) / overhead: tokens per second with the tree ÷ autoregressive tokens per second

    @classmethod
    def of(cls, nodes: int, tokens_per_step: float, seconds: float, alone: float) -> Budget:
        """The figures of steps of these seconds, where one of one node takes `alone`."""
        return cls(nodes, tokens_per_step, seconds, seconds / alone, tokens_per_step / (seconds / alone))

    @property
    def tokens_per_second(self) -> float:
        """tau(N) / t(N), of one text of the batch."""
        return self.tokens_per_step / self.seconds


def check_priced(profile: LatencyProfile, calibration: Calibration, kind: str) -> None:
    """Raise E223 where a profile is of another drafter than a calibration, E230 where it is of another kind of trees.

    A profile without provenance (points that were made by hand) is not compared.
    """
    if profile.kind is None:
        return
    source = calibration.provenance
    if profile.drafter != source.drafter_id:
        what = f"the profile is of drafter {profile.drafter or HEADS}, the calibration of {source.drafter_id or HEADS}"
        code, why = Code.DRAFTER_MISMATCH, "drafting is a part of each timed step"
    elif profile.kind != kind:
        of = "chains" if profile.kind == CHAIN else f"{profile.kind} trees"
        what = f"the profile is of {of}, and the trees to build are {kind}"
        code, why = Code.PROFILE_INVALID, "static and per-step trees of one size take different times to draft"
    else:
        return
    raise TreeoptError(code, what, why=why, fix=profile_command(calibration, kind))


def profile_command(calibration: Calibration, kind: str) -> str:
    """The command that measures the steps of trees of a kind, for the drafter of a calibration."""
    source = calibration.provenance
    model = f"--heads {source.heads}" if source.heads else f"--model {source.model}"
    drafter = f" --drafter {source.drafter or 'FILE'}" if source.drafter_id else ""
    return f"treeopt profile {model}{drafter} --kind {kind} -o {kind}.profile.yaml"


def size_of(tree: Tree, profile: LatencyProfile) -> int:
    """The size of a tree in the unit of a profile."""
    return tree.path_tokens if profile.path_tokens else tree.nodes


def step_seconds(profile: LatencyProfile, nodes: int, batch: int = 1, context: int | None = None) -> float:
    """Seconds of a step of any size between the smallest and the largest measured one; E230 elsewhere.

    A shorter time of a larger tree is noise: the medians are made non-decreasing, then interpolated linearly.
    """
    sizes, medians = profile.curve(batch, context)
    if not sizes[0] <= nodes <= sizes[-1]:
        raise unmeasured(f"a tree of {counted(nodes, 'node')}", f"sizes from {sizes[0]} to {sizes[-1]} nodes")
    return float(np.interp(nodes, sizes, isotonic(medians)))


def drafting_seconds(
    profile: LatencyProfile, sizes: NDArray[np.int64], batch: int = 1, context: int | None = None
) -> Floats:
    """Seconds of drafting alone at each size: float64 [n]; zeros where it was not measured."""
    known, medians = profile.drafting_curve(batch, context)
    return np.interp(sizes, known, isotonic(medians)) if len(known) else np.zeros(len(sizes))


def fastest(speedups: Sequence[float] | Floats, *, equal: float = 0.0) -> int | None:
    """The index of the greatest speedup of plans that draft, the simplest first; None where plain decoding is as fast.

    That is where none is at least 1 + `LEAST_GAIN`: measured steps vary by as much. Plans that are slower by the share
    `equal` of the greatest speedup are equally fast, and the first of them is taken.
    """
    least = 1 + LEAST_GAIN
    if not len(speedups) or max(speedups) < least:
        return None
    return int(np.argmax(np.asarray(speedups) >= max((1 - equal) * max(speedups), least)))


def budget_at(
    expected: Floats, profile: LatencyProfile, nodes: int, batch: int = 1, context: int | None = None
) -> Budget:
    """The figures of one size, from tokens per step of the best tree with 1, 2, ... M nodes, float64 [M]."""
    assert 1 <= nodes <= len(expected), f"{nodes} nodes, but tokens per step are known up to {len(expected)}"
    seconds, alone = (step_seconds(profile, size, batch, context) for size in (nodes, ONE_NODE))
    return Budget.of(nodes, float(expected[nodes - 1]), seconds, alone)


def best_budget(
    expected: Floats,
    profile: LatencyProfile,
    batch: int = 1,
    context: int | None = None,
    *,
    allows: Callable[[int], bool] = lambda nodes: True,
) -> Budget:
    """The size with the most tokens per second by `fastest`, of those known, measured and allowed.

    It is 1 where none is faster.
    """
    alone = step_seconds(profile, ONE_NODE, batch, context)  # E230 where it was not measured
    sizes, medians = profile.curve(batch, context)
    largest = min(len(expected), int(sizes[-1]))
    seconds = np.interp(np.arange(1, largest + 1), sizes, isotonic(medians))
    allowed = [allows(size) for size in range(1, largest + 1)]
    best = fastest(np.where(allowed, expected[:largest] * alone / seconds, 0.0)[ONE_NODE:])
    return budget_at(expected, profile, ONE_NODE if best is None else best + ONE_NODE + 1, batch, context)
