"""Tokens per step by the number of nodes: from calibrations, or the logarithm of the Medusa paper."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import numpy as np

from treeopt.calibration import Calibration
from treeopt.defaults import DEFAULT_VALUES, DEFAULT_WEIGHTS
from treeopt.drafter import HEADS, KINDS
from treeopt.errors import check_choice, check_counts
from treeopt.optimize.curve import default_sizes, measure_curve, policy_curve
from treeopt.optimize.methods import candidates
from treeopt.optimize.select_method import Fitter
from treeopt.optimize.tree_builder import MAX_NODES, check_size, tree_limits
from treeopt.plan.operators import Floats
from treeopt.policy import STEP_SIZES
from treeopt.progress import Progress, silent
from treeopt.shape import shape_error

PER_LOG = 0.477  # tokens per step for each natural logarithm of nodes: arXiv:2401.10774, appendix G


@dataclass(frozen=True)
class Acceptance:
    """Tokens per step of trees of any size.

    Args:
        name: of the drafter; `logarithm` for the paper's.
        sizes: the sizes with a figure, ascending from 1; empty for 1 + 0.477 ln N.
        tokens: tokens per step of each; between sizes they are interpolated linearly, as in `build --nodes auto`.
        kind: of the trees, one of `KINDS`.
        provenance: entries of a latency profile that belong to the drafter.
        model: the base model of the calibration.

    Raises:
        ValueError: where the kind is unknown.
    """

    name: str = "logarithm"
    sizes: tuple[int, ...] = ()
    tokens: tuple[float, ...] = ()
    kind: str = KINDS[0]
    provenance: tuple[tuple[str, Any], ...] = ()
    model: str = ""

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, KINDS)

    @property
    def largest(self) -> int | None:
        """The largest size with a figure; None for any."""
        return self.sizes[-1] if self.sizes else None

    def at(self, nodes: Floats) -> Floats:
        """float64 [n]: tokens per step at sizes up to `largest`; exactly 1 at one node."""
        if not self.sizes:
            return 1.0 + PER_LOG * np.log(nodes)
        found: Floats = np.interp(nodes, self.sizes, self.tokens)
        return found


def calibrated_acceptance(
    calibration: Calibration, largest: int, *, name: str = "", kind: str = KINDS[0], progress: Progress = silent
) -> Acceptance:
    """Tokens per step by a calibration: the curve of `treeopt curve`, static trees cross-validated.

    Args:
        calibration: the traces of a drafter.
        largest: the largest size.
        name: of the drafter; by default that of its file, or `heads`.
        kind: static trees, or those of each step.
        progress: called after each growth.

    Raises:
        TreeoptError: as `measure_curve` and `policy_curve`.
        ValueError: where the size is out of range, or the kind unknown.
    """
    check_counts(largest=largest)
    check_choice("kind", kind, KINDS)
    source = calibration.provenance
    shown = name or (PurePath(source.drafter).name or source.drafter_id if source.drafter_id else HEADS)
    if kind == KINDS[1]:
        curve = policy_curve(calibration, default_sizes(min(largest, STEP_SIZES[-1])))
    else:
        limits = tree_limits(calibration, min(largest, MAX_NODES))
        check_size(limits, calibration.num_heads, "--nodes")
        fitter = Fitter(calibration, limits, progress=progress)
        method = fitter.choose(candidates(DEFAULT_VALUES, DEFAULT_WEIGHTS, refined=False, exactly=False)).method
        curve = measure_curve(fitter, method, default_sizes(limits.nodes))
    provenance = {
        "heads": source.heads,
        "heads_id": source.heads_id,
        **({"drafter": source.drafter_id} if source.drafter_id else {}),
        "drafter_name": shown,
    }
    points = curve.points
    if points[0].nodes != 1:
        raise shape_error(f"{shown}: the curve does not begin at one node")
    sizes, tokens = tuple(point.nodes for point in points), tuple(point.tokens_per_step for point in points)
    return Acceptance(shown, sizes, tokens, kind, tuple(provenance.items()), source.model)
