"""Seeds of random numbers: what every generator that is used here takes."""

from __future__ import annotations

LARGEST_SEED = 2**63 - 1


def check_seed(seed: int) -> None:
    """Raise ValueError unless the seed is one that torch's generator takes."""
    if not 0 <= seed <= LARGEST_SEED:
        raise ValueError(f"seed must be from 0 to {LARGEST_SEED}, not {seed}")
