"""A test of the distribution of short texts: those of a decoder against the base's probabilities and stock `generate`.

The first m tokens after a prompt are a text. The likeliest texts are listed with their probabilities, which are
products of the base's distributions, one forward a prefix. The others are counted together by the longest listed prefix
that they begin with. So the cells cover all texts, and their probabilities sum to 1. Two chi-square tests compare the
decoder's counts: with the probabilities, and with the counts of as many texts of stock `generate`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treeopt.evaluate.baselines import TESTED, Baseline, Call
from treeopt.models.base import Base
from treeopt.texts.encode import Text

ALPHA = 1e-4  # of a correct decoder failing one of all tests (Bonferroni)
_LEAST = 10.0  # expected texts of a cell: with many rare cells the tests find less
_LENGTHS = (2, 6)  # tokens of a text, least and most
_WHOLE = 0.5  # texts get longer as long as this probability is in cells of one text
_TOKENS_AT_ONCE = 1 << 14  # of prompts in one forward; limits memory
_ROWS_AT_ONCE = 256

Prefix = tuple[int, ...]
Counts = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Cells:
    """A partition of all texts of a length, or shorter where they end by an end token.

    Args:
        length: m, tokens of a text.
        of_prefix: the cell of each listed prefix: a whole text, or the other texts that begin with it. The empty prefix
            is that of all texts.
        probabilities: float64 [C], of each cell; they sum to 1.
        whole: probability of the cells of one text.
    """

    length: int
    of_prefix: dict[Prefix, int]
    probabilities: NDArray[np.float64]
    whole: float

    def counts(self, texts: Sequence[Sequence[int]]) -> Counts:
        """int64 [C]: the number of texts in each cell."""
        return np.bincount([self._cell(tuple(text)) for text in texts], minlength=len(self.probabilities))

    def _cell(self, text: Prefix) -> int:
        return next(self.of_prefix[text[:n]] for n in range(len(text), -1, -1) if text[:n] in self.of_prefix)


@dataclass(frozen=True)
class DistributionTest:
    """Chi-square tests of the texts of one prompt.

    Args:
        prompt_id: the prompt.
        length: tokens of a text.
        draws: texts of each decoder.
        cells: of the test.
        whole: probability of the cells of one text.
        p_base: p-value of the tree's counts against the base's probabilities.
        p_stock: p-value of the tree's counts against those of stock generate.
        p_control: p-value of the counts of stock generate against the base's probabilities. It is no test of ours.
    """

    prompt_id: str
    length: int
    draws: int
    cells: int
    whole: float
    p_base: float
    p_stock: float
    p_control: float


def adjusted_p(tests: Sequence[DistributionTest]) -> float | None:
    """The least p-value of the tree, times the number of tests, two a prompt (Bonferroni); None without tests."""
    found = [p for one in tests for p in (one.p_base, one.p_stock)]
    return min(1.0, min(found) * len(found)) if found else None


def compare_texts(
    base: Base,
    text: Text,
    score: Callable[[Tensor], Tensor],
    decoders: tuple[Baseline, Baseline],
    draws: int,
    number: int = 0,
) -> DistributionTest:
    """Draw texts of one prompt by two decoders, and test the first one.

    Args:
        base: the base model.
        text: the prompt.
        score: logits [n, V] -> scores whose softmax is sampled from.
        decoders: the one that is tested, and stock `generate`.
        draws: texts of each.
        number: of the test; others have other draws.
    """
    cells = text_cells(base, text.prompt, score, _LEAST / draws)
    first = Call(number, part=TESTED)
    ours, stock = (cells.counts(_drawn(decoder, text.prompt, cells.length, draws, first)) for decoder in decoders)
    return DistributionTest(
        text.prompt_id,
        cells.length,
        draws,
        len(cells.probabilities),
        cells.whole,
        p_of_counts(ours, cells.probabilities),
        p_of_two(ours, stock),
        p_of_counts(stock, cells.probabilities),
    )


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
def text_cells(base: Base, prompt: Sequence[int], score: Callable[[Tensor], Tensor], least: float) -> Cells:
    """The cells of texts after a prompt.

    Args:
        base: the base model.
        prompt: token ids.
        score: logits [n, V] -> scores whose softmax is sampled from.
        least: probability of a cell; less only where all cells together have less.
    """
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

    A rest below `least`, but above 0, is counted with that of the prefix that is one token shorter; what remains at the
    empty prefix, with the least likely cell.
    """
    rest, cell = dict(rest), {prefix: prefix for prefix in rest}
    for prefix in sorted(rest, key=len, reverse=True):
        if prefix and 0 < rest[prefix] < least:  # texts that cannot occur are not counted with others
            rest[prefix[:-1]] += rest.pop(prefix)
            cell[prefix] = prefix[:-1]
    for prefix in sorted(cell, key=len):  # shorter ones are known
        cell[prefix] = cell[cell[prefix]] if cell[prefix] != prefix else prefix
    known = whole | rest
    if 0 < known[()] < least and sum(p > 0 for p in known.values()) > 1:
        smallest = min((prefix for prefix in known if prefix and known[prefix]), key=lambda prefix: known[prefix])
        known[smallest] += known.pop(())
        cell = {prefix: smallest if place == () else place for prefix, place in cell.items()}
    places = {prefix: place for place, prefix in enumerate(known)}
    of_prefix = {prefix: places[place] for prefix, place in (cell | {one: one for one in whole}).items()}
    probabilities = np.array(list(known.values()))
    return Cells(length, of_prefix, probabilities / probabilities.sum(), sum(whole.values()))


def _next(
    base: Base, prompt: Sequence[int], prefixes: Sequence[Prefix], score: Callable[[Tensor], Tensor]
) -> NDArray[np.float64]:
    """float64 [n, V]: the distribution after the prompt and each prefix, all of one length."""
    ids = torch.tensor([[*prompt, *prefix] for prefix in prefixes], device=base.device)
    logits = [
        base.forward(rows, use_cache=False, logits_to_keep=1)[0][:, -1] for rows in torch.split(ids, _rows(len(prompt)))
    ]
    p: NDArray[np.float64] = score(torch.cat(logits)).double().softmax(-1).numpy(force=True)
    return p


def _drawn(decoder: Baseline, prompt: Sequence[int], length: int, draws: int, first: Call) -> list[list[int]]:
    """Texts of one prompt, many in one batch."""
    rows = _rows(len(prompt))
    sizes = [min(rows, draws - done) for done in range(0, draws, rows)]
    return [
        run.tokens
        for repeat, size in enumerate(sizes)
        for run in decoder([list(prompt)] * size, length, first._replace(repeat=repeat))
    ]


def _rows(length: int) -> int:
    """The number of rows of a batch of prompts of this length."""
    return max(1, min(_ROWS_AT_ONCE, _TOKENS_AT_ONCE // max(1, length)))
