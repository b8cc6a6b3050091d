"""Tokens and steps of each text, and tokens per step with its standard error."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

FEWEST = 2  # independent parts of a standard error


@dataclass(frozen=True, eq=False)
class TextSums:
    """Tokens and steps of S texts with one tree or policy.

    Args:
        tokens: [S], tokens of each text. Under sampling float64, the tokens that the target's probabilities expect of
            the text's steps, which is not the length of the text.
        steps: int64 [S]; float64 where texts are weighted.
        counted: [S], under sampling the lengths of the texts; None where `tokens` are.
    """

    tokens: NDArray[Any]
    steps: NDArray[Any]
    counted: NDArray[Any] | None = None

    @property
    def columns(self) -> list[NDArray[Any]]:
        """The arrays that are known, in this order."""
        return [self.tokens, self.steps, *([] if self.counted is None else [self.counted])]

    @property
    def tokens_per_step(self) -> float:
        """tau = sum of tokens / sum of steps (not the mean of ratios); 1.0 where there is no text."""
        steps = self.steps.sum()
        return float(self.tokens.sum() / steps) if steps else 1.0

    def weighted(self, weights: NDArray[np.float64]) -> TextSums:
        """The sums times the weight of each text, float64 [S]."""
        return TextSums(*(column * weights for column in self.columns))

    @classmethod
    def of_folds(cls, folds: NDArray[np.int64], parts: Sequence[TextSums]) -> TextSums:
        """Sums of all texts from those of each fold, ascending; `folds` int64 [S] are the folds of the texts."""
        order = np.argsort(np.argsort(folds, kind="stable"), kind="stable")
        return cls(*(np.concatenate(columns)[order] for columns in zip(*(part.columns for part in parts), strict=True)))

    @property
    def standard_error(self) -> float | None:
        """Standard error of `tokens_per_step`, clustered by text, as `standard_error`."""
        return standard_error(self.tokens, self.steps)


def standard_error(tokens: NDArray[Any], steps: NDArray[Any]) -> float | None:
    """Standard error of sum of tokens / sum of steps; None below two clusters.

    That of a ratio estimator: sqrt(S/(S-1) * sum over clusters of (tokens - tau * steps)^2) / sum of steps.

    Args:
        tokens: [S], of each independent cluster of texts.
        steps: [S], likewise.
    """
    count, total = len(tokens), float(steps.sum())
    if count < FEWEST or not total:
        return None
    spread = float(((tokens - tokens.sum() / total * steps) ** 2).sum())
    return math.sqrt(spread * count / (count - 1)) / total
