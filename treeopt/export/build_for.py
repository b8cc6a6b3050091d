"""Trees built under the limits of an engine, and what the limits cost."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from treeopt.calibration import Calibration
from treeopt.export.lint import DRAFT_ROWS, Finding, lint_tree
from treeopt.optimize.build_job import Built, Job, run_job
from treeopt.optimize.differences import Gain, gain_of_sums, replayed_gain
from treeopt.progress import Progress, silent


@dataclass(frozen=True)
class Constrained:
    """A tree built under limits.

    Args:
        built: the tree.
        gain: from the tree without the limits to this tree, in tokens per step; None for several tasks.
        cross_validated: whether `gain` is from texts left out of the fit; else it is from the fitted texts.
        findings: rules of the engine that the tree still breaks.
    """

    built: Built
    gain: Gain | None
    cross_validated: bool
    findings: tuple[Finding, ...]


def build_for(calibrations: Sequence[Calibration], job: Job, *, progress: Progress = silent) -> Constrained:
    """Build the tree of a job that has limits for an engine, and the tree of the same size without them.

    EAGLE-1 misreads some trees of three levels and more (`draft-rows`). For it the tree is built again with one level
    less until it is read rightly.

    Raises:
        TreeoptError, ValueError: as `run_job`.
    """
    built = run_job(calibrations, job, progress=progress)
    findings = lint_tree(built.tree, job.engine) if job.engine else []
    while any(finding.rule == DRAFT_ROWS for finding in findings):
        flatter = dataclasses.replace(job, max_depth=built.tree.depth - 1)
        built = run_job(calibrations, flatter, progress=progress)
        findings = lint_tree(built.tree, job.engine)
    if len(calibrations) > 1:
        return Constrained(built, None, False, tuple(findings))
    return Constrained(built, *_loss(calibrations, job, built, progress), tuple(findings))


def _loss(calibrations: Sequence[Calibration], job: Job, built: Built, progress: Progress) -> tuple[Gain, bool]:
    """The gain over the tree of the same size without the limits, and whether it is cross-validated."""
    same_size = dataclasses.replace(job.unconstrained, nodes=built.budget)
    free = run_job(calibrations, same_size, progress=progress)
    fitted = built.fitted
    if free.fit.sums is None or built.fit.sums is None:
        return replayed_gain(free.tree, built.tree, fitted), False
    return gain_of_sums(fitted.token_hashes, free.fit.sums, built.fit.sums), True
