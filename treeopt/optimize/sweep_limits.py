"""Checks that sweeps share: sizes that the traces hold, and enough texts to leave some out of a fit."""

from __future__ import annotations

from collections.abc import Sequence

from treeopt.calibration import Calibration
from treeopt.errors import Code, TreeoptError, check_counts
from treeopt.optimize.grow import Growth
from treeopt.optimize.refine import Limits
from treeopt.optimize.select_method import FOLDS


def check_sizes(sizes: Sequence[int]) -> None:
    """Raise ValueError unless there are sizes, whole numbers of nodes from 1."""
    if not sizes:
        raise ValueError("no sizes: give the nodes of one tree or more")
    for size in sizes:
        check_counts(nodes=size)


def check_reached(growth: Growth, sizes: Sequence[int], calibration: Calibration, limits: Limits) -> None:
    """Raise E102 where a size (nodes, root counted) is beyond the largest tree that the traces hold."""
    reached = len(growth.values) + 1
    beyond = [size for size in sizes if size > reached]
    if beyond:
        raise TreeoptError(
            Code.RANK_TOO_LARGE,
            f"there is no tree of {max(beyond)} nodes in these traces",
            at=f"--nodes {max(beyond)}",
            why=f"{calibration.num_heads} levels of {limits.top_k} ranks hold {reached} nodes with a value above 0",
            fix=f"--nodes {reached} or fewer, or treeopt calibrate on more prompts",
        )


def check_folds(calibration: Calibration) -> None:
    """Raise E303 where there are too few different texts to judge trees on texts left out of their fit."""
    check_texts(calibration, FOLDS, "sweeps judge trees on texts that were left out of their fit")


def check_texts(calibration: Calibration, fewest: int, why: str) -> None:
    """Raise E303 where there are fewer different texts than a sweep needs."""
    if calibration.distinct < fewest:
        count = calibration.distinct
        what = f"the calibration holds {count} different text{'s' if count != 1 else ''}, and {fewest} are needed"
        raise TreeoptError(Code.PROMPTS_EMPTY, what, why=why, fix="treeopt calibrate on more prompts")
