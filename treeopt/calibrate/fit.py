"""Fit a drafter's numbers: those under which the tokens that came were likeliest among the candidates.

Each level is a conditional logit model: the chance of a candidate is the softmax of its score. Maximum likelihood is a
convex problem in a handful of numbers, so it has one answer and takes seconds. No gradient goes through base or heads:
their outputs enter as constants.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treeopt.drafter import LONGEST, Level
from treeopt.models.draft import Candidates

RIDGE = 1e-4  # keeps near 0 what the text says nothing about
_STEPS = 60
_OUTSIDE = 3 + LONGEST  # column of the constant, behind head, prior, transition and copied


@dataclass(frozen=True, eq=False)
class Evidence:
    """What speaks for each candidate at n positions; the last candidate stands for all tokens outside.

    Args:
        numbers: float32 [n, C + 1, columns].
        shut: bool [n, C + 1], repeated candidates.
        came: int64 [n], which candidate came.
    """

    numbers: NDArray[np.float32]
    shut: NDArray[np.bool_]
    came: NDArray[np.int64]


def evidence(found: Candidates, true: NDArray[np.int64]) -> Evidence:
    """The evidence of one level.

    Args:
        found: candidates [n, C].
        true: int64 [n], the tokens that came.
    """
    rows, slots = found.tokens.shape
    numbers = np.zeros((rows, slots + 1, _OUTSIDE + 1), np.float32)
    numbers[:, :slots, :3] = np.stack([found.head, found.prior, found.ratios], axis=-1)
    lengths = np.minimum(found.length, LONGEST)
    matched = np.flatnonzero(lengths)
    numbers[matched, :slots, 2 + lengths[matched]] = found.copied[matched]
    numbers[:, slots, _OUTSIDE] = 1.0
    shut = np.concatenate([found.again, np.zeros((rows, 1), np.bool_)], axis=1)
    hit = (found.tokens == true[:, None]) & ~found.again
    return Evidence(numbers, shut, np.where(hit.any(1), hit.argmax(1), slots))


def fit_level(parts: Sequence[Evidence]) -> Level:
    """The numbers of one level.

    Args:
        parts: evidence, all of it alike; none gives the plain level.
    """
    if not parts:
        return Level()
    numbers = torch.from_numpy(np.concatenate([part.numbers for part in parts])).double()
    shut = torch.from_numpy(np.concatenate([part.shut for part in parts]))
    came = torch.from_numpy(np.concatenate([part.came for part in parts]))
    fitted = torch.zeros(numbers.shape[-1], dtype=torch.float64)
    fitted[0] = 1.0
    fitted[-1] = -5.0
    fitted.requires_grad_()
    begin = fitted.detach().clone()
    optimiser = torch.optim.LBFGS([fitted], max_iter=_STEPS, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimiser.zero_grad()
        scores = (numbers @ fitted).masked_fill(shut, -torch.inf)
        value = torch.nn.functional.cross_entropy(scores, came) + RIDGE * (fitted - begin).square().sum()
        value.backward()
        return value

    optimiser.step(loss)
    head, prior, transition, *copied, outside = fitted.tolist()
    return Level(head, prior, transition, tuple(copied), outside)
