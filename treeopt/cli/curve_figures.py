"""The curve of a calibration, for `treeopt curve` and `treeopt report`."""

from __future__ import annotations

from collections.abc import Sequence

from treeopt.calibration import Calibration
from treeopt.cli.console import Console
from treeopt.defaults import CURVE_LARGEST, DEFAULT_TOP_K, DEFAULT_VALUES, DEFAULT_WEIGHTS, KINDS, MAX_NODES, STEP_SIZES
from treeopt.optimize.curve import Curve, Timing, default_sizes, measure_curve, policy_curve
from treeopt.optimize.select_method import Fitter, Method, candidates
from treeopt.optimize.tree_builder import check_size, tree_limits
from treeopt.progress import late


def measured_curve(
    console: Console,
    calibration: Calibration,
    timing: Timing | None,
    *,
    kind: str = KINDS[0],
    largest: int | None = None,
    methods: Sequence[Method] | None = None,
    top_k: int = DEFAULT_TOP_K,
) -> Curve:
    """The curve up to the largest size that is given, and that of the profile.

    Args:
        console: for progress and warnings.
        calibration: the traces.
        timing: seconds per step; None without a profile.
        kind: of the trees.
        largest: nodes; that of the profile where None, `CURVE_LARGEST` without one.
        methods: of static trees, of which the best is taken; those of the defaults where None.
        top_k: ranks per level of static trees.
    """
    bounds = [] if largest is None else [largest]
    bounds += [min(timing.largest, MAX_NODES)] if timing else []
    most = min(bounds, default=CURVE_LARGEST)
    if kind == KINDS[1]:
        return policy_curve(calibration, default_sizes(min(most, STEP_SIZES[-1])), timing)
    limits = tree_limits(calibration, most, top_k=top_k)
    check_size(limits, calibration.num_heads, "--largest")
    chosen = candidates(DEFAULT_VALUES, DEFAULT_WEIGHTS, refined=False, exactly=False) if methods is None else methods
    with console.progress("curve") as progress:
        fitter = Fitter(calibration, limits, progress=late(progress))
        curve = measure_curve(fitter, fitter.choose(chosen).method, default_sizes(most), timing)
    if not fitter.can_leave_out:
        console.warn("warning: too few different texts for cross-validation; the figures are of the fitted texts")
    return curve
