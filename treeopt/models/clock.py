"""The clock of every figure in seconds."""

from __future__ import annotations

import time

import torch

from treeopt.models.base import Base


def now(base: Base) -> float:
    """Seconds, read after the base's devices have finished their work."""
    for device in base.devices:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
    return time.perf_counter()


class Stopwatch:
    """The seconds of successive parts of a job, by name.

    Args:
        base: the model whose devices are waited for.
    """

    def __init__(self, base: Base) -> None:
        self.seconds: dict[str, float] = {}
        self._base = base
        self._last = now(base)

    def lap(self, name: str) -> None:
        """End a part: its seconds are those since the last one ended."""
        end = now(self._base)
        self.seconds[name], self._last = end - self._last, end
