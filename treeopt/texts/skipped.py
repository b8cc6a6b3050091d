"""Prompts that were left out."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Skipped:
    """A prompt that was left out: its length in tokens, and the reason."""

    prompt_id: str
    tokens: int
    reason: str
