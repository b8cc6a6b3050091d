"""The arrays that the drafting kernel works on: of a record, of texts, of one step, and its working memory.

They are named tuples of arrays, which numba takes apart. The kernel reads no other data.
"""

import functools
from abc import ABC, abstractmethod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from treeopt.drafter import CACHE_LENGTHS, MAX_MATCH, Drafter
from treeopt.drafting.interface import Floats, Ints
from treeopt.ngram_table import CONTEXT, ORDER_BITS, NgramTable

MAX_PARENTS = 16  # of a level of a per-step tree; more changed tokens per step by less than 0.1 %
RECALLED = 16  # places of a memory that vote for a node: the latest ones
_BUCKET = 4  # stored contexts of a bucket, on average

Doubles = NDArray[np.float64]


class Record(NamedTuple):
    """A drafter record of L levels, with Z stored contexts of S successors; S is 0 without an n-gram table."""

    keys: Ints  # [Z], ascending
    buckets: Ints  # [CONTEXT, 2^b + 1]: keys[buckets[n, i]:buckets[n, i + 1]] have hashes that start with the b bits i
    shift: int  # bits of a hash below these b
    tokens: NDArray[np.int32]  # [Z+1, S], successors
    ratios: Floats  # [Z+1, S+1], those of a row's successors, then its backoff
    prior: Floats  # [V], log U
    frequent: NDArray[np.int32]  # [F], candidates of the levels below the heads
    weights: Floats  # [L, 3], of the terms `HEAD`, `PRIOR` and `NGRAM`
    other: Floats  # [L], the score of all other tokens
    lookup: Floats  # [L, MAX_MATCH + L + 3], by the length of the match
    cache: Floats  # [L, 1 + len(CACHE_LENGTHS)], by the number of lengths found
    kinds: Ints  # number of `CACHE_LENGTHS` that are at most a match's length, by the length
    maps: Doubles  # [2, total], the calibration maps of all levels
    map_ends: Ints  # [L+1], their bounds
    sources: Ints  # [L], the index of each level's logits in `StepArrays.seen`; -1 where it has none
    top: int
    window: int
    voted: int
    votes: bool  # whether the votes of the text count
    empty: bool  # whether the n-gram table is
    cache_prior: float


HEAD, PRIOR, NGRAM, CACHE = range(4)  # rows of `Scratch.terms`, log-probability, log U, ratio and cache


class Texts(NamedTuple):
    """T texts of at most n tokens, with an index of the places of each token, which grows with the text."""

    tokens: Ints  # [T, n]
    latest: NDArray[np.int32]  # [T, V], 1 + the latest indexed place of each token; 0 where there is none
    previous: NDArray[np.int32]  # [T, n], at each place the same of the occurrence before
    indexed: Ints  # [T], number of indexed tokens


class Remembered(NamedTuple):
    """The last n tokens of texts that ended before, with the places of each context of `CONTEXT` tokens by its hash."""

    tokens: NDArray[np.int32]  # [n], 1 + token; 0 between two texts, and where nothing is stored yet
    latest: NDArray[np.int32]  # [2^bits], 1 + the latest place of a context with that hash; 0 where there is none
    previous: NDArray[np.int32]  # [n], at each place the same of the one before
    end: Ints  # [1], tokens that were ever stored; the next one is stored at this place, modulo n
    bits: int


def remembered(max_bytes: int) -> Remembered:
    """An empty memory of at most so many bytes."""
    size = max_bytes // 12  # two arrays of n and one of at most n numbers of four bytes
    bits = max(0, size.bit_length() - 1)
    tokens, previous = np.zeros(size, np.int32), np.zeros(size, np.int32)
    return Remembered(tokens, np.zeros((1 << bits) if size else 0, np.int32), previous, np.zeros(1, np.int64), bits)


NO_MEMORY = remembered(0)


