"""Validate under sampling: whether texts have the base's distribution, and the predicted tokens per step.

Every prompt is decoded several times by stock `generate`, by our own loop without a tree, and with the tree, with
independent draws. The distribution is tested on short texts: the likeliest are cells with known probabilities, the
others are counted together by the longest listed prefix that they begin with, and chi-square tests compare the counts.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from treeopt.decode.rules import Sample
from treeopt.errors import Code, TreeoptError
from treeopt.evaluate.baselines import (
    AUTOREGRESSIVE,
    GENERATE,
    TESTED,
    TREE,
    Baseline,
    Call,
    autoregressive,
    seeded,
    with_decoder,
    with_generate,
)
from treeopt.evaluate.runs import Inputs, Measured, Runs, decode_all
from treeopt.models.base import Base
from treeopt.optimize.replay import standard_error
from treeopt.progress import Progress
from treeopt.texts.encode import Text
from treeopt.texts.prompts import row_of

ALPHA = 1e-4  # of a correct decoder failing one of all tests (Bonferroni)
_LEAST = 10.0  # expected texts of a cell: with many rare cells the tests find less
_LENGTHS = (2, 6)  # tokens of a text, least and most
_WHOLE = 0.5  # texts get longer as long as this probability is in cells of one text
_TOKENS_AT_ONCE = 1 << 14  # of prompts in one forward; limits memory
_ROWS_AT_ONCE = 256
TESTED_PROMPTS = 4  # prompts whose texts are tested: the shortest, as each is decoded many times
_ROUNDING = 2**-11  # of the traced probabilities, which are float16
Z_LIMIT = 4.0  # of the difference between measured and predicted tokens per step, in standard errors of many prompts
LEAST_DRAFTS = 10  # accepted drafts of a z-score that a warning is based on

Prefix = tuple[int, ...]
Score = Callable[[Tensor], Tensor]  # logits [n, V] to scores whose softmax is sampled from
Counts = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Cells:
    """A partition of all texts of `length` tokens, or fewer where they end by an end token."""

    length: int
    of_prefix: dict[Prefix, int]  # the cell of each listed prefix: a whole text, or the other texts that begin with it
    probabilities: NDArray[np.float64]  # [C], their sum is 1
    whole: float  # probability of the cells of one text

    def counts(self, texts: Sequence[Sequence[int]]) -> Counts:
        """int64 [C]: the number of texts in each cell."""
        listed, prefixes = self.of_prefix, ([tuple(text[:n]) for n in range(len(text), -1, -1)] for text in texts)
        cells = [next(listed[one] for one in some if one in listed) for some in prefixes]
        return np.bincount(cells, minlength=len(self.probabilities))


@dataclass(frozen=True)
class DistributionTest:
    """Chi-square tests of the texts of one prompt, with their p-values."""

    prompt_id: str
    length: int  # tokens of a text
    draws: int  # texts of each decoder
    cells: int
    whole: float  # probability of the cells of one text
    p_base: float  # of the tree's counts against the base's probabilities
    p_stock: float  # of the tree's counts against those of stock generate
    p_control: float  # of the counts of stock generate against the base's probabilities; no test of ours


def adjusted_p(tests: Sequence[DistributionTest]) -> float | None:
    """The least p-value of the tree times the number of tests, two a prompt (Bonferroni); None without tests."""
    found = [p for one in tests for p in (one.p_base, one.p_stock)]
    return min(1.0, min(found) * len(found)) if found else None


def compare_texts(
    base: Base, text: Text, score: Score, decoders: tuple[Baseline, Baseline], draws: int, number: int = 0
) -> DistributionTest:
    """Draw texts of one prompt by two decoders, the one that is tested and stock `generate`, and test the first one.

    Tests of other numbers have other draws.
    """
    cells = text_cells(base, text.prompt, score, _LEAST / draws)
    first = Call(number, part=TESTED)
    ours, stock = (cells.counts(_drawn(decoder, text.prompt, cells.length, draws, first)) for decoder in decoders)
    p_base, p_control = (p_of_counts(counts, cells.probabilities) for counts in (ours, stock))
    what = text.prompt_id, cells.length, draws, len(cells.probabilities), cells.whole
    return DistributionTest(*what, p_base, p_of_two(ours, stock), p_control)


def p_of_counts(counts: Counts, probabilities: NDArray[np.float64]) -> float:
    """p-value of Pearson's chi-square test; 0 where a text was drawn whose probability is 0."""
    from scipy import stats

    if counts[probabilities == 0].any():
        return 0.0
    possible = probabilities > 0
    if possible.sum() < 2:
        return 1.0
    return float(stats.chisquare(counts[possible], probabilities[possible] * counts.sum()).pvalue)


def p_of_two(counts: Counts, others: Counts) -> float:
    """p-value of the chi-square test that two samples have one distribution."""
    from scipy import stats

    table = np.stack([counts, others])
    table = table[:, table.sum(0) > 0]
    return float(stats.chi2_contingency(table, correction=False).pvalue) if table.shape[1] > 1 else 1.0


