"""Counts of the successors of short contexts, and the n-gram table from them.

Counts are sparse, by hashed contexts, so memory grows with the text and not with the vocabulary. Counts can be merged.
The estimate is interpolated absolute discounting (Ney, Essen and Kneser 1994): every count of a context is reduced by
`DISCOUNT`, and the share that this frees is distributed as after the context that is one token shorter.
"""

from __future__ import annotations

import dataclasses
import functools
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from treeopt.models.auto_batch import AutoBatch, in_parts
from treeopt.models.base import Base
from treeopt.models.logits import rows_at_once
from treeopt.ngram_table import CONTEXT, NgramTable, context_keys
from treeopt.progress import Progress, silent
from treeopt.runs.work import ALONE, BatchRun, Chunk, pack_rows, unpack_rows
from treeopt.texts.answers import AnswerOptions, Drawn, hidden_states
from treeopt.texts.encode import Text
from treeopt.traces import ArrayRows

DISCOUNT = 0.75
ROW = 16  # successors of a context in the table
MAX_BYTES = 64_000_000  # of the table
_PIECE = 1 << 18  # counted tokens after which equal pairs are joined, or as many as there are pairs, if these are more
_TEXT = 40  # the arrays of one text take as much memory as so many counted tokens, besides its tokens
_CHUNK = 1 << 14  # rows processed at once

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class _Order(ArrayRows):
    """Counts of contexts of one length: pairs of key and successor, ascending, with the key of the shorter context."""

    keys: Ints
    shorter: Ints
    successors: NDArray[np.int32]
    counts: Ints

    @classmethod
    def empty(cls) -> _Order:
        none = np.zeros(0, np.int64)
        return cls(none, none, none.astype(np.int32), none)

    def join(self, others: Sequence[_Order]) -> _Order:
        """These and other counts, with equal pairs added."""
        whole = _Order.joined([self, *others])
        whole = whole.rows(np.lexsort((whole.successors, whole.keys)))
        other = (whole.keys[1:] != whole.keys[:-1]) | (whole.successors[1:] != whole.successors[:-1])
        first = np.flatnonzero(np.r_[True, other][: len(whole.keys)])
        if not len(first):
            return _Order.empty()
        return dataclasses.replace(whole.rows(first), counts=np.add.reduceat(whole.counts, first))


