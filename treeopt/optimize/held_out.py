"""Judge: what a finished tree does on texts that had no part in making it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from treeopt.calibration import Calibration
from treeopt.errors import Code, TreeoptError
from treeopt.optimize.intervals import Interval, by_text, difference_interval, sampling_interval
from treeopt.optimize.methods import MEDUSA
from treeopt.optimize.refine import Limits
from treeopt.optimize.select_method import Fitter
from treeopt.tree import Tree


@dataclass(frozen=True)
class Judgement:
    """Tokens per step on the texts set aside, of the tree and of the paper's of the same size and the same fit.

    `dropped` texts stood among the fitted ones too; `gain` is the paired interval of the difference. Intervals are None
    below two different texts.
    """

    texts: int
    distinct: int
    dropped: int
    tokens_per_step: float
    interval: Interval | None
    paper_tokens_per_step: float
    paper_interval: Interval | None
    gain: Interval | None


def split(calibration: Calibration, last: int) -> tuple[Calibration, Calibration, int]:
    """All but the last sequences, the last ones without those whose text stands among the others, and their number.

    Raises:
        TreeoptError: E303 where nothing would be left to fit or to judge by.
    """
    texts = calibration.sequences
    if last >= texts:
        what = f"{last} texts cannot be set aside of {texts}"
        raise TreeoptError(Code.PROMPTS_EMPTY, what, at=f"--holdout {last}", why="some must remain to fit")
    fitted = calibration.select(range(texts - last))
    known = set(fitted.token_hashes)
    fresh = [s for s in range(texts - last, texts) if calibration.token_hashes[s] not in known]
    if not fresh:
        what = f"each of the last {last} texts stands among the others too"
        raise TreeoptError(Code.PROMPTS_EMPTY, what, at=f"--holdout {last}", fix="calibrate on more different prompts")
    return fitted, calibration.select(fresh), last - len(fresh)


def judge(tree: Tree, fitted: Calibration, aside: Calibration, dropped: int, limits: Limits) -> Judgement:
    """Replay a finished tree, and the Medusa tree fitted to the same texts, over the texts set aside."""
    [(_, paper)] = Fitter(fitted, limits).build([MEDUSA])
    judged = Fitter(aside, limits)
    tokens, steps, paper_steps = np.diff(aside.offsets), judged.steps(tree), judged.steps(paper)
    by_tree = by_text(aside.token_hashes, tokens, steps)
    by_paper = by_text(aside.token_hashes, tokens, paper_steps)
    return Judgement(
        texts=aside.sequences,
        distinct=aside.distinct,
        dropped=dropped,
        tokens_per_step=float(tokens.sum() / steps.sum()),
        interval=sampling_interval(*by_tree),
        paper_tokens_per_step=float(tokens.sum() / paper_steps.sum()),
        paper_interval=sampling_interval(*by_paper),
        gain=difference_interval(by_tree[0], by_tree[1], by_paper[1]),
    )