@torch.inference_mode()
def text_cells(base: Base, prompt: Sequence[int], score: Score, least: float) -> Cells:
    """The cells of texts after a prompt, of at least the probability `least`, if all cells together have as much."""
    rest: dict[Prefix, float] = {}  # listed prefixes that do not end a text -> probability of their other texts
    ended: dict[Prefix, float] = {}
    ongoing: dict[Prefix, float] = {(): 1.0}
    room = base.context - len(prompt)
    length = 0
    while ongoing and length < min(_LENGTHS[1], room):
        p = _next(base, prompt, list(ongoing), score) * np.array(list(ongoing.values()))[:, None]
        listed = p >= least
        children = {
            (*prefix, int(token)): float(p[row, token])
            for row, prefix in enumerate(ongoing)
            for token in np.flatnonzero(listed[row])
        }
        if length >= _LENGTHS[0] and sum(children.values()) + sum(ended.values()) < _WHOLE:
            break
        rest |= dict(zip(ongoing, np.where(listed, 0, p).sum(1).tolist(), strict=True))
        ended |= {prefix: one for prefix, one in children.items() if prefix[-1] in base.eos_ids}
        ongoing = {prefix: one for prefix, one in children.items() if prefix not in ended}
        length += 1
    return _merged(length, ongoing | ended, rest, least)


def _merged(length: int, whole: dict[Prefix, float], rest: dict[Prefix, float], least: float) -> Cells:
    """The cells of whole texts and of the rests of prefixes.

    A rest below `least` is counted with that of the prefix that is a token shorter, that of the empty one with the
    least likely cell.
    """
    known = whole | rest
    for prefix in sorted(rest, key=len, reverse=True):
        if prefix and 0 < known[prefix] < least:  # texts that cannot occur are not counted with others
            known[prefix[:-1]] += known.pop(prefix)
    smallest: Prefix = ()
    if 0 < known[()] < least and sum(p > 0 for p in known.values()) > 1:
        smallest = min((prefix for prefix in known if prefix and known[prefix]), key=lambda prefix: known[prefix])
        known[smallest] += known.pop(())
    of_prefix = {prefix: place for place, prefix in enumerate(known)}
    of_prefix[()] = of_prefix[smallest]
    probabilities = np.array(list(known.values()))
    return Cells(length, of_prefix, probabilities / probabilities.sum(), sum(whole.values()))


def _next(base: Base, prompt: Sequence[int], prefixes: Sequence[Prefix], score: Score) -> NDArray[np.float64]:
    """float64 [n, V]: the distribution after the prompt and each prefix, all of one length."""
    ids = torch.tensor([[*prompt, *prefix] for prefix in prefixes], device=base.device)
    logits = [
        base.forward(rows, use_cache=False, logits_to_keep=1)[0][:, -1] for rows in torch.split(ids, _rows(len(prompt)))
    ]
    return score(torch.cat(logits)).double().softmax(-1).numpy(force=True)


def _drawn(decoder: Baseline, prompt: Sequence[int], length: int, draws: int, first: Call) -> list[list[int]]:
    rows = _rows(len(prompt))
    sizes = [min(rows, draws - done) for done in range(0, draws, rows)]
    return [
        run.tokens
        for repeat, size in enumerate(sizes)
        for run in decoder([list(prompt)] * size, length, first._replace(repeat=repeat))
    ]


