"""Seeds of batches, and checks of seeds and temperatures."""

import math
from numbers import Integral, Real

LARGEST_SEED = 2**63 - 1
_SEED_STEP = 1_000_003  # distance of the first batches' seeds of two runs, so that their batches share no seed
_APART = 2**31  # between the seeds of answers and of sampled text; the generator of the CPU reads 32 bits of a seed
LEAST_TEMPERATURE = 1e-6  # of those above 0: logits divided by a smaller number overflow


def check_seed(seed: int) -> None:
    """Raise ValueError unless the seed is a whole number that the generator of torch takes."""
    if not isinstance(seed, Integral) or isinstance(seed, bool) or not 0 <= seed <= LARGEST_SEED:
        raise ValueError(f"seed {seed!r}: a seed is a whole number from 0 to {LARGEST_SEED}")


def check_temperature(temperature: float) -> None:
    """Raise ValueError unless the temperature is 0, or finite and at least `LEAST_TEMPERATURE`."""
    number = isinstance(temperature, Real) and not isinstance(temperature, bool)
    if not number or (temperature != 0 and not LEAST_TEMPERATURE <= temperature < math.inf):
        raise ValueError(f"temperature {temperature!r}: a temperature is 0, or finite and at least {LEAST_TEMPERATURE}")


def sample_seed(seed: int, number: int) -> int:
    """The seed of a batch of text to learn from; that of the batch of answers of the same number is another one."""
    return (batch_seed(seed, number) + _APART) % (LARGEST_SEED + 1)


def batch_seed(seed: int, number: int) -> int:
    """The seed of a batch, by the seed of the run and the batch's number: batches can be made in any order."""
    return (seed * _SEED_STEP + number) % (LARGEST_SEED + 1)
