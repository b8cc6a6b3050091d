"""The drafter record: the fitted weights of each level, and the n-gram table.

Level h (1..L) drafts token t+1+h, as head h does. The score of token y at level h, after the text so far and the drafts
of the levels above it, is

    head[h] * log p_h(y)  +  prior[h] * log U(y)  +  ngram[h] * ratio(y | last tokens)
        +  prompt_lookup[h][m] where y followed the latest longest match, m tokens long, of the last tokens in the text

with p_h the distribution of head h (the extra depth below the heads has none), U and ratio from the n-gram table. The
softmax over a level's candidates, with `other_logit` as the score of all other tokens together, estimates the
probability of each candidate; the level's `calibration_map` maps it to the observed frequency.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treeopt.errors import Code, TreeoptError

MAX_MATCH = 12  # matches of this many tokens or more have the same weight
NO_CHANCE = -40.0  # log of a negligible probability
LEARN_TOKENS = 400_000  # default number of sampled tokens to learn from
LEVELS = 8  # default number of levels of a drafter with an n-gram table, those of the heads included
HEADS, HEADS_NGRAM, NGRAM = "heads", "heads+ngram", "ngram"  # drafters by name; the last has no heads
KINDS = ("static", "dynamic")  # of trees: one for all steps, or one chosen per step
CONTEXT = 4  # tokens of the longest stored context; more were no better (docs/method.md)
_ORDER_BITS = 60  # the lower bits of a key are the hash of the tokens, the upper ones their number
_HASH_MASK = (1 << _ORDER_BITS) - 1
_KEY_ORDERS = np.arange(1, CONTEXT + 1, dtype=np.int64) << _ORDER_BITS
# Odd numbers of 60 random bits; they are part of the file format.
_MULTIPLIERS = np.array([0xA0B26C19F767C45, 0xADE47DDBDE5C099, 0xD8608FECB91CE37, 0xEBB6A19F1446BEB])


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
        if rows > 1 and not 1 <= self.keys[0] >> _ORDER_BITS <= self.keys[-1] >> _ORDER_BITS <= CONTEXT:
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
    keys: NDArray[np.int64] = (context * _MULTIPLIERS).cumsum(-1)
    keys &= _HASH_MASK
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
    """

    head: float = 1.0
    prior: float = 0.0
    ngram: float = 0.0
    prompt_lookup: tuple[float, ...] = (0.0,) * MAX_MATCH
    other_logit: float = NO_CHANCE
    calibration_map: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True, eq=False)
class Drafter:
    """The fitted numbers of every level, and the n-gram table.

    Args:
        levels: L levels, at least one, and at least as many as there are heads.
        num_heads: H; 0 where the n-gram table drafts alone.
        top: candidates of a level from its head, which are the head's likeliest tokens; of the levels below the heads,
            the most frequent tokens. May be 0 without heads.
        window: number of the last tokens that prompt lookup searches, at least `CONTEXT`; 0 searches none.
        ngram_table: None for the heads alone.
        source: model, heads, the text it was learned from, versions.

    Raises:
        TreeoptError: E222 where a rule above is broken.
    """

    levels: tuple[Level, ...]
    num_heads: int
    top: int
    window: int = 0
    ngram_table: NgramTable | None = None
    source: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        fault = self._fault()
        if fault:
            raise TreeoptError(Code.DRAFTER_INVALID, f"not a drafter: {fault}")

    def _fault(self) -> str:
        if not 0 <= self.num_heads <= len(self.levels) or not self.levels:
            return f"{len(self.levels)} levels for {self.num_heads} heads"
        if self.top < (1 if self.num_heads else 0) or (self.window != 0 and self.window < CONTEXT):
            return f"{self.top} candidates of each head and a window of {self.window} tokens"
        if len(self.levels) > self.num_heads and self.ngram_table is None:
            return "extra depth below the heads needs an n-gram table"
        for number, level in enumerate(self.levels, start=1):
            pairs = [value for pair in level.calibration_map for value in pair]
            numbers = (level.head, level.prior, level.ngram, level.other_logit, *level.prompt_lookup, *pairs)
            if len(level.prompt_lookup) != MAX_MATCH or not all(map(math.isfinite, numbers)):
                return f"level {number} has numbers that are not finite, or not {MAX_MATCH} weights of prompt_lookup"
            if any(
                a[0] >= b[0] or a[1] > b[1]
                for a, b in zip(level.calibration_map, level.calibration_map[1:], strict=False)
            ):
                return f"the calibration_map of level {number} does not ascend"
        return ""

    @classmethod
    def heads_only(cls, num_heads: int, top: int) -> Drafter:
        """The drafter of the heads alone, with the probabilities that they give."""
        return cls((Level(),) * num_heads, num_heads, top)

    @property
    def depth(self) -> int:
        """L, the number of levels, which is the maximum depth of its trees."""
        return len(self.levels)

    @functools.cached_property
    def id(self) -> str:
        """Hash of all fields that determine the drafts; traces and trees store it."""
        settings = [self.num_heads, self.top, self.window, [dataclasses.astuple(level) for level in self.levels]]
        digest = hashlib.sha256(json.dumps(settings).encode())
        if self.ngram_table is not None:
            for name, array in sorted(self.ngram_table.arrays().items()):
                digest.update(name.encode() + array.tobytes())
        return digest.hexdigest()[:16]