def _rows(length: int) -> int:
    return max(1, min(_ROWS_AT_ONCE, _TOKENS_AT_ONCE // max(1, length)))


@dataclass(frozen=True)
class SampleValidation(Measured):
    """The results of a validation under sampling. Its trials are the texts of all repeats."""

    rule: Sample  # temperature, top-k, top-p and seed; no seed is seed 0
    # of the measured tokens per step, clustered by prompt; None with fewer than two prompts
    measured_standard_error: float | None
    predicted_standard_error: float | None  # the same of the predicted tokens per step
    # (measured - predicted) / standard error of the difference, clustered by prompt; None where there is no standard
    # error
    z_score: float | None
    tests: tuple[DistributionTest, ...]  # of the distribution of texts, one a prompt

    @property
    def lossless(self) -> bool | None:
        """Whether no test found another distribution than the base's: `p_value` >= `ALPHA`; None without tests."""
        return None if self.p_value is None else self.p_value >= ALPHA

    @property
    def p_value(self) -> float | None:
        return adjusted_p(self.tests)

    @property
    def as_predicted(self) -> bool:
        """Whether the z-score is at most as rare as `Z_LIMIT` of a normal distribution, or says nothing.

        With a standard error from n prompts it has Student's distribution; with few accepted drafts none, and it says
        nothing.
        """
        from scipy import stats

        if self.z_score is None or self.few_drafts:
            return True
        prompts = len({text.dialogue for text in self.texts})
        return abs(self.z_score) <= float(stats.t.isf(stats.norm.sf(Z_LIMIT), prompts - 1))

    def check(self, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        """Raise E501 with the prompts whose texts have another distribution."""
        if self.lossless is not False:
            return
        limit = ALPHA / (2 * len(self.tests))
        wrong = [one for one in self.tests if min(one.p_base, one.p_stock) < limit]
        raise TreeoptError(
            Code.NOT_LOSSLESS,
            f"the texts of {len(wrong)} of {len(self.tests)} prompts do not have the distribution of the base model",
            at="\n".join(
                f"{row_of(one.prompt_id)}: p {one.p_base:.3g} against base, {one.p_stock:.3g} against stock generate"
                for one in wrong
            ),
            why=f"sampled texts must have the distribution of autoregressive sampling (limit of a p-value {limit:.3g})",
            fix="repeat with --dtype float32" if self.made_by["dtype"] != "float32" else "",
        )

    @property
    def few_drafts(self) -> bool:
        """Whether fewer than `LEAST_DRAFTS` were accepted, and fewer are expected by the prediction."""
        sums = self.predicted.sums
        expected = float(sums.tokens.sum() - sums.steps.sum())
        return max(self.metrics.tokens - self.metrics.steps, expected) < LEAST_DRAFTS


def validate_sample(inputs: Inputs, rule: Sample, progress: Progress) -> SampleValidation | None:
    """Decode every prompt `repeats` times with independent draws, predict the steps, and test the distribution."""
    base, options = inputs.base, inputs.options
    rule = dataclasses.replace(rule, seed=rule.seed or 0)
    unseeded = dataclasses.replace(rule, seed=None)
    runs_by_name = {
        GENERATE: with_generate(base, temperature=rule.temperature, top_k=rule.top_k, top_p=rule.top_p),
        AUTOREGRESSIVE: autoregressive(base, unseeded),
        TREE: with_decoder(inputs.decoder(unseeded)),
    }
    baselines = {name: seeded(base, run, rule.seed or 0, name) for name, run in runs_by_name.items()}
    once = dataclasses.replace(options, repeats=1)
    parts = [
        decode_all(baselines, base, inputs.texts, once, progress, first_repeat=repeat, content=inputs.content)
        for repeat in range(options.repeats)
    ]
    skipped = {skip.prompt_id: skip for one in parts for skip in one.skipped}
    runs = Runs(tuple(trial for one in parts for trial in one.trials), tuple(skipped.values()), parts[0].left_out)
    shortest = sorted(inputs.texts, key=lambda text: (len(text.prompt), text.prompt_id))[:TESTED_PROMPTS]
    decoders = baselines[TREE], baselines[GENERATE]

    def tested(number: int) -> dict[str, Any]:
        return vars(compare_texts(base, shortest[number], rule.scores, decoders, options.draws, number))

    tests = options.division.each("tests", range(len(shortest) if options.draws else 0), tested)
    if options.division.follows:
        return None
    found = [DistributionTest(**test) for test in tests if test["cells"] > 1]  # one cell, of few draws, tests nothing
    return _compare(inputs, rule, runs, found)


def _compare(inputs: Inputs, rule: Sample, runs: Runs, tests: Sequence[DistributionTest]) -> SampleValidation:
    texts = [dataclasses.replace(text, prompt_id=f"{i:08}") for i, text in enumerate(runs.texts)]  # ids are unique
    found = inputs.measured(runs, inputs.traces(texts, rule.scores))
    _, clusters = np.unique([text.dialogue for text in runs.texts], return_inverse=True)
    trials, predicted = runs.trials, found["predicted"].sums
    columns = ([one.tokens for one in trials], [one.steps for one in trials], predicted.tokens, predicted.steps)
    tokens, steps, *others = (np.bincount(clusters, weights=one).astype(np.float64) for one in columns)
    return SampleValidation(
        **found,
        rule=rule,
        measured_standard_error=standard_error(tokens, steps),
        predicted_standard_error=standard_error(*others),
        z_score=z_score((tokens, steps), (others[0], others[1])),
        tests=tuple(tests),
    )


def z_score(one: tuple[Floats, Floats], other: tuple[Floats, Floats]) -> float | None:
    """The difference of two ratios of sums over the same prompts, in standard errors; None where there is none.

    Each is given by float64 [S] numerators and denominators. The variance of choosing the prompts cancels: it is that
    of the difference of the linearised estimators, (numerator - ratio * denominator) / sum of denominators.
    """
    first, second = (numerators.sum() / denominators.sum() for numerators, denominators in (one, other))
    share = (one[0] - first * one[1]) / one[1].sum() - (other[0] - second * other[1]) / other[1].sum()
    error = standard_error(share, np.ones(len(share)))
    return None if error is None else float((first - second) / np.hypot(error * len(share), _ROUNDING * second))
