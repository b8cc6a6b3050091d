"""Machines that tests do not run on, simulated."""

from __future__ import annotations

import pytest
import torch


def accelerator(monkeypatch: pytest.MonkeyPatch, *, kind: str, count: int) -> None:
    """A build of torch for accelerators of a kind, on a machine with so many of them."""
    named = torch.device(kind)
    monkeypatch.setattr(
        torch.accelerator,
        "current_accelerator",
        lambda check_available=False: named if count or not check_available else None,
    )
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