class StepArrays(NamedTuple):
    """One step of B rows, with S sets of logits for each: of the levels, or of a draft model after each of S nodes."""

    text: Ints  # [B], the text of each row
    end: Ints  # [B], the number of its tokens, the root included
    seen: NDArray[np.int32]  # [B, S, 2 K + 1], the K likeliest tokens, the likeliest first, then the bits of `values`
    values: Floats  # the same memory: from column K their log-probabilities, last that of each other token
    frequent: NDArray[np.int32]  # [B, S], where the n-gram table is empty the most frequent tokens of each text
    frequent_ratios: Floats  # [B, S+1], their ratios to the uniform distribution, then the backoff


class Scratch(NamedTuple):
    """Working memory of one thread, for texts of n tokens; C is the maximum number of candidates of a node."""

    slots: NDArray[np.int32]  # [V], 1 + index of each token among the candidates; 0 between two nodes
    voters: NDArray[np.int32]  # [V], the same among the tokens that have votes
    places: Ints  # [n + RECALLED], places of matches, the latest first; -1 - p for place p of the memory
    lengths: Ints  # [n + RECALLED], their lengths
    recalled: Ints  # [2, RECALLED], places in the memory of the text's last tokens, and their number; 0 where none
    voted: Ints  # [n + RECALLED], tokens with votes
    votes: Doubles  # [n + RECALLED], their weights
    likeliest: Ints  # [voted], indices into `voted`
    token: Ints  # [C], candidates of a node, all different
    terms: Floats  # [4, C]
    score: Floats  # [C]
    path: Ints  # [L + 1], drafts above a node
    kind_counts: Ints  # [1 + len(CACHE_LENGTHS)], votes by the number of lengths that match at their place
    kind_weights: Doubles  # [1 + len(CACHE_LENGTHS)], the weight of each


class Shape(NamedTuple):
    """A tree of N nodes, the root first, then by depth; children of one parent are adjacent, ranks ascending."""

    parents: Ints  # [N]
    ranks: Ints  # [N]
    depths: Ints  # [N]
    first: Ints  # [N], the first child
    last: Ints  # [N], one beyond the last child; `first` where there is none


class KernelSource:
    """A drafter whose candidates the kernel scores; of each set of logits K log-probabilities are `known`."""

    window: int  # the number of last tokens of each text that are read

    def __init__(self, drafter: Drafter, vocab_size: int, logits_name: str, logits_of: str) -> None:
        self.drafter, self.vocab_size = drafter, vocab_size
        read = drafter.top if drafter.ngram_table is None else drafter.top_logprobs or vocab_size
        self.known = min(vocab_size, max(drafter.top, read))
        self.logits_name, self.logits_of = logits_name, logits_of
        self.depth = drafter.depth
        self.num_candidates = num_candidates(drafter, vocab_size)
        self.memory = NO_MEMORY

    @functools.cached_property
    def record(self) -> Record:
        """The arrays of the record."""
        return record_arrays(self.drafter)


class LogitsSource(KernelSource, ABC):
    """One whose logits are known when a step begins; a draft model's are not, as it runs level by level."""

    @abstractmethod
    def logits(self, states: Tensor, depth: int, known: Tensor | None = None) -> Tensor:
        """For `KernelSession`, float [at most depth, B, V] at states [B, d], where the base's logits may be known."""


class Kernel(NamedTuple):
    """All that the functions of the kernel read and write."""

    record: Record
    step: StepArrays
    texts: Texts
    memory: Remembered
    work: Scratch


