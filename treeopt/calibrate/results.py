"""The result of a calibration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from treeopt.calibration import Calibration
from treeopt.texts.skipped import Skipped

if TYPE_CHECKING:
    from treeopt.drafting.learn import Learned
    from treeopt.files.shards import CalibrationShard
    from treeopt.texts.encode import Text


@dataclass(frozen=True)
class CalibrationRun:
    """The result of `run_calibration`.

    Args:
        calibration: the traces.
        skipped: prompts that were left out.
        answers_cut: number of given answers that were cut at the token budget.
        heads: H; a drafter may have more levels.
        learned: the drafter that was learned; None without `learning`.
        texts: the prompts with their answers.
        part: with `shard`, what `treeopt.files.shards.save_shard` writes.
    """

    calibration: Calibration
    skipped: tuple[Skipped, ...]
    answers_cut: int
    heads: int
    learned: Learned | None = None
    texts: tuple[Text, ...] = ()
    part: CalibrationShard | None = None
