"""The bound on logits in memory at once: with 150,000 tokens those of a few hundred positions take gigabytes.

A function over the logits of many positions works on a few rows at a time. No row depends on another, so the results
are those of all rows at once.
"""

from __future__ import annotations

LOGITS_BYTES = 64 * 1024 * 1024  # of logits at once, in float32; with the temporary arrays of a function up to 256 MiB
_FLOAT32 = 4


def rows_at_once(vocab_size: int, levels: int = 1) -> int:
    """The number of positions whose float32 logits, of so many levels each, are in memory at once; at least 1."""
    return max(1, LOGITS_BYTES // (max(1, levels) * vocab_size * _FLOAT32))
