"""Learn transitions: count what follows every short context, and keep the likeliest successors of the most frequent.

Counts are sparse and of hashed contexts, so memory grows with the text, not with the vocabulary; they take text piece
by piece, and add up. The estimate is interpolated absolute discounting (Ney, Essen and Kneser 1994): a context's own
counts, each less `DISCOUNT`, and what that sets free goes to the context that is one token shorter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treeopt.drafter import CONTEXT, NgramTable, context_keys

DISCOUNT = 0.75
ROW = 16  # successors kept of a context
MAX_BYTES = 64_000_000
_PIECE = 1 << 22  # counted tokens between two times that equal ones are joined
_CHUNK = 1 << 14  # rows worked on at once

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class _Order:
    """Counts of contexts of one length: pairs of key and successor, ascending, with the key one token shorter."""

    keys: Ints
    shorter: Ints
    successors: NDArray[np.int32]
    counts: Ints

    @classmethod
    def empty(cls) -> _Order:
        none = np.zeros(0, np.int64)
        return cls(none, none, none.astype(np.int32), none)

    def join(self, others: Sequence[_Order]) -> _Order:
        """All together, equal pairs added up."""
        parts = [self, *others]
        keys, shorter, successors, counts = (
            np.concatenate([getattr(part, name) for part in parts])
            for name in ("keys", "shorter", "successors", "counts")
        )
        order = np.lexsort((successors, keys))
        keys, successors = keys[order], successors[order]
        first = np.flatnonzero(np.r_[True, (keys[1:] != keys[:-1]) | (successors[1:] != successors[:-1])][: len(keys)])
        if not len(first):
            return _Order.empty()
        return _Order(keys[first], shorter[order][first], successors[first], np.add.reduceat(counts[order], first))


class NgramCounts:
    """What followed every context of 1 to `CONTEXT` tokens.

    Args:
        vocab_size: V.
    """

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.unigram = np.zeros(vocab_size, np.int64)
        self._orders = [_Order.empty()] * CONTEXT
        self._waiting: list[list[_Order]] = [[] for _ in range(CONTEXT)]
        self._pending = 0

    @property
    def num_tokens(self) -> int:
        """Tokens counted."""
        return int(self.unigram.sum())

    def add(self, text: Sequence[int], successors: Sequence[int], *, first: int = 0) -> None:
        """Count one text.

        Args:
            text: its tokens.
            successors: for each token, the one that the model would write after it and those before it.
            first: tokens before this one are only context.
        """
        assert len(text) == len(successors)
        after = np.asarray(successors, np.int64)[first:]
        self.unigram += np.bincount(after, minlength=self.vocab_size)
        context = np.full((len(text), CONTEXT), -1)
        for back in range(CONTEXT):
            context[back:, back] = text[: len(text) - back]
        keys = context_keys(context)
        for order in range(CONTEXT):
            begin = max(first, order)  # before it the context would begin before the text
            own = after[begin - first :]
            shorter = keys[begin:, order - 1] if order else np.zeros_like(own)
            new = _Order(keys[begin:, order], shorter, own.astype(np.int32), np.ones_like(own))
            self._waiting[order].append(new)
        self._pending += len(text)
        if self._pending >= _PIECE:
            self._settle()

    def merged(self, others: Sequence[NgramCounts]) -> NgramCounts:
        """These and others together; in any order and grouping the same."""
        both = NgramCounts(self.vocab_size)
        parts = [self, *others]
        assert all(part.vocab_size == self.vocab_size for part in parts)
        both.unigram = sum((part.unigram for part in parts), np.zeros_like(self.unigram))
        settled = [part._settle() for part in parts]
        both._orders = [orders[0].join(orders[1:]) for orders in zip(*settled, strict=True)]
        return both

    def table(self, *, max_bytes: int = MAX_BYTES, row: int = ROW) -> NgramTable:
        """The table of the most frequent contexts; at most so many bytes, and so many successors a context.

        Row 0 and the tokens' frequencies stay whatever their size.
        """
        row = min(row, self.vocab_size)
        orders = _most_frequent(self._settle(), (max_bytes - 2 * self.vocab_size) // (8 + 6 * row + 2) - 1)
        frequency = (self.unigram + 1 / self.vocab_size) / (self.num_tokens + 1)
        prior = np.log(frequency).astype(np.float32)
        top = np.argsort(-frequency, kind="stable")[:row].astype(np.int32)
        rows = _Rows(np.zeros(1, np.int64), top[None], np.zeros((1, row), np.float32), np.zeros(1, np.float32))
        levels = [rows]
        for order in orders:
            rows = _rows(order, rows, prior, row)
            levels.append(rows)
        return NgramTable(
            keys=np.concatenate([level.keys for level in levels[1:]]),
            tokens=np.concatenate([level.tokens for level in levels]),
            ratios=np.concatenate([level.ratios for level in levels]).astype(np.float16),
            backoff=np.concatenate([level.backoff for level in levels]).astype(np.float16),
            unigram=prior.astype(np.float16),
            num_tokens=self.num_tokens,
        )

    def _settle(self) -> list[_Order]:
        """Join what has been counted since."""
        for order, waiting in enumerate(self._waiting):
            if waiting:
                self._orders[order] = self._orders[order].join(waiting)
                waiting.clear()
        self._pending = 0
        return self._orders


@dataclass(frozen=True)
class _Rows:
    """Rows of the contexts of one length, as `NgramTable` holds them, in float32."""

    keys: Ints
    tokens: NDArray[np.int32]
    ratios: Floats
    backoff: Floats


def _most_frequent(orders: Sequence[_Order], contexts: int) -> list[_Order]:
    """Only so many contexts, the most frequent; whatever is kept, so is all that it backs off to."""
    totals = [np.unique(order.keys, return_index=True) for order in orders]
    sums = [
        np.add.reduceat(o.counts, first) if len(first) else o.counts
        for o, (_, first) in zip(orders, totals, strict=True)
    ]
    if sum(map(len, sums)) <= contexts:
        return list(orders)
    # A longer context is never more frequent than a shorter one that it ends in, so of equals the shorter comes first.
    everything = np.concatenate(sums)
    length = np.repeat(np.arange(len(sums)), [len(one) for one in sums])
    chosen = np.zeros(len(everything), np.bool_)
    chosen[np.lexsort((length, -everything))[: max(contexts, 0)]] = True
    kept, start = [], 0
    for order, (keys, _), one in zip(orders, totals, sums, strict=True):
        mine = keys[chosen[start : start + len(one)]]
        inside = np.isin(order.keys, mine)
        kept.append(_Order(order.keys[inside], order.shorter[inside], order.successors[inside], order.counts[inside]))
        start += len(one)
    return kept


def _rows(order: _Order, above: _Rows, prior: Floats, width: int) -> _Rows:
    """The rows of the contexts of one length, from those that are one token shorter."""
    keys, first = np.unique(order.keys, return_index=True)
    ends = np.append(first[1:], len(order.keys))
    total = np.add.reduceat(order.counts, first) if len(first) else first
    parent = np.searchsorted(above.keys, order.shorter[first])
    free = np.log(DISCOUNT * (ends - first) / np.maximum(total, 1)).astype(np.float32)
    tokens = np.empty((len(keys), width), np.int32)
    ratios = np.empty((len(keys), width), np.float32)
    for start in range(0, len(keys), _CHUNK):
        part = slice(start, start + _CHUNK)
        own, counts = _widest(order, first[part], ends[part], width)
        tokens[part], ratios[part] = _mixed(own, counts, total[part], free[part], above, parent[part], prior, width)
    return _Rows(keys, tokens, ratios, (above.backoff[parent] + free).astype(np.float32))


def _widest(order: _Order, first: Ints, ends: Ints, width: int) -> tuple[Ints, Ints]:
    """Each context's own successors by falling count (then token): int64 [n, width] tokens, -1 where none, counts."""
    lengths = ends - first
    rows = np.repeat(np.arange(len(first)), lengths)
    pairs = np.arange(first[0], ends[-1]) if len(first) else first
    ranked = np.lexsort((order.successors[pairs], -order.counts[pairs], rows))
    place = np.arange(len(pairs)) - np.repeat(first - first[0], lengths) if len(first) else pairs
    inside = place < width
    own, counts = np.full((len(first), width), -1), np.zeros((len(first), width), np.int64)
    chosen = pairs[ranked][inside]
    own[rows[inside], place[inside]] = order.successors[chosen]
    counts[rows[inside], place[inside]] = order.counts[chosen]
    return own, counts


