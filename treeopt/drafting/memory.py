"""A memory across texts: drafters with an n-gram table find there what followed their last tokens in earlier texts.

Per-request and global statistics of served text are SuffixDecoding's idea (arXiv:2411.04975). Here the latest places of
the last tokens vote beside those in the text so far, with its fitted weights (`treeopt.drafter`).
"""

from __future__ import annotations

import copy
import hashlib
import os
import threading
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from treeopt.drafter import MAX_MATCH
from treeopt.drafting.kernel.data import KernelSource, remembered
from treeopt.errors import Code, TreeoptError, check_counts, memory_as_error
from treeopt.files.read import check_there
from treeopt.files.strict_yaml import Schema, of_json, reading
from treeopt.files.tensors import read_arrays, write_arrays

SCHEMA = "treeopt.memory/1"
MAX_BYTES = 1 << 27  # by default: 11 million tokens
_TOKENS = (1 << 31) - 1  # the largest vocabulary, and number of places
_LEAST_BYTES, _MOST_BYTES = 1 << 12, 12 * _TOKENS  # places are numbers of four bytes, and so is each of three arrays

T = TypeVar("T")


class MemoryHeader(Schema):
    """The header of a memory's file; its array `tokens` int32 [n] has the texts, oldest first, and -1 after each."""

    schema_name: str = Field(alias="schema")
    max_bytes: int = Field(ge=_LEAST_BYTES, le=_MOST_BYTES)
    vocab_size: int = Field(ge=0)


class Memory:
    """The latest tokens of ended texts, for any number of decoders and threads; the oldest are overwritten.

    Args:
        max_bytes: of its arrays, 12 a token; 4096 to 25.7 GB.

    Raises:
        ValueError: where `max_bytes` is out of range.

    A memory belongs to the vocabulary of its first decoder. Decoders add each text, prompt and answer, when all of its
    batch have ended; of a lossless rule no text changes. SECURITY.md says what a shared memory reveals.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        check_counts(max_bytes=max_bytes)
        if not _LEAST_BYTES <= max_bytes <= _MOST_BYTES:
            raise ValueError(f"max_bytes is {max_bytes}; a memory has {_LEAST_BYTES:,} to {_MOST_BYTES:,} bytes")
        self.max_bytes, self.vocab_size = int(max_bytes), 0
        self.arrays = remembered(self.max_bytes)
        self._lock = threading.Lock()

    def add(self, *texts: Sequence[int] | NDArray[np.int64]) -> None:
        """Add whole texts, prompts with answers, integers [n]; ValueError for others, or outside the vocabulary."""
        # Imported here as it imports numba, which takes half a second.
        from treeopt.drafting.kernel.memory import remember

        known = [np.asarray(text) for text in texts]
        wrong = [one for one in known if one.ndim != 1 or (one.size and one.dtype.kind not in "iu")]
        if wrong:
            raise ValueError(f"a text is token ids, integers [n], not {wrong[0].dtype} {list(wrong[0].shape)}")
        with self._lock:
            most = self.vocab_size or _TOKENS
            if not all(0 <= one.min(initial=0) <= one.max(initial=0) < most for one in known):
                raise ValueError(f"a text has a token outside the vocabulary of {most}")
            for text in known:
                remember(self.arrays, text.astype(np.int64))

    def merge(self, other: Memory) -> None:
        """Add all texts of another memory, as later ones; E223 where its vocabulary is another."""
        self.fit(other.vocab_size, "the memory to merge")
        self.add(*other.texts())

    def clear(self) -> None:
        """Forget all texts."""
        with self._lock:
            for array in self.arrays[:4]:
                array[:] = 0

    def texts(self) -> list[NDArray[np.int64]]:
        """The texts, oldest first; of the first the part that is left."""
        whole = self._stored()
        ends = np.flatnonzero(whole < 0)
        return [part[part >= 0].astype(np.int64) for part in np.split(whole, ends + 1)[: len(ends)]]

    def copy(self) -> Memory:
        """Another memory with the same texts."""
        made = Memory(self.max_bytes)
        made.merge(self)
        return made

    def fit(self, vocab_size: int, of: str) -> None:
        """Take over a vocabulary; E223 where the memory has another one, or tokens outside it."""
        with self._lock:
            stored = 0 if self.vocab_size else int(self.arrays.tokens.max())  # 1 + the largest token
            if vocab_size and (self.vocab_size not in (0, vocab_size) or stored > vocab_size):
                holds = self.vocab_size or stored
                what = f"the memory holds texts of {holds} tokens, the vocabulary of {of} has {vocab_size}"
                raise TreeoptError(Code.DRAFTER_MISMATCH, what, fix="a memory for each tokenizer")
            self.vocab_size = vocab_size or self.vocab_size

    @property
    def num_tokens(self) -> int:
        """Tokens that are stored now, with one separator for each text."""
        return min(int(self.arrays.end[0]), len(self.arrays.tokens))

    @property
    def id(self) -> str:
        """Hash of the stored texts."""
        return hashlib.sha256(self._stored().tobytes()).hexdigest()[:16]

    def _stored(self) -> NDArray[np.int32]:
        with self._lock:
            end, size = int(self.arrays.end[0]), len(self.arrays.tokens)
            return self.arrays.tokens[np.arange(max(0, end - size), end) % size] - np.int32(1)

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Write the texts atomically; E202 where the file exists and `overwrite` is off."""
        header = {"schema": SCHEMA, "max_bytes": self.max_bytes, "vocab_size": self.vocab_size}
        write_arrays(path, {"tokens": self._stored()}, header, overwrite=overwrite)


def load_memory(path: str | os.PathLike[str]) -> Memory:
    """Read a memory; E201 where the file is missing, E203 where it is invalid."""
    check_there(path, f"memory {path}", fix=f"treeopt generate --memory {path} makes it")
    arrays, found = read_arrays(path, SCHEMA)
    with reading(path, "memory"):
        header = of_json(MemoryHeader, found)
        [(name, tokens)] = arrays.items()
        with memory_as_error("a smaller memory"):
            made = Memory(header.max_bytes)
        fits = name == "tokens" and tokens.dtype == np.int32 and tokens.ndim == 1
        if not fits or len(tokens) > len(made.arrays.tokens) or (len(tokens) and tokens[-1] != -1):
            raise ValueError("it has no array tokens, int32 [n], of at most its bytes, whose last one is -1")
        if tokens.min(initial=0) < -1 or tokens.max(initial=-1) >= (header.vocab_size or _TOKENS):
            raise ValueError(f"a token lies outside the vocabulary of {header.vocab_size}")
        made.vocab_size = header.vocab_size
        made.add(*(text[text >= 0] for text in np.split(tokens, np.flatnonzero(tokens < 0))[:-1]))
    return made


def search(proposer: T, memory: Memory) -> T:
    """A copy of a drafter that searches a memory as well; E223 where it has no n-gram table, whose weights it needs."""
    if not isinstance(proposer, KernelSource) or not proposer.drafter.ngram_table or not proposer.drafter.window:
        what = "a memory was given, and the drafter does not search the text so far"
        raise TreeoptError(Code.DRAFTER_MISMATCH, what, fix="treeopt learn makes a drafter with an n-gram table")
    memory.fit(proposer.vocab_size, "the model")
    _ = proposer.record  # made once, not by each copy
    made = copy.copy(proposer)
    made.memory, made.window = memory.arrays, max(made.window, 2 * MAX_MATCH)  # tokens that `recall` compares
    return made
