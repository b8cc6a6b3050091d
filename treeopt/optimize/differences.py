"""Differences between two trees: their paths, and their tokens per step on the same texts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from treeopt.calibration import Calibration
from treeopt.errors import Code, TreeoptError, counted
from treeopt.files.trees import GivenTree, as_tree
from treeopt.optimize.intervals import Interval, by_text, difference_interval
from treeopt.optimize.replay import replay
from treeopt.optimize.sums import TextSums
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

    def __str__(self) -> str:
        """`-0.012 (-0.020 to -0.004, 90 %, 60 texts)`."""
        spread = "too few for an interval" if self.interval is None else f"{self.interval:+.3f}, 90 %"
        return f"{self.difference:+.3f} ({spread}, {counted(self.texts, 'text')})"

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**dataclasses.asdict(self), "difference": self.difference}


@dataclass(frozen=True)
class TreeDifference:
    """The paths that one tree has and the other has not, in runtime order, and the tokens per step of both."""

    first_only: tuple[Path, ...]
    second_only: tuple[Path, ...]
    shared: int
    gain: Gain | None


def compare_trees(first: GivenTree, second: GivenTree, calibration: Calibration | None = None) -> TreeDifference:
    """How two trees differ; with a calibration also in tokens per step, by replay over its traces.

    Raises:
        TreeoptError: E101, E102 and E223 as `replay`; E223 where the trees are of different drafters; E303 where the
            calibration holds no text; as `treeopt.files.trees.as_tree`.
    """
    first, second = as_tree(first), as_tree(second)
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
    return gain_of_sums(calibration.token_hashes, *(replay(tree, calibration).sums for tree in (first, second)))


def gain_of_sums(token_hashes: Sequence[str], first: TextSums, second: TextSums) -> Gain:
    """The gain from tokens and steps of each text by both trees, whose S texts have these hashes."""
    one, other = (by_text(token_hashes, sums.tokens, sums.steps) for sums in (first, second))
    interval = difference_interval(other[0], other[1], one[1], one[0])
    return Gain(first.tokens_per_step, second.tokens_per_step, interval, len(one[0]))