def _mixed(
    own: Ints,
    counts: Ints,
    total: Ints,
    free: Floats,
    above: _Rows,
    parent: Ints,
    prior: Floats,
    width: int,
) -> tuple[NDArray[np.int32], Floats]:
    """The likeliest successors by own counts and by the shorter context: tokens and ratios, [n, width] each."""
    inherited, ratio = above.tokens[parent], above.ratios[parent]  # [n, W]
    same = own[:, :, None] == inherited[:, None, :]  # [n, own, W]
    shorter = np.where(same, ratio[:, None, :], above.backoff[parent][:, None, None]).max(-1) + free[:, None]
    counted = np.log(np.maximum(counts - DISCOUNT, 1e-9) / total[:, None]) - prior[own]
    mine = np.where(own < 0, -np.inf, np.logaddexp(counted, shorter))
    theirs = np.where(same.any(1), -np.inf, ratio + free[:, None])
    tokens = np.concatenate([own, inherited], axis=1)
    ratios = np.concatenate([mine, theirs], axis=1)
    likely = np.where(np.isinf(ratios), -np.inf, ratios + prior[tokens])
    best = np.argsort(-likely, axis=1, kind="stable")[:, :width]
    return np.take_along_axis(tokens, best, 1).astype(np.int32), np.take_along_axis(ratios, best, 1).astype(np.float32)
