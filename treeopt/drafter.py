"""The drafter record: the fitted weights of each level, and the n-gram table.

Level h (1..L) drafts token t+1+h, as head h does. The score of token y at level h, after the text so far and the drafts
of the levels above it, is

    head[h] * log p_h(y)  +  prior[h] * log U(y)  +  ngram[h] * ratio(y | last tokens)
        +  cache[h][n] * log(P_n(y) / P_0(y))
        +  prompt_lookup[h][m] where y followed the latest longest match, m tokens long, of the last tokens in the text

with p_h the distribution of head h (levels below the heads have none), U and ratio from the n-gram table. P_n is the
estimate of the cache of the text so far: for each length n of `CACHE_LENGTHS`, the places where the last n tokens
occurred before vote for the tokens that followed there,

    P_n(y) = (votes(y) + cache_prior * P_m(y)) / (places + cache_prior)

with m the next shorter length and P_0 = U(y) * exp(ratio). The longest length with at least one place is used. The
softmax over a level's candidates, with `other_logit` as the score of all other tokens together, estimates the
probability of each candidate; the level's `calibration_map` maps it to the observed frequency.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treeopt.errors import Code, TreeoptError
from treeopt.policy import Plan
from treeopt.tree import MAX_DEPTH

MAX_WINDOW = 1 << 16  # so that place and length of a match fit into one float32
MAX_CANDIDATES = 1 << 12  # of one source
MAX_MATCH = 12  # matches of this many tokens or more have the same weight
CACHE_LENGTHS = (1, 2, 3, 4, 6, 8)  # tokens of the contexts that the cache looks up in the text so far
WINDOW = 2048  # default number of most recent tokens that cache and prompt lookup search
TOP_LOGPROBS = 64  # default number of tokens of each head whose log-probabilities are read
LM_HEAD_LEVELS = 3  # of a drafter without heads; five were no better (docs/method.md)
# Of drafters that nothing was learned for: candidates of each source, and weights between those fitted to two models.
UNTRAINED_TOP, UNTRAINED_HEAD, UNTRAINED_OTHER = 16, 0.1, -1.0
NO_CHANCE = -40.0  # log of a negligible probability
LEARN_TOKENS = 400_000  # default number of sampled tokens to learn from
LEVELS = 8  # default number of levels of a drafter with an n-gram table, those of the heads included
HEADS, HEADS_NGRAM, NGRAM = "heads", "heads+ngram", "ngram"  # drafters by name; the last has no heads
KINDS = ("static", "dynamic")  # of trees: one for all steps, or one chosen per step
CONTEXT = 4  # tokens of the longest stored context; more were no better (docs/method.md)
_OLD_FIELDS = 6  # of a level that drafters of before the cache have
ORDER_BITS = 60  # the lower bits of a key are the hash of the tokens, the upper ones their number
HASH_MASK = (1 << ORDER_BITS) - 1
_KEY_ORDERS = np.arange(1, CONTEXT + 1, dtype=np.int64) << ORDER_BITS
# Odd numbers of 60 random bits; they are part of the file format.
MULTIPLIERS = np.array([0xA0B26C19F767C45, 0xADE47DDBDE5C099, 0xD8608FECB91CE37, 0xEBB6A19F1446BEB])


@dataclass(frozen=True, eq=False)
class NgramTable:
    """The likeliest successors of the empty context (row 0) and of Z stored contexts (the last 1 to `CONTEXT` tokens).

    Of a context that is not stored, the longest stored suffix is used. The empty context gives the frequency of each
    token.

    The probability of token y after context c is U(y) * exp(ratio), with U its frequency and the ratio from c's row, or
    c's `backoff` where the row does not contain y.

    Args:
        keys: int64 [Z], ascending, `context_keys` of the stored contexts; row z + 1 is that of keys[z].
        tokens: int32 [Z+1, S], the successors, the likeliest first; at least one.
        ratios: float16 [Z+1, S], log P(y | c) - log U(y), at least the row's backoff.
        backoff: float16 [Z+1], the ratio of all tokens that are not in the row.
        unigram: float16 [V], log U.
        num_tokens: tokens that were counted.

    Raises:
        TreeoptError: E222 where shapes, types or order are wrong.
    """

    keys: NDArray[np.int64]
    tokens: NDArray[np.int32]
    ratios: NDArray[np.float16]
    backoff: NDArray[np.float16]
    unigram: NDArray[np.float16]
    num_tokens: int

    def __post_init__(self) -> None:
        fault = self._fault()
        if fault:
            raise TreeoptError(Code.DRAFTER_INVALID, f"not an n-gram table: {fault}")
        for array in self.arrays().values():
            array.setflags(write=False)

    def _fault(self) -> str:
        rows = self.keys.size + 1
        width = max(1, self.tokens.size // rows)
        expected: dict[str, tuple[Any, tuple[int, ...]]] = {
            "keys": (np.int64, (rows - 1,)),
            "tokens": (np.int32, (rows, width)),
            "ratios": (np.float16, (rows, width)),
            "backoff": (np.float16, (rows,)),
            "unigram": (np.float16, (self.unigram.size,)),
        }
        for name, array in self.arrays().items():
            dtype, shape = expected[name]
            if array.dtype != dtype or array.shape != shape:
                return f"{name} are {array.dtype} {list(array.shape)}, not {np.dtype(dtype)} {list(shape)}"
            if array.dtype == np.float16 and not np.isfinite(array).all():
                return f"{name} are not finite"
        if np.any(self.keys[1:] <= self.keys[:-1]):
            return "keys are not ascending"
        if rows > 1 and not 1 <= self.keys[0] >> ORDER_BITS <= self.keys[-1] >> ORDER_BITS <= CONTEXT:
            return f"a key is not that of 1 to {CONTEXT} tokens"
        if not 0 <= self.tokens.min() <= self.tokens.max() < self.vocab_size:
            return f"a successor lies outside the vocabulary of {self.vocab_size}"
        if np.any(self.ratios < self.backoff[:, None]):
            return "a successor's ratio is below its row's backoff"
        return ""

    def arrays(self) -> dict[str, NDArray[Any]]:
        """All arrays by name."""
        names = ("keys", "tokens", "ratios", "backoff", "unigram")
        return {name: getattr(self, name) for name in names}

    @property
    def vocab_size(self) -> int:
        """V."""
        return len(self.unigram)

    @property
    def contexts(self) -> int:
        """Z."""
        return len(self.keys)

    @property
    def empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.num_tokens

    @functools.cached_property
    def bytes(self) -> int:
        """Size of all arrays."""
        return sum(array.nbytes for array in self.arrays().values())


def context_keys(context: NDArray[np.int64]) -> NDArray[np.int64]:
    """Keys of the last 1, 2, .. `CONTEXT` tokens.

    The upper bits of a key are the number of tokens; the lower 60 are the sum of token j (0 is the last) times the j-th
    multiplier, modulo 2^60. So keys sort by the number of tokens, and two contexts have equal keys with a probability
    below 2^-42.

    Args:
        context: int64 [..., CONTEXT], the last token first.

    Returns:
        int64 [..., CONTEXT].
    """
    keys: NDArray[np.int64] = (context * MULTIPLIERS).cumsum(-1)
    keys &= HASH_MASK
    keys += _KEY_ORDERS
    return keys


@dataclass(frozen=True)
class Level:
    """The fitted numbers of one level; see the module docstring.

    Args:
        head, prior, ngram: weights of the three logarithms.
        prompt_lookup: `MAX_MATCH` weights, of matches of 1, 2, .. tokens; the last also that of longer matches.
        other_logit: score of all tokens together that are not candidates.
        calibration_map: pairs of log-odds, estimated and observed, both ascending; linear between pairs, constant
            beyond them. Empty: estimates are not changed.
        cache: weights of the cache of the text so far, by the longest length of `CACHE_LENGTHS` that was found.
    """

    head: float = 1.0
    prior: float = 0.0
    ngram: float = 0.0
    prompt_lookup: tuple[float, ...] = (0.0,) * MAX_MATCH
    other_logit: float = NO_CHANCE
    calibration_map: tuple[tuple[float, float], ...] = ()
    cache: tuple[float, ...] = (0.0,) * len(CACHE_LENGTHS)

    def fault(self) -> str:
        """What is wrong with the numbers, for a message; empty if nothing is."""
        pairs = self.calibration_map
        weights = (self.head, self.prior, self.ngram, self.other_logit, *self.prompt_lookup, *self.cache)
        if not all(map(math.isfinite, (*weights, *(value for pair in pairs for value in pair)))):
            return "has numbers that are not finite"
        if (len(self.prompt_lookup), len(self.cache)) != (MAX_MATCH, len(CACHE_LENGTHS)):
            return f"has not {MAX_MATCH} weights of prompt_lookup and {len(CACHE_LENGTHS)} of cache"
        if any(a[0] >= b[0] or a[1] > b[1] for a, b in itertools.pairwise(pairs)):
            return "has a calibration_map that does not ascend"
        return ""


@dataclass(frozen=True, eq=False)
class Drafter:
    """The fitted numbers of every level, and the n-gram table.

    Args:
        levels: L levels, at least one, and at least as many as there are heads.
        num_heads: H; 0 for a drafter without heads.
        top: candidates of a level from its head, which are the head's likeliest tokens; of the levels below the heads,
            the most frequent tokens (none where H = 0, and where the n-gram table is empty).
        window: number of the last tokens that cache and prompt lookup search, at least `CONTEXT`; 0 searches none.
        ngram_table: None for the heads alone. An empty table (no contexts, no counted tokens) is replaced by the
            frequencies of the tokens in the text so far.
        source: model, heads, the text it was learned from, versions.
        cache_prior: weight of the next shorter length's estimate in the cache, in votes; above 0.
        voted: candidates of a level from the votes of the cache, beside the one of prompt lookup.
        lm_head_levels: where H = 0, number of first levels in which the base's own distribution of the root takes the
            place of a head's.
        top_logprobs: number of the likeliest tokens of each head, or of the LM head, whose log-probabilities are read;
            all other tokens share the rest equally. 0, of drafters of before, reads those of all tokens.
        plan: the tree or policy that is recommended for it; it names this drafter's id.

    Raises:
        TreeoptError: E222 where a rule above is broken.
    """

    levels: tuple[Level, ...]
    num_heads: int
    top: int
    window: int = 0
    ngram_table: NgramTable | None = None
    source: Mapping[str, Any] = field(default_factory=dict)
    cache_prior: float = 1.0
    voted: int = 0
    lm_head_levels: int = 0
    top_logprobs: int = 0
    plan: Plan | None = None

    def __post_init__(self) -> None:
        fault = self._fault()
        if not fault and self.plan is not None and self.plan.drafter != self.id:
            fault = f"its plan was made for drafter {self.plan.drafter or HEADS}, this is {self.id}; replace it by None"
        if not fault and self.plan is not None and self.plan.depth > self.depth:
            fault = f"its plan is {self.plan.depth} deep, and there are {self.depth} levels"
        if fault:
            raise TreeoptError(Code.DRAFTER_INVALID, f"not a drafter: {fault}")

    def _fault(self) -> str:
        if not 0 <= self.num_heads <= len(self.levels) or not self.levels:
            return f"{len(self.levels)} levels for {self.num_heads} heads"
        if len(self.levels) > MAX_DEPTH:
            return f"{len(self.levels)} levels, more than {MAX_DEPTH}"
        if not min(1, self.num_heads + self.lm_head_levels) <= self.top <= MAX_CANDIDATES:
            return f"{self.top} candidates of each head"
        if self.window != 0 and not CONTEXT <= self.window <= MAX_WINDOW:
            return f"a window of {self.window} tokens, not from {CONTEXT} to {MAX_WINDOW}"
        if not 0 <= self.voted <= MAX_CANDIDATES or not (self.cache_prior > 0 and math.isfinite(self.cache_prior)):
            return f"{self.voted} candidates from the cache and a cache_prior of {self.cache_prior}"
        if not 0 <= self.lm_head_levels <= (0 if self.num_heads else len(self.levels)):
            return f"{self.lm_head_levels} levels of the LM head beside {self.num_heads} heads"
        if not 0 <= self.top_logprobs <= MAX_CANDIDATES:
            return f"{self.top_logprobs} log-probabilities of each head"
        if len(self.levels) > self.num_heads and self.ngram_table is None:
            return "extra depth below the heads needs an n-gram table"
        faults = (
            f"level {number} {level.fault()}" for number, level in enumerate(self.levels, start=1) if level.fault()
        )
        return next(faults, "")

    @classmethod
    def heads_only(cls, num_heads: int, top: int) -> Drafter:
        """The drafter of the heads alone, with the probabilities that they give."""
        return cls((Level(),) * num_heads, num_heads, top)

    @classmethod
    def untrained(cls, vocab_size: int, levels: int = LEVELS) -> Drafter:
        """A drafter without heads that nothing was learned for: the text so far and the LM head give the candidates.

        A candidate's score is its probability by the cache, and a little of its probability in place of the root.
        """
        level = Level(UNTRAINED_HEAD, 1.0, 1.0, other_logit=UNTRAINED_OTHER, cache=(1.0,) * len(CACHE_LENGTHS))
        top = min(UNTRAINED_TOP, vocab_size)
        table = NgramTable(
            keys=np.zeros(0, np.int64),
            tokens=np.arange(top, dtype=np.int32)[None],
            ratios=np.zeros((1, top), np.float16),
            backoff=np.zeros(1, np.float16),
            unigram=np.full(vocab_size, -math.log(vocab_size), np.float16),
            num_tokens=0,
        )
        lm_head, known = min(LM_HEAD_LEVELS, levels), min(TOP_LOGPROBS, vocab_size)
        return cls((level,) * levels, 0, top, WINDOW, table, {}, 1.0, top, lm_head, known)

    @property
    def depth(self) -> int:
        """L, the number of levels, which is the maximum depth of its trees."""
        return len(self.levels)

    @functools.cached_property
    def id(self) -> str:
        """Hash of all fields that determine the drafts; traces and trees store it.

        Fields that were added later are left out at their defaults, so that drafters of before keep their ids.
        """
        levels = [dataclasses.astuple(level) for level in self.levels]
        settings: list[Any] = [self.num_heads, self.top, self.window, [level[:_OLD_FIELDS] for level in levels]]
        empty = self.ngram_table is not None and self.ngram_table.empty
        added = [self.cache_prior, self.voted, self.lm_head_levels, empty, [level[_OLD_FIELDS:] for level in levels]]
        if added != [1.0, 0, 0, False, [(Level().cache,)] * len(levels)]:
            settings.append(added)
        if self.top_logprobs:
            settings.append(self.top_logprobs)
        digest = hashlib.sha256(json.dumps(settings).encode())
        if self.ngram_table is not None:
            for name, array in sorted(self.ngram_table.arrays().items()):
                digest.update(name.encode() + array.tobytes())
        return digest.hexdigest()[:16]
