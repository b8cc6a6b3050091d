"""The figures of a finished tree on texts that were held out of its fit."""

from __future__ import annotations

from dataclasses import dataclass

from treeopt.calibration import Calibration
from treeopt.errors import Code, TreeoptError
from treeopt.optimize.intervals import Interval, by_text, difference_interval, sampling_interval
from treeopt.optimize.methods import MEDUSA
from treeopt.optimize.refine import Limits
from treeopt.optimize.select_method import Fitter
from treeopt.tree import Tree


@dataclass(frozen=True)
class Judgement:
    """Tokens per step on the texts held out, of the tree and of the Medusa tree of the same size and the same fit.

    `dropped` held-out texts were equal to a fitted one. `gain` is the paired interval of the difference. Intervals are
    None below two different texts.
    """

    texts: int
    distinct: int
    dropped: int
    tokens_per_step: float
    interval: Interval | None
    medusa_tokens_per_step: float
    medusa_interval: Interval | None
    gain: Interval | None


def split(calibration: Calibration, last: int) -> tuple[Calibration, Calibration, int]:
    """The fitted sequences, the last ones (held out), and the number of these that equal a fitted text and are dropped.

    Raises:
        TreeoptError: E303 where no text would be left to fit, or to judge.
    """
    texts = calibration.sequences
    if last >= texts:
        what = f"{last} of {texts} texts cannot be held out"
        why = "one text or more must remain to fit"
        raise TreeoptError(Code.PROMPTS_EMPTY, what, at=f"--holdout {last}", why=why, fix="a smaller --holdout")
    fitted = calibration.select(range(texts - last))
    known = set(fitted.token_hashes)
    fresh = [s for s in range(texts - last, texts) if calibration.token_hashes[s] not in known]
    if not fresh:
        what = f"each of the last {last} texts is equal to one of the others"
        raise TreeoptError(Code.PROMPTS_EMPTY, what, at=f"--holdout {last}", fix="calibrate on more different prompts")
    return fitted, calibration.select(fresh), last - len(fresh)


def judge(tree: Tree, fitted: Calibration, aside: Calibration, dropped: int, limits: Limits) -> Judgement:
    """Replay a finished tree, and the Medusa tree fitted to the same texts, over the texts held out."""
    [(_, medusa)] = Fitter(fitted, limits).build([MEDUSA])
    judged = Fitter(aside, limits)
    sums, medusa_sums = judged.sums(tree), judged.sums(medusa)
    by_tree = by_text(aside.token_hashes, sums.tokens, sums.steps)
    by_medusa = by_text(aside.token_hashes, medusa_sums.tokens, medusa_sums.steps)
    return Judgement(
        texts=aside.sequences,
        distinct=aside.distinct,
        dropped=dropped,
        tokens_per_step=sums.tokens_per_step,
        interval=sampling_interval(*by_tree),
        medusa_tokens_per_step=medusa_sums.tokens_per_step,
        medusa_interval=sampling_interval(*by_medusa),
        gain=difference_interval(by_tree[0], by_tree[1], by_medusa[1], by_medusa[0]),
    )