def record_arrays(drafter: Drafter) -> Record:
    """The arrays of a record; contiguous and writable, so that numba compiles the kernel once."""
    levels, table = drafter.levels, drafter.ngram_table
    depth, empty = len(levels), table is not None and table.empty
    longest = MAX_MATCH + depth + 2
    weights = [(level.head, level.prior, level.ngram) for level in levels]
    lookup = [(0.0, *level.prompt_lookup, *level.prompt_lookup[-1:] * (depth + 2)) for level in levels]
    cache = [(0.0, *level.cache) for level in levels]
    maps = [np.array(level.calibration_map, np.float64).reshape(-1, 2).T for level in levels]
    by_level = drafter.num_heads or drafter.draft  # logits of each level; the LM head's are the same for all
    sources = [-1 if i >= drafter.levels_with_logits else i if by_level else 0 for i in range(depth)]
    votes = bool(drafter.voted or np.array(cache).any())
    window = 0 if table is None else drafter.window
    keys, tokens, ratios, prior = _table_arrays(table)
    bits = (len(keys) // (CONTEXT * _BUCKET)).bit_length()
    extra = drafter.top if table is not None and drafter.num_heads and not empty else 0
    frequent = np.argsort(-prior, kind="stable")[:extra].astype(np.int32)
    # Keys of one length are hashes, so equal ranges of their first bits hold equally many.
    firsts = np.arange((1 << bits) + 1) << (ORDER_BITS - bits)
    buckets = [np.searchsorted(keys, (n << ORDER_BITS) + firsts) for n in range(1, CONTEXT + 1)]
    return Record(
        keys=keys,
        buckets=np.array(buckets, np.int64),
        shift=ORDER_BITS - bits,
        tokens=tokens,
        ratios=ratios,
        prior=prior,
        frequent=frequent,
        weights=np.array(weights, np.float32),
        other=np.array([level.other_logit for level in levels], np.float32),
        lookup=np.array(lookup, np.float32),
        cache=np.array(cache, np.float32),
        kinds=np.searchsorted(CACHE_LENGTHS, np.arange(longest), side="right").astype(np.int64),
        maps=np.ascontiguousarray(np.concatenate(maps, axis=1)),
        map_ends=np.cumsum([0, *(one.shape[1] for one in maps)]),
        sources=np.array(sources, np.int64),
        top=drafter.top,
        window=window,
        voted=drafter.voted,
        votes=votes and window > 0,
        empty=empty,
        cache_prior=float(drafter.cache_prior),
    )


def _table_arrays(table: NgramTable | None) -> tuple[Ints, NDArray[np.int32], Floats, Floats]:
    """Keys, successors, ratios with the backoff, and log U; empty without a table."""
    if table is None:
        return np.zeros(0, np.int64), np.zeros((1, 0), np.int32), np.zeros((1, 1), np.float32), np.zeros(0, np.float32)
    ratios = np.concatenate([table.ratios, table.backoff[:, None]], axis=1).astype(np.float32)
    return table.keys.copy(), table.tokens.copy(), ratios, table.unigram.astype(np.float32)


def new_work(record: Record, vocab_size: int, capacity: int) -> Scratch:
    """Working memory for texts of `capacity` tokens."""
    successors = record.tokens.shape[1]
    width = record.top + (successors + 1 + record.voted if successors else 0)
    return Scratch(
        slots=np.zeros(vocab_size, np.int32),
        voters=np.zeros(vocab_size, np.int32),
        places=np.zeros(capacity + RECALLED, np.int64),
        lengths=np.zeros(capacity + RECALLED, np.int64),
        recalled=np.zeros((2, RECALLED), np.int64),
        voted=np.zeros(capacity + RECALLED, np.int64),
        votes=np.zeros(capacity + RECALLED),
        likeliest=np.zeros(record.voted, np.int64),
        token=np.zeros(width, np.int64),
        terms=np.zeros((4, width), np.float32),
        score=np.zeros(width, np.float32),
        path=np.zeros(len(record.weights) + 1, np.int64),
        kind_counts=np.zeros(len(CACHE_LENGTHS) + 1, np.int64),
        kind_weights=np.zeros(len(CACHE_LENGTHS) + 1),
    )


def num_candidates(drafter: Drafter, vocab_size: int | None = None) -> int:
    """The maximum for a node, from its logits, its context's successors, prompt lookup (one) and the cache."""
    table = drafter.ngram_table
    if table is None:
        return min(drafter.top, vocab_size or drafter.top)
    top = drafter.top if drafter.levels_with_logits else 0
    return min(min(top, table.vocab_size) + int(table.tokens.shape[1]) + 1 + drafter.voted, table.vocab_size)
