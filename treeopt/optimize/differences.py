"""Differences between two trees: their paths, and their tokens per step on the same texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treeopt.calibration import Calibration
from treeopt.errors import Code, TreeoptError
from treeopt.optimize.intervals import Interval, by_text, difference_interval
from treeopt.optimize.replay import replay
from treeopt.tree import Path, Tree


@dataclass(frozen=True)
class Gain:
    """Tokens per step (root counted) of two trees on the same texts.

    `interval` is the paired interval of second - first; None where there are too few texts. `texts` are the different
    ones.
    """

    first: float
    second: float
    interval: Interval | None
    texts: int

    @property
    def difference(self) -> float:
        """second - first."""
        return self.second - self.first


@dataclass(frozen=True)
class TreeDifference:
    """The paths that one tree has and the other has not, in runtime order, and the tokens per step of both."""

    first_only: tuple[Path, ...]
    second_only: tuple[Path, ...]
    shared: int
    gain: Gain | None


def compare_trees(first: Tree, second: Tree, calibration: Calibration | None = None) -> TreeDifference:
    """How two trees differ; with a calibration also in tokens per step, by replay over its traces.

    Raises:
        TreeoptError: E101, E102 and E223 as `replay`; E223 where the trees are of different drafters; E303 where the
            calibration holds no text.
    """
    if first.drafter != second.drafter:
        names = " and ".join(f"drafter {tree.drafter}" if tree.drafter else "the heads" for tree in (first, second))
        what = f"the trees are of {names}: equal ranks are different drafts"
        raise TreeoptError(Code.DRAFTER_MISMATCH, what, fix="treeopt compare measures both on your prompts")
    one, other = set(first.paths), set(second.paths)
    gain = None if calibration is None else replayed_gain(first, second, calibration)
    return TreeDifference(
        tuple(path for path in first.paths if path not in other),
        tuple(path for path in second.paths if path not in one),
        len(one & other),
        gain,
    )


def replayed_gain(first: Tree, second: Tree, calibration: Calibration) -> Gain:
    """Tokens per step of both trees by replay.

    Raises:
        TreeoptError: E101, E102 and E223 as `replay`; E303 where the calibration holds no text.
    """
    if not calibration.positions:
        raise TreeoptError(Code.PROMPTS_EMPTY, "the calibration holds no text")
    steps = [replay(tree, calibration).steps_by_sequence() for tree in (first, second)]
    return gain_of_steps(calibration.token_hashes, np.diff(calibration.offsets), *steps)


def gain_of_steps(token_hashes: Sequence[str], tokens: NDArray[Any], first: NDArray[Any], second: NDArray[Any]) -> Gain:
    """The gain from the tokens and steps of each text.

    Args:
        token_hashes: S strings, one for each text.
        tokens: int64 [S], tokens of each text.
        first: int64 [S], steps of the first tree on each text.
        second: int64 [S], steps of the second.
    """
    summed, one, other = by_text(token_hashes, tokens, first, second)
    interval = difference_interval(summed, other, one)
    return Gain(float(tokens.sum() / first.sum()), float(tokens.sum() / second.sum()), interval, len(summed))
