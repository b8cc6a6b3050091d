"""Seeds and temperatures: what no generator or softmax takes is a ValueError that names it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from looped import looped

from treeopt.sampling import LARGEST_SEED, LEAST_TEMPERATURE, check_seed, check_temperature


@looped("seed", [0, 7, LARGEST_SEED, np.int64(3)])
def test_seeds_that_generators_take(seed: int) -> None:
    """They pass, and torch takes them."""
    check_seed(seed)
    torch.Generator().manual_seed(int(seed))


@looped("seed", [-1, LARGEST_SEED + 1, 1.0, True, "1", None, math.nan])
def test_other_seeds_are_refused(seed: int) -> None:
    """The message has the value."""
    with pytest.raises(ValueError, match="a seed is a whole number"):
        check_seed(seed)


@looped("temperature", [0, 0.0, LEAST_TEMPERATURE, 1, np.float32(0.5), 1e300])
def test_temperatures_that_logits_are_divided_by(temperature: float) -> None:
    """They pass, and leave logits numbers."""
    check_temperature(temperature)
    assert temperature == 0 or torch.isfinite(torch.tensor([30.0, -30.0]) / float(temperature)).all()


@looped("temperature", [-1, 1e-300, 9e-7, math.nan, math.inf, True, "1", None])
def test_other_temperatures_are_refused(temperature: float) -> None:
    """The message has the value."""
    with pytest.raises(ValueError, match="a temperature is 0, or"):
        check_temperature(temperature)