class NgramCounts:
    """Counts of tokens (`unigram` int64 [V]) and of the successors of all contexts of 1 to `CONTEXT` tokens."""

    def __init__(self, vocab_size: int, unigram: Ints | None = None, orders: Sequence[_Order] = ()) -> None:
        self.vocab_size = vocab_size
        self.unigram = np.zeros(vocab_size, np.int64) if unigram is None else unigram
        self._orders = list(orders) or [_Order.empty()] * CONTEXT
        self._waiting: list[list[_Order]] = [[] for _ in range(CONTEXT)]
        self._pending = 0

    def add(self, text: Sequence[int], successors: Sequence[int], *, first: int = 0) -> None:
        """Count one text, after each token from number `first` on the model's greedy choice; the others are context."""
        assert len(text) == len(successors)
        after = np.asarray(successors, np.int64)[first:]
        self.unigram += np.bincount(after, minlength=self.vocab_size)
        context = np.full((len(text), CONTEXT), -1)
        for back in range(CONTEXT):
            context[back:, back] = text[: len(text) - back]
        keys = context_keys(context)
        for order in range(CONTEXT):
            begin = max(first, order)  # earlier contexts would begin before the text
            following = after[begin - first :]
            shorter = keys[begin:, order - 1] if order else np.zeros_like(following)
            new = _Order(keys[begin:, order], shorter, following.astype(np.int32), np.ones_like(following))
            self._waiting[order].append(new)
        self._pending += _TEXT + len(text)
        if self._pending >= max(_PIECE, len(self._orders[-1].keys)):  # a join takes the time of all pairs
            self.joined()

    def merged(self, others: Sequence[NgramCounts]) -> NgramCounts:
        """The sum of these and other counts; it does not depend on their order or grouping."""
        parts = [self, *others]
        assert all(part.vocab_size == self.vocab_size for part in parts)
        unigram = sum((part.unigram for part in parts), np.zeros_like(self.unigram))
        joined = zip(*(part.joined() for part in parts), strict=True)
        return NgramCounts(self.vocab_size, unigram, [orders[0].join(orders[1:]) for orders in joined])

    def table(self, *, max_bytes: int = MAX_BYTES, row: int = ROW) -> NgramTable:
        """The n-gram table of the most frequent contexts, with at most `row` successors of each.

        Row 0 and the tokens' frequencies are stored even where they take more than `max_bytes`.
        """
        row = min(row, self.vocab_size)
        orders = _most_frequent(self.joined(), (max_bytes - 2 * self.vocab_size) // (8 + 6 * row + 2) - 1)
        num_tokens = int(self.unigram.sum())
        frequency = (self.unigram + 1 / self.vocab_size) / (num_tokens + 1)
        prior = np.log(frequency).astype(np.float32)
        top = np.argsort(-frequency, kind="stable")[:row].astype(np.int32)
        rows = _TableRows(np.zeros(1, np.int64), top[None], np.zeros((1, row), np.float32), np.zeros(1, np.float32))
        levels = [rows]
        for order in orders:
            rows = _rows(order, rows, prior, row)
            levels.append(rows)
        whole = _TableRows.joined(levels)
        return NgramTable(
            keys=whole.keys[1:],
            tokens=whole.tokens,
            ratios=whole.ratios.astype(np.float16),
            backoff=whole.backoff.astype(np.float16),
            unigram=prior.astype(np.float16),
            num_tokens=num_tokens,
        )

    def joined(self) -> list[_Order]:
        """The counts of contexts by length, each pair once."""
        for order, waiting in enumerate(self._waiting):
            if waiting:
                self._orders[order] = self._orders[order].join(waiting)
                waiting.clear()
        self._pending = 0
        return self._orders


@dataclass(frozen=True)
class _TableRows(ArrayRows):
    """Rows of an `NgramTable` for the contexts of one length, in float32."""

    keys: Ints
    tokens: NDArray[np.int32]
    ratios: Floats
    backoff: Floats


def _most_frequent(orders: Sequence[_Order], contexts: int) -> list[_Order]:
    """The `contexts` most frequent contexts; the shorter contexts of each are among them."""
    totals = [np.unique(order.keys, return_index=True) for order in orders]
    sums = [
        np.add.reduceat(o.counts, first) if len(first) else o.counts
        for o, (_, first) in zip(orders, totals, strict=True)
    ]
    if sum(map(len, sums)) <= contexts:
        return list(orders)
    # A context is at most as frequent as its shorter context; among equal counts the shorter one is chosen first.
    everything = np.concatenate(sums)
    length = np.repeat(np.arange(len(sums)), [len(one) for one in sums])
    chosen = np.zeros(len(everything), np.bool_)
    chosen[np.lexsort((length, -everything))[: max(contexts, 0)]] = True
    result, start = [], 0
    for order, (keys, _), one in zip(orders, totals, sums, strict=True):
        result.append(order.rows(np.isin(order.keys, keys[chosen[start : start + len(one)]])))
        start += len(one)
    return result


def _rows(order: _Order, above: _TableRows, prior: Floats, width: int) -> _TableRows:
    """The rows of the contexts of one length, from the rows of the shorter contexts."""
    keys, first = np.unique(order.keys, return_index=True)
    ends = np.append(first[1:], len(order.keys))
    total = np.add.reduceat(order.counts, first) if len(first) else first
    parent = np.searchsorted(above.keys, order.shorter[first])
    free = np.log(DISCOUNT * (ends - first) / np.maximum(total, 1)).astype(np.float32)
    tokens = np.empty((len(keys), width), np.int32)
    ratios = np.empty((len(keys), width), np.float32)
    for start in range(0, len(keys), _CHUNK):
        part = slice(start, start + _CHUNK)
        counted = _counted(order, first[part], ends[part], width)
        shorter = above.rows(parent[part])
        tokens[part], ratios[part] = _interpolated(counted, shorter, total[part], free[part], prior)
    return _TableRows(keys, tokens, ratios, (above.backoff[parent] + free).astype(np.float32))


def _counted(order: _Order, first: Ints, ends: Ints, width: int) -> tuple[Ints, Ints]:
    """The most frequent successors of each context by falling count, then by token, or -1; and their counts: [n, W]."""
    lengths = ends - first
    rows = np.repeat(np.arange(len(first)), lengths)
    pairs = np.arange(first[0], ends[-1]) if len(first) else first
    ranked = np.lexsort((order.successors[pairs], -order.counts[pairs], rows))
    place = np.arange(len(pairs)) - np.repeat(first - first[0], lengths) if len(first) else pairs
    inside = place < width
    tokens, counts = np.full((len(first), width), -1), np.zeros((len(first), width), np.int64)
    chosen = pairs[ranked][inside]
    tokens[rows[inside], place[inside]] = order.successors[chosen]
    counts[rows[inside], place[inside]] = order.counts[chosen]
    return tokens, counts


def _interpolated(
    counted: tuple[Ints, Ints], shorter: _TableRows, total: Ints, free: Floats, prior: Floats
) -> tuple[NDArray[np.int32], Floats]:
    """Tokens and ratios [n, W] of the likeliest successors; `free` [n] is the log of what is left to `shorter`."""
    own, counts = counted
    same = own[:, :, None] == shorter.tokens[:, None, :]  # [n, W, W]
    below = np.where(same, shorter.ratios[:, None, :], shorter.backoff[:, None, None]).max(-1) + free[:, None]
    discounted = np.log(np.maximum(counts - DISCOUNT, 1e-9) / total[:, None]) - prior[own]
    with_count = np.where(own < 0, -np.inf, np.logaddexp(discounted, below))
    without_count = np.where(same.any(1), -np.inf, shorter.ratios + free[:, None])
    tokens = np.concatenate([own, shorter.tokens], axis=1)
    ratios = np.concatenate([with_count, without_count], axis=1)
    likely = np.where(np.isinf(ratios), -np.inf, ratios + prior[tokens])
    best = np.argsort(-likely, axis=1, kind="stable")[:, : own.shape[1]]
    return np.take_along_axis(tokens, best, 1).astype(np.int32), np.take_along_axis(ratios, best, 1).astype(np.float32)


def count_drawn(counts: NgramCounts, drawn: Drawn) -> None:
    """Count the choices of a sampled answer, the first of them after the prompt; the prompt itself is only context."""
    context = drawn.text.prompt[-CONTEXT:]
    tokens = [*context, *drawn.text.answer[:-1]]
    first = len(context) - 1
    counts.add(tokens, [0] * first + drawn.choices, first=first)  # successors before the first are not read


def count_texts(
    base: Base,
    texts: Sequence[Text],
    counts: Mapping[str, NgramCounts],
    options: AnswerOptions,
    *,
    run: BatchRun[Chunk] = ALONE,
    progress: Progress = silent,
) -> None:
    """Count the choices after every token of prompts and answers, but the last token of each text.

    Greedy answers are the base's choices, and only the prompts go through the model, equal ones once. `counts` by
    prompt id are those to which a text is added.
    """
    greedy, size = options.greedy, options.batch_size
    alike: dict[bytes, list[Text]] = {}  # by the bytes of their tokens, as a tuple of integers takes tenfold
    for text in texts:
        tokens = text.prompt if greedy else [*text.prompt, *text.answer]
        alike.setdefault(array("i", tokens).tobytes(), []).append(text)
    rows = sorted(alike, key=len)  # similar lengths: little padding
    note = "prompts counted" if greedy else "texts counted"
    progress(0, len(rows), note)
    batches = [rows[start : start + size] for start in range(0, len(rows), size)]
    made = run.each("counted", range(len(batches)), lambda i: _choices(base, batches[i], options.auto_batch), progress)
    done = 0
    for chunk, batch in zip(made, batches, strict=True):
        for row, choices in zip(batch, unpack_rows(chunk), strict=True):
            for text in alike[row]:
                tokens, known = [*text.prompt, *text.answer], text.answer if greedy else []
                counts[text.prompt_id].add(tokens[:-1], [*choices, *known])
        done += len(batch)
        progress(done, len(rows), note)


def _choices(base: Base, rows: Sequence[bytes], auto_batch: AutoBatch | None) -> Chunk:
    """The choices in the rows of one batch, given as bytes, so that only its tokens are integers at once."""
    tokens = [array("i", row).tolist() for row in rows]
    return pack_rows(in_parts(auto_batch, tokens, functools.partial(choices_in, base)))


@torch.inference_mode()
def choices_in(base: Base, rows: Sequence[Sequence[int]]) -> list[list[int]]:
    """The base's greedy choice after each token of each row, but the last token, by one teacher-forced forward."""
    texts = [Text("", list(row[:1]), list(row[1:])) for row in rows]
    size = rows_at_once(base.vocab_size)
    found = []
    for hidden in hidden_states(base, texts):
        parts = [base.lm_logits(part).argmax(-1) for part in torch.split(hidden, size)]
        found.append(torch.cat(parts).tolist())
    return found
