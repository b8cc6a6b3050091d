"""The arrays that the drafting kernel works on: of a record, of texts, of one step, and its working memory.

They are named tuples of arrays, which numba takes apart. The kernel reads no other data.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from treeopt.drafter import CACHE_LENGTHS, MAX_MATCH, Drafter
from treeopt.ngram_table import CONTEXT, ORDER_BITS

MAX_PARENTS = 16  # of a level of a per-step tree; more changed tokens per step by less than 0.1 % (docs/method.md)
_BUCKET = 4  # stored contexts of a bucket, on average

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Bools = NDArray[np.bool_]


class Record(NamedTuple):
    """A drafter record of L levels, with Z stored contexts of S successors; S is 0 without an n-gram table."""

    keys: Ints  # [Z], ascending
    buckets: Ints  # [CONTEXT, 2^b + 1]: keys[buckets[n, i]:buckets[n, i + 1]] have hashes that start with the b bits i
    shift: Ints  # [1], bits of a hash below these b
    tokens: NDArray[np.int32]  # [Z+1, S], successors
    ratios: Floats  # [Z+1, S+1], those of a row's successors, then its backoff
    prior: Floats  # [V], log U
    frequent: NDArray[np.int32]  # [F], candidates of the levels below the heads
    weights: Floats  # [L, 4], columns `HEAD` to `OTHER`
    lookup: Floats  # [L, MAX_MATCH + L + 3], by the length of the match
    cache: Floats  # [L, 1 + len(CACHE_LENGTHS)], by the number of lengths found
    kinds: Ints  # number of `CACHE_LENGTHS` that are at most a match's length, by the length
    maps: Doubles  # [2, total], the calibration maps of all levels
    map_ends: Ints  # [L+1], their bounds
    sources: Ints  # [L], the index of each level's logits in `StepArrays.seen`; -1 where it has none
    settings: Ints  # [5], columns `TOP` to `EMPTY`
    cache_prior: Doubles  # [1]


TOP, WINDOW_OF, VOTED, VOTES, EMPTY = range(5)  # columns of `Record.settings`
HEAD, PRIOR, NGRAM, OTHER = range(4)  # columns of `Record.weights`


class Texts(NamedTuple):
    """T texts of at most n tokens, with an index of the places of each token, which grows with the text."""

    tokens: Ints  # [T, n]
    latest: NDArray[np.int32]  # [T, V], 1 + the latest indexed place of each token; 0 where there is none
    previous: NDArray[np.int32]  # [T, n], at each place the same of the occurrence before
    indexed: Ints  # [T], number of indexed tokens


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
    places: Ints  # [n], places of matches, the latest first
    lengths: Ints  # [n], their lengths
    voted: Ints  # [n], tokens with votes
    votes: Doubles  # [n], their weights
    likeliest: Ints  # [voted], indices into `voted`
    map_key: Ints  # [M], which of `StepArrays.seen` is in each hash map: row * S + index; -1 for none
    map_token: NDArray[np.int32]  # [M, 2^k], tokens of the hash maps, -1 where empty
    map_value: Floats  # [M, 2^k], their log-probabilities
    token: Ints  # [C], candidates of a node, all different
    terms: Floats  # [4, C], rows `HEAD_TERM` to `CACHE_TERM`: log-probability, log U, ratio, cache
    score: Floats  # [C]
    path: Ints  # [L + 1], drafts above a node
    kind_counts: Ints  # [1 + len(CACHE_LENGTHS)], votes by the number of lengths that match at their place
    kind_weights: Doubles  # [1 + len(CACHE_LENGTHS)], the weight of each


HEAD_TERM, PRIOR_TERM, RATIO_TERM, CACHE_TERM = range(4)  # rows of `Scratch.terms`


class Shape(NamedTuple):
    """A tree of N nodes, the root first, then by depth; children of one parent are adjacent, ranks ascending."""

    parents: Ints  # [N]
    ranks: Ints  # [N]
    depths: Ints  # [N]
    first: Ints  # [N], the first child
    last: Ints  # [N], one beyond the last child; `first` where there is none


class KernelSource:
    """A drafter whose candidates the kernel scores: a record, and what gives the logits of its levels or nodes.

    Args:
        drafter: the record.
        vocab_size: V of the base.
        known: K, the number of log-probabilities that are read of each set of logits.
        logits_name: of what gives the logits, as a name of `ProposerSession.sources`.
        logits_of: the same, for messages.
    """

    def __init__(self, drafter: Drafter, vocab_size: int, known: int, logits_name: str, logits_of: str) -> None:
        self.drafter, self.vocab_size, self.known = drafter, vocab_size, known
        self.logits_name, self.logits_of = logits_name, logits_of
        self.depth = drafter.depth
        self.num_candidates = num_candidates(drafter, vocab_size)

    @functools.cached_property
    def record(self) -> Record:
        """The arrays of the record."""
        return record_arrays(self.drafter)

    def logits(self, states: Tensor, depth: int, known: Tensor | None = None) -> Tensor:
        """For `KernelSession`, the logits of the first levels at states [B, d]: float [at most depth, B, V].

        `known` are the base's logits [B, V] there, if they are known.
        """
        raise NotImplementedError


class Kernel(NamedTuple):
    """All that the functions of the kernel read and write."""

    record: Record
    step: StepArrays
    texts: Texts
    work: Scratch


def record_arrays(drafter: Drafter) -> Record:
    """The arrays of a record; contiguous and writable, so that numba compiles the kernel once."""
    levels, table = drafter.levels, drafter.ngram_table
    depth, empty = len(levels), table is not None and table.empty
    longest = MAX_MATCH + depth + 2
    weights = [(level.head, level.prior, level.ngram, level.other_logit) for level in levels]
    lookup = [(0.0, *level.prompt_lookup, *level.prompt_lookup[-1:] * (depth + 2)) for level in levels]
    cache = [(0.0, *level.cache) for level in levels]
    maps = [np.array(level.calibration_map, np.float64).reshape(-1, 2).T for level in levels]
    by_level = drafter.num_heads or drafter.draft  # logits of each level; the LM head's are the same for all
    sources = [-1 if i >= drafter.levels_with_logits else i if by_level else 0 for i in range(depth)]
    votes = bool(drafter.voted or np.array(cache).any())
    window = 0 if table is None else drafter.window
    if table is None:
        keys, tokens, ratios = np.zeros(0, np.int64), np.zeros((1, 0), np.int32), np.zeros((1, 1), np.float32)
        prior = np.zeros(0, np.float32)
    else:
        keys, tokens, prior = table.keys.copy(), table.tokens.copy(), table.unigram.astype(np.float32)
        ratios = np.concatenate([table.ratios, table.backoff[:, None]], axis=1).astype(np.float32)
    bits = (len(keys) // (CONTEXT * _BUCKET)).bit_length()
    extra = drafter.top if table is not None and drafter.num_heads and not empty else 0
    frequent = np.argsort(-prior, kind="stable")[:extra].astype(np.int32)
    return Record(
        keys=keys,
        buckets=_buckets(keys, bits),
        shift=np.array([ORDER_BITS - bits]),
        tokens=tokens,
        ratios=ratios,
        prior=prior,
        frequent=frequent,
        weights=np.array(weights, np.float32),
        lookup=np.array(lookup, np.float32),
        cache=np.array(cache, np.float32),
        kinds=np.searchsorted(CACHE_LENGTHS, np.arange(longest), side="right").astype(np.int64),
        maps=np.ascontiguousarray(np.concatenate(maps, axis=1)),
        map_ends=np.cumsum([0, *(one.shape[1] for one in maps)]),
        sources=np.array(sources, np.int64),
        settings=np.array([drafter.top, window, drafter.voted, votes and window > 0, empty], np.int64),
        cache_prior=np.array([drafter.cache_prior]),
    )


def _buckets(keys: Ints, bits: int) -> Ints:
    """`Record.buckets`: keys of one length are hashes, so equal ranges of their first bits hold equally many."""
    firsts = np.arange((1 << bits) + 1) << (ORDER_BITS - bits)
    return np.array([np.searchsorted(keys, (n << ORDER_BITS) + firsts) for n in range(1, CONTEXT + 1)], np.int64)


def new_texts(texts: int, capacity: int, vocab_size: int) -> Texts:
    """Empty texts."""
    return Texts(
        tokens=np.zeros((texts, capacity), np.int64),
        latest=np.zeros((texts, vocab_size), np.int32),
        previous=np.zeros((texts, capacity), np.int32),
        indexed=np.zeros(texts, np.int64),
    )


def longer_texts(texts: Texts, capacity: int) -> Texts:
    """The texts with room for more tokens."""
    more = ((0, 0), (0, capacity - texts.tokens.shape[1]))
    return texts._replace(tokens=np.pad(texts.tokens, more), previous=np.pad(texts.previous, more))


def new_work(record: Record, vocab_size: int, capacity: int, known: int) -> Scratch:
    """Working memory for texts of `capacity` tokens, and `known` log-probabilities of the logits of each level."""
    maps = 1 + int(record.sources.max())
    successors = record.tokens.shape[1]
    width = int(record.settings[TOP]) + (successors + 1 + int(record.settings[VOTED]) if successors else 0)
    slots = 1 << (2 * max(known, 1) - 1).bit_length()
    return Scratch(
        slots=np.zeros(vocab_size, np.int32),
        voters=np.zeros(vocab_size, np.int32),
        places=np.zeros(capacity, np.int64),
        lengths=np.zeros(capacity, np.int64),
        voted=np.zeros(capacity, np.int64),
        votes=np.zeros(capacity),
        likeliest=np.zeros(record.settings[VOTED], np.int64),
        map_key=np.full(max(maps, 1), -1),
        map_token=np.zeros((max(maps, 1), slots), np.int32),
        map_value=np.zeros((max(maps, 1), slots), np.float32),
        token=np.zeros(width, np.int64),
        terms=np.zeros((4, width), np.float32),
        score=np.zeros(width, np.float32),
        path=np.zeros(len(record.weights) + 1, np.int64),
        kind_counts=np.zeros(len(CACHE_LENGTHS) + 1, np.int64),
        kind_weights=np.zeros(len(CACHE_LENGTHS) + 1),
    )


def num_candidates(drafter: Drafter, vocab_size: int | None = None) -> int:
    """The maximum for a node, from its logits, its context's successors, prompt lookup (one) and the cache.

    `vocab_size` of the base is None where it is not loaded.
    """
    table = drafter.ngram_table
    if table is None:
        return min(drafter.top, vocab_size or drafter.top)
    top = drafter.top if drafter.levels_with_logits else 0
    return min(min(top, table.vocab_size) + int(table.tokens.shape[1]) + 1 + drafter.voted, table.vocab_size)
