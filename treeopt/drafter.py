"""The drafter record: fitted numbers for each level, and the n-gram table that they weigh.

Level h (1..L) drafts token t+1+h, as head h does. The score of token y at level h, after the text so far and the drafts
of the levels above it, is

    head[h] * log p_h(y)  +  prior[h] * log U(y)  +  ngram[h] * ratio(y | last tokens)
        +  prompt_lookup[h][m] where y followed the latest longest match, m tokens long, of the last tokens in the text

with p_h the distribution of head h (the extra depth below the heads has none), U and ratio from the n-gram table. The
softmax over a level's candidates, with `other_logit` for all other tokens together, estimates the probability of each;
the level's `calibration_map` maps it to how often such candidates were right.
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

MAX_MATCH = 12  # matches of so many tokens or more weigh alike
NO_CHANCE = -40.0  # log of a probability that is none
LEARN_TOKENS = 400_000  # drawn to learn from unless another number is asked for
HEADS, HEADS_NGRAM = "heads", "heads+ngram"  # drafters by name
KINDS = ("static", "dynamic")  # of trees: one for all steps, or one chosen per step
CONTEXT = 4  # tokens of the longest stored context; more did not pay (docs/method.md)
_ORDER_BITS = 60  # a key's lower bits are the hash of the tokens, the upper ones how many they are
_HASH_MASK = (1 << _ORDER_BITS) - 1
_KEY_ORDERS = np.arange(1, CONTEXT + 1, dtype=np.int64) << _ORDER_BITS
# Any odd numbers of 60 random bits will do; they are part of the file format.
_MULTIPLIERS = np.array([0xA0B26C19F767C45, 0xADE47DDBDE5C099, 0xD8608FECB91CE37, 0xEBB6A19F1446BEB])


@dataclass(frozen=True, eq=False)
class NgramTable:
    """The likeliest successors of Z stored contexts (the last 1 to `CONTEXT` tokens) and, as row 0, of the empty one.

    A context that is not stored is shortened from its far end until it is. The empty context has the frequency of each
    token alone.

    The probability of token y after context c is U(y) * exp(ratio), with U its frequency and the ratio from c's row, or
    c's `backoff` where the row does not hold y.

    Args:
        keys: int64 [Z], ascending; `context_keys` of the stored contexts. Row z + 1 belongs to keys[z].
        tokens: int32 [Z+1, S], the successors, the likeliest first; at least one.
        ratios: float16 [Z+1, S], log P(y | c) - log U(y); none below its row's backoff.
        backoff: float16 [Z+1], the same for all tokens that the row does not hold.
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
                return f"{name} hold what is no number"
        if np.any(self.keys[1:] <= self.keys[:-1]):
            return "keys are not ascending"
        if rows > 1 and not 1 <= self.keys[0] >> _ORDER_BITS <= self.keys[-1] >> _ORDER_BITS <= CONTEXT:
            return f"a key is not of 1 to {CONTEXT} tokens"
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

    A key is the number of tokens in its upper bits over the sum of token j (the last is 0) times the j-th multiplier,
    modulo 2^60: keys sort by the number of tokens, and two contexts share one with a chance below 2^-42.

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
    """The fitted numbers of one level; see the module.

    Args:
        head, prior, ngram: weights of the three logarithms.
        prompt_lookup: `MAX_MATCH` numbers, of matches of 1, 2, .. tokens; the last is that of longer ones too.
        other_logit: score of all tokens that are no candidates.
        calibration_map: pairs of log-odds, estimated and observed, both ascending; linear between them, constant
            beyond. Empty leaves estimates as they are.
    """

    head: float = 1.0
    prior: float = 0.0
    ngram: float = 0.0
    prompt_lookup: tuple[float, ...] = (0.0,) * MAX_MATCH
    other_logit: float = NO_CHANCE
    calibration_map: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True, eq=False)
class Drafter:
    """Fitted numbers for every level, and the n-gram table that they weigh.

    Args:
        levels: L of them, at least as many as there are heads, and at least one.
        num_heads: H; 0 where the n-gram table drafts alone.
        top: candidates that each level takes from its head: its likeliest tokens.
        window: how many of the last tokens are searched for matches, at least `CONTEXT`; 0 searches none.
        ngram_table: None where the heads' scores count alone.
        source: where it comes from: model, heads, the text it learned from, versions.

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
        if self.top < 1 or (self.window != 0 and self.window < CONTEXT):
            return f"{self.top} candidates of each head and a window of {self.window} tokens"
        if len(self.levels) > self.num_heads and self.ngram_table is None:
            return "extra depth below the heads needs an n-gram table"
        for number, level in enumerate(self.levels, start=1):
            pairs = [value for pair in level.calibration_map for value in pair]
            numbers = (level.head, level.prior, level.ngram, level.other_logit, *level.prompt_lookup, *pairs)
            if len(level.prompt_lookup) != MAX_MATCH or not all(map(math.isfinite, numbers)):
                return f"level {number} holds what is no number, or not {MAX_MATCH} prompt_lookup"
            if any(
                a[0] >= b[0] or a[1] > b[1]
                for a, b in zip(level.calibration_map, level.calibration_map[1:], strict=False)
            ):
                return f"the odds of level {number} do not ascend"
        return ""

    @classmethod
    def heads_only(cls, num_heads: int, top: int) -> Drafter:
        """Drafts of the heads alone, with their own probabilities."""
        return cls((Level(),) * num_heads, num_heads, top)

    @property
    def depth(self) -> int:
        """Levels, and so the greatest depth of its trees."""
        return len(self.levels)

    @functools.cached_property
    def id(self) -> str:
        """Hash of all that decides which tokens are drafted; traces and trees name it."""
        settings = [self.num_heads, self.top, self.window, [dataclasses.astuple(level) for level in self.levels]]
        digest = hashlib.sha256(json.dumps(settings).encode())
        if self.ngram_table is not None:
            for name, array in sorted(self.ngram_table.arrays().items()):
                digest.update(name.encode() + array.tobytes())
        return digest.hexdigest()[:16]
