"""Drafters for tests, and their naive twin: the same rules for one path at a time, in lists, dicts and loops."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from treeopt.drafter import Drafter, Level
from treeopt.drafting.count import NgramCounts
from treeopt.ngram_table import NgramTable
from treeopt.traces import MISS

CONTEXT = 4
NEAR = 1e-4  # scores nearer to each other than this may be in any order
MAX_MATCH = 12
LENGTHS = (1, 2, 3, 4, 6, 8)  # of the contexts of the cache
MULTIPLIERS = (0xA0B26C19F767C45, 0xADE47DDBDE5C099, 0xD8608FECB91CE37, 0xEBB6A19F1446BEB)  # of the file format


def naive_key(context: tuple[int, ...]) -> int:
    """The key of a context, in text order."""
    return (len(context) << 60) + sum(t * m for t, m in zip(reversed(context), MULTIPLIERS, strict=False)) % (1 << 60)


@dataclass(frozen=True)
class Table:
    """NgramTable as dicts, by context in text order; all rows are of one width and () is among them."""

    rows: dict[tuple[int, ...], dict[int, float]]
    backoff: dict[tuple[int, ...], float]
    unigram: tuple[float, ...]

    def record(self) -> NgramTable:
        """The same as arrays."""
        contexts = [(), *sorted((c for c in self.rows if c), key=naive_key)]
        return NgramTable(
            keys=np.array([naive_key(c) for c in contexts[1:]], np.int64),
            tokens=np.array([list(self.rows[c]) for c in contexts], np.int32),
            ratios=np.array([list(self.rows[c].values()) for c in contexts], np.float16),
            backoff=np.array([self.backoff[c] for c in contexts], np.float16),
            unigram=np.array(self.unigram, np.float16),
            num_tokens=100,
        )

    def context(self, text: list[int]) -> tuple[int, ...]:
        """The longest stored context that a text ends in."""
        for length in range(min(CONTEXT, len(text)), 0, -1):
            if tuple(text[-length:]) in self.rows:
                return tuple(text[-length:])
        return ()

    def ratio(self, text: list[int], token: int) -> float:
        """Of a token after a text."""
        context = self.context(text)
        return self.rows[context].get(token, self.backoff[context])


def naive_match(recent: list[int], path: list[int]) -> tuple[int, int]:
    """What followed the latest longest match, and its length; the root and 0 where there is none.

    Args:
        recent: the window's tokens, the root last; -1 where there are none.
        path: drafts below the root.
    """
    text = recent + path
    best = (0, -1)
    for place in range(len(path), len(recent) - 1):  # the window moves along with the path
        length = 0
        while (
            length < MAX_MATCH + len(path)
            and length <= place
            and text[place - length] == text[-1 - length]
            and text[-1 - length] >= 0
        ):
            length += 1
        best = max(best, (length, place))
    length, place = best
    return (recent[place + 1], length) if length else (recent[-1], 0)


def naive_votes(recent: list[int], path: list[int], length: int) -> list[int]:
    """The tokens that followed the last `length` tokens of text and path, where they occurred before.

    Args:
        recent: the window's tokens, the root last; -1 where there are none.
        path: drafts below the root.
        length: n.
    """
    text = recent + path
    last = text[len(text) - length :]
    if len(last) < length or min(last) < 0:
        return []
    # The window moves along with the path; what follows a place is the root or a token before it.
    places = range(len(path), len(recent) - 1)
    return [recent[at + 1] for at in places if at + 1 >= length and text[at + 1 - length : at + 1] == last]


def naive_cache(recent: list[int], path: list[int], token: int, first: float, prior: float) -> tuple[float, int]:
    """P_n of one token for the longest length n with a place, and how many of the lengths have one.

    Args:
        recent, path: as for `naive_votes`.
        token: y.
        first: P_0.
        prior: weight of the next shorter length's estimate.
    """
    found, estimate = 0, first
    for length in LENGTHS:
        votes = naive_votes(recent, path, length)
        if votes:
            found += 1
            estimate = (votes.count(token) + prior * estimate) / (len(votes) + prior)
    return estimate, found


@dataclass(frozen=True)
class NaiveDrafter:
    """A drafter's rules for one text.

    Args:
        drafter: its weights; its n-gram table is not used.
        table: the n-gram table, as dicts; that of an empty one is not used either.
        logits: [H'][V] of the heads, or of the LM head.
        recent: the window's tokens, the root last; -1 where there are none.
        empty: whether the n-gram table is empty; its row has `width` tokens.
        width: successors of a context.
    """

    drafter: Drafter
    table: Table
    logits: list[list[float]]
    recent: list[int]
    empty: bool = False
    width: int = 0

    def candidates(self, path: list[int]) -> list[int]:
        """All of a node, each once: its level's, those of its context, that of prompt lookup, those voted for."""
        level = len(path)
        found: list[int] = []
        if level < len(self.logits) or (self.drafter.num_heads and not self.empty):
            scores = self.logits[level] if level < len(self.logits) else self.table.unigram
            order = sorted(range(len(scores)), key=lambda token: (-scores[token], token))
            found = order[: self.drafter.top]
        found += self.frequent() if self.empty else list(self.table.rows[self.table.context(self.text(path))])
        recent = self.recent if self.drafter.window else self.recent[-1:]
        return list(dict.fromkeys([*found, naive_match(recent, path)[0], *self.voted(path)]))

    def frequent(self) -> list[int]:
        """The most frequent tokens of the text so far, equal ones by id; then others by id where these are few."""
        known = self.text([])
        return sorted(range(len(self.table.unigram)), key=lambda token: (-known.count(token), token))[: self.width]

    def voted(self, path: list[int]) -> list[int]:
        """The tokens with most weight of votes, equal ones by id."""
        if not (self.drafter.voted and self.drafter.window):
            return []
        weight = {
            token: naive_cache(self.recent, path, token, 0.0, self.drafter.cache_prior)[0]
            for token in set(naive_votes(self.recent, path, 1))
        }
        return sorted(weight, key=lambda token: (-weight[token], token))[: self.drafter.voted]

    def text(self, path: list[int]) -> list[int]:
        """What is known of the text, and a path."""
        return [token for token in self.recent if token >= 0] + path

    def ratio(self, path: list[int], token: int) -> float:
        """Of the n-gram table; of an empty one, the frequency in the text so far over the uniform one."""
        if not self.empty:
            return self.table.ratio(self.text(path), token)
        known, prior = self.text([]), self.drafter.cache_prior
        times = known.count(token) if token in self.frequent() else 0
        return math.log((times * len(self.table.unigram) + prior) / (len(known) + prior))

    def score(self, path: list[int], token: int) -> float:
        """Of one token."""
        numbers = self.drafter.levels[len(path)]
        prior, ratio = self.table.unigram[token], self.ratio(path, token)
        total = numbers.prior * prior + numbers.ngram * ratio
        if len(path) < len(self.logits):
            row = self.logits[len(path)]
            total += numbers.head * (row[token] - math.log(sum(math.exp(value) for value in row)))
        if self.drafter.window:
            first = math.exp(prior + ratio)
            last, found = naive_cache(self.recent, path, token, first, self.drafter.cache_prior)
            total += numbers.cache[found - 1] * math.log(last / first) if found else 0.0
            prompt_lookup, length = naive_match(self.recent, path)
            if length and prompt_lookup == token:
                total += numbers.prompt_lookup[min(length, MAX_MATCH) - 1]
        return total

    def ranked(self, path: list[int]) -> list[tuple[int, float]]:
        """All candidates with their scores, best first; equal scores in the order of `candidates`."""
        scored = [(token, self.score(path, token)) for token in self.candidates(path)]
        return sorted(scored, key=lambda pair: -pair[1])

    def log_probabilities(self, path: list[int]) -> dict[int, float]:
        """Of all candidates of a node."""
        numbers = self.drafter.levels[len(path)]
        shares = {token: math.exp(self.score(path, token)) for token in self.candidates(path)}
        total = sum(shares.values()) + math.exp(numbers.other_logit)
        return {token: naive_mapped(share / total, numbers.calibration_map) for token, share in shares.items()}


def naive_growth(naive: NaiveDrafter, nodes: int, depth: int, most: int = 16) -> dict[tuple[int, ...], float]:
    """The likeliest drafts of a step, one after another: each taken node is expanded, at most `most` of a depth."""
    taken: dict[tuple[int, ...], float] = {}
    expanded = [0] * (depth + 1)
    open_: dict[tuple[int, ...], float] = {}

    def expand(path: tuple[int, ...], chance: float) -> None:
        if len(path) < depth and expanded[len(path)] < most:
            expanded[len(path)] += 1
            below = naive.log_probabilities(list(path))
            order = [token for token, _ in naive.ranked(list(path))]
            open_.update({(*path, token): chance + below[token] for token in order})

    expand((), 0.0)
    while open_ and len(taken) < nodes - 1:
        path = max(open_, key=lambda one: (open_[one], -len(one)))
        taken[path] = open_.pop(path)
        expand(path, taken[path])
    return taken


def naive_mapped(chance: float, calibration_map: tuple[tuple[float, float], ...]) -> float:
    """Log of a probability after a calibration map: linear between pairs, constant beyond them."""
    if not calibration_map:
        return math.log(chance)
    here = math.log(chance / (1 - chance))
    there = calibration_map[0][1] if here <= calibration_map[0][0] else calibration_map[-1][1]
    for (left, low), (right, high) in itertools.pairwise(calibration_map):
        if left < here <= right:
            there = low + (high - low) * (here - left) / (right - left)
    return -math.log1p(math.exp(-there))


@dataclass(frozen=True)
class Case:
    """A random drafter and random texts for it.

    Args:
        table, drafter: they belong together.
        logits: float32 [H', B, V].
        recent: int64 [B, R].
    """

    table: Table
    drafter: Drafter
    logits: np.ndarray
    recent: np.ndarray

    def naive(self, row: int) -> NaiveDrafter:
        """The naive twin for one row."""
        recent = [int(token) for token in self.recent[row]]
        return naive_of(self.drafter, self.table, self.logits[:, row].tolist(), recent)


def naive_of(drafter: Drafter, table: Table, logits: list[list[float]], recent: list[int]) -> NaiveDrafter:
    """The naive twin of a drafter with this table, or with an empty one."""
    assert drafter.ngram_table is not None
    width = drafter.ngram_table.tokens.shape[1]
    return NaiveDrafter(drafter, table, logits, recent, drafter.ngram_table.empty, width)


def random_table(rng: np.random.Generator, vocab: int) -> Table:
    """Up to 30 contexts, some without those that they end in; every number is exact in float16."""
    width = int(rng.integers(1, vocab + 1))
    contexts = {tuple(rng.integers(vocab, size=rng.integers(CONTEXT + 1)).tolist()) for _ in range(30)} | {()}
    backoff = {context: -float(rng.integers(0, 17)) / 8 for context in sorted(contexts)}
    rows = {
        context: {int(t): low + float(rng.integers(0, 33)) / 8 for t in rng.permutation(vocab)[:width]}
        for context, low in backoff.items()
    }
    return Table(rows, backoff, tuple((-rng.integers(0, 49, vocab) / 8).tolist()))


def empty_table(vocab: int) -> tuple[Table, NgramTable]:
    """The table of no text: uniform."""
    record = NgramCounts(vocab).table()
    return Table({(): {}}, {(): 0.0}, tuple(record.unigram.astype(float).tolist())), record


SOURCES = ("heads", "voted", "no heads", "lm head", "empty", "empty no heads", "empty lm head")


def random_drafter(
    rng: np.random.Generator, vocab: int, source: str, window: int, *, mapped: bool = False
) -> tuple[Table, Drafter]:
    """A drafter of one of `SOURCES`, with up to three heads and up to two levels more, and its table as dicts."""
    heads = int(rng.integers(1, 4)) if source in ("heads", "voted", "empty") else 0
    lm_head_levels = int(rng.integers(1, 4)) if "lm head" in source else 0
    table = random_table(rng, vocab)
    record = table.record()
    if "empty" in source:
        table, record = empty_table(vocab)
    levels = tuple(random_level(rng) for _ in range(max(1, heads + lm_head_levels) + int(rng.integers(0, 3))))
    if mapped:
        levels = tuple(replace(level, calibration_map=((-4.0, -3.0), (-1.0, -1.5), (2.0, 1.0))) for level in levels)
    return table, Drafter(
        levels,
        heads,
        int(rng.integers(1, vocab + 1)),
        window,
        record,
        cache_prior=float(rng.uniform(0.3, 5.0)),
        voted=int(rng.integers(1, 5)) if source not in ("heads", "no heads", "lm head") else 0,
        lm_head_levels=lm_head_levels,
    )


def random_case(
    seed: int, *, rows: int = 3, window: int | None = None, mapped: bool = False, source: str = "heads"
) -> Case:
    """A drafter of one of `SOURCES`, and texts that repeat themselves."""
    rng = np.random.default_rng(seed)
    vocab = int(rng.integers(2, 9))
    window = int(rng.choice([4, 7, 20])) if window is None else window
    table, drafter = random_drafter(rng, vocab, source, window, mapped=mapped)
    recent = np.full((rows, max(window, CONTEXT)), -1)
    for row in recent:
        known = int(rng.integers(1, len(row) + 1))
        row[-known:] = np.resize(rng.integers(vocab, size=rng.integers(1, 6)), known)
        row[rng.integers(len(row) - known, len(row))] = rng.integers(vocab)
    levels = drafter.num_heads or drafter.lm_head_levels
    return Case(table, drafter, (rng.integers(-24, 25, (levels, rows, vocab)) / 8).astype(np.float32), recent)


def random_level(rng: np.random.Generator) -> Level:
    """Numbers of about the size that fits give."""
    head, prior, ngram, other_logit = rng.normal((0.8, 0.1, 0.5, -3.0), 0.3).tolist()
    lookup, cache = rng.normal(1.0, 1.0, MAX_MATCH).tolist(), rng.normal(0.7, 0.4, len(LENGTHS)).tolist()
    return Level(head, prior, ngram, tuple(lookup), other_logit, cache=tuple(cache))


def bounds(ranked: Sequence[tuple[int, float]], token: int) -> tuple[int, int]:
    """The least and the largest rank of a token, by scores that may be off a little; 253 where it is no candidate."""
    scores = dict(ranked)
    if token not in scores:
        return MISS, MISS
    above = sum(score > scores[token] + NEAR for score in scores.values())
    near = sum(abs(score - scores[token]) <= NEAR for score in scores.values())
    return above, above + near - 1
