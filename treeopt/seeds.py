"""Seeds of random numbers: what every generator that is used here takes."""

from __future__ import annotations

from numbers import Integral

LARGEST_SEED = 2**63 - 1


def check_seed(seed: int) -> None:
    """Raise ValueError unless the seed is a whole number that torch's generator takes."""
    if not isinstance(seed, Integral) or isinstance(seed, bool) or not 0 <= seed <= LARGEST_SEED:
        raise ValueError(f"seed {seed!r}: a seed is a whole number from 0 to {LARGEST_SEED}")
