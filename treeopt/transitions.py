"""The transitions record: what a base model writes after each short context, whatever the size of its vocabulary.

A context is the last 1 to `CONTEXT` tokens. Each stored one has a row of its likeliest successors; a context that is
not stored is cut from its far end until it is, and in the end is the empty one, which knows nothing but how frequent
each token is.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treeopt.errors import Code, TreeoptError

CONTEXT = 4  # tokens of the longest stored context; more did not pay (docs/method.md)
_ORDER_BITS = 60  # a key's lower bits are the hash of the tokens, the upper ones how many they are
_HASH_MASK = (1 << _ORDER_BITS) - 1
_KEY_ORDERS = np.arange(1, CONTEXT + 1, dtype=np.int64) << _ORDER_BITS
# Any odd numbers of 60 random bits will do; they are part of the file format.
_MULTIPLIERS = np.array([0xA0B26C19F767C45, 0xADE47DDBDE5C099, 0xD8608FECB91CE37, 0xEBB6A19F1446BEB])


@dataclass(frozen=True, eq=False)
class Transitions:
    """Rows of successors for Z stored contexts and, as row 0, the empty one.

    The probability of token y after context c is U(y) * exp(ratio), with U its frequency and the ratio from c's row, or
    c's `backoff` where the row does not hold y.

    Args:
        keys: int64 [Z], ascending; `context_keys` of the stored contexts. Row z + 1 belongs to keys[z].
        tokens: int32 [Z+1, S], the successors, the likeliest first; at least one.
        ratios: float16 [Z+1, S], log P(y | c) - log U(y); none below its row's backoff.
        backoff: float16 [Z+1], the same for all tokens that the row does not hold.
        unigram: float16 [V], log U.
        seen: tokens that were counted.

    Raises:
        TreeoptError: E222 where shapes, types or order are wrong.
    """

    keys: NDArray[np.int64]
    tokens: NDArray[np.int32]
    ratios: NDArray[np.float16]
    backoff: NDArray[np.float16]
    unigram: NDArray[np.float16]
    seen: int

    def __post_init__(self) -> None:
        fault = self._fault()
        if fault:
            raise TreeoptError(Code.DRAFTER_INVALID, f"not a table of transitions: {fault}")
        for array in self.arrays().values():
            array.setflags(write=False)

    def _fault(self) -> str:
        rows = self.keys.size + 1
        width = max(1, self.tokens.size // rows)
        wanted: dict[str, tuple[Any, tuple[int, ...]]] = {
            "keys": (np.int64, (rows - 1,)),
            "tokens": (np.int32, (rows, width)),
            "ratios": (np.float16, (rows, width)),
            "backoff": (np.float16, (rows,)),
            "unigram": (np.float16, (self.unigram.size,)),
        }
        for name, array in self.arrays().items():
            dtype, shape = wanted[name]
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
