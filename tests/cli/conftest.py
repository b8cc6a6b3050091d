"""What tests of several commands share: calibrations in the folder that a test runs in."""

from __future__ import annotations

import pytest
from helpers import random_calibration, stretches

from treeopt.calibration import Calibration
from treeopt.files.calibrations import save_calibration


@pytest.fixture
def calibration() -> Calibration:
    """Sixty texts under the default name."""
    made = stretches(1)
    save_calibration(made, "calibration.safetensors")
    return made


@pytest.fixture
def tasks() -> list[Calibration]:
    """Two tasks in `one.safetensors` and `two.safetensors`."""
    made = [stretches(1), random_calibration(2, heads=3)]
    for name, task in zip(("one", "two"), made, strict=True):
        save_calibration(task, f"{name}.safetensors")
    return made
