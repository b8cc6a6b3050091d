"""The clock of every measurement of seconds in this room."""

from __future__ import annotations

import time

import torch

from treeopt.models.base import Base


def now(base: Base) -> float:
    """Seconds, after all work submitted to the device is done."""
    if base.device.type != "cpu":
        torch.accelerator.synchronize(base.device)
    return time.perf_counter()
