"""The n-gram table record: the likeliest successors of contexts of one to four tokens, with their probabilities."""

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treeopt.errors import Code, TreeoptError

CONTEXT = 4  # tokens of the longest stored context; more were no better (docs/develop/method.md)
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

    Raises:
        TreeoptError: E222 where shapes, types or order are wrong.
    """

    keys: NDArray[np.int64]  # int64 [Z], ascending, `context_keys` of the stored contexts; row z + 1 is that of keys[z]
    tokens: NDArray[np.int32]  # int32 [Z+1, S], the successors, the likeliest first; at least one
    ratios: NDArray[np.float16]  # float16 [Z+1, S], log P(y | c) - log U(y), at least the row's backoff
    backoff: NDArray[np.float16]  # float16 [Z+1], the ratio of all tokens that are not in the row
    unigram: NDArray[np.float16]  # float16 [V], log U
    num_tokens: int  # tokens that were counted

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
        return {name: getattr(self, name) for name in ("keys", "tokens", "ratios", "backoff", "unigram")}

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
    below 2^-42. Both are int64 [..., CONTEXT]; the last token is the first of `context`.
    """
    keys: NDArray[np.int64] = (context * MULTIPLIERS).cumsum(-1)
    keys &= HASH_MASK
    keys += _KEY_ORDERS
    return keys
