"""Fit a drafter's numbers: those under which the tokens that came were likeliest among the candidates.

Each level is a conditional logit model: the chance of a candidate is the softmax of its score. Maximum likelihood is a
convex problem in a handful of numbers, so it has one answer and takes seconds. No gradient goes through base or heads:
their outputs enter as constants.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treeopt.drafter import MAX_MATCH, Level
from treeopt.drafting.interface import Features
from treeopt.optimize.isotonic import isotonic

RIDGE = 1e-4  # keeps near 0 what the text says nothing about
_STEPS = 60
_JUDGED = 8  # candidates of a node whose estimates are compared with what came: those that trees are made of
_UNLIKELY = math.log(1e-4)  # candidates below are in no tree
_GROUPS, _GROUP = 64, 50  # most groups of like estimates, and fewest candidates of one
_AS_GOOD = 1 - 1e-9  # rates nearer than this differ by rounding alone
_OUTSIDE = 3 + MAX_MATCH  # column of the constant, behind head, prior, ngram and prompt_lookup


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

    def only(self, chosen: NDArray[np.bool_]) -> Evidence:
        """These positions."""
        return Evidence(self.numbers[chosen], self.shut[chosen], self.came[chosen])


def evidence(found: Features, true: NDArray[np.int64]) -> Evidence:
    """The evidence of one level.

    Args:
        found: candidates [n, C].
        true: int64 [n], the tokens that came.
    """
    rows, slots = found.tokens.shape
    numbers = np.zeros((rows, slots + 1, _OUTSIDE + 1), np.float32)
    numbers[:, :slots, :3] = np.stack([found.head, found.prior, found.ratios], axis=-1)
    lengths = np.minimum(found.length, MAX_MATCH)
    matched = np.flatnonzero(lengths)
    numbers[matched, :slots, 2 + lengths[matched]] = found.prompt_lookup[matched]
    numbers[:, slots, _OUTSIDE] = 1.0
    shut = np.concatenate([found.again, np.zeros((rows, 1), np.bool_)], axis=1)
    hit = (found.tokens == true[:, None]) & ~found.again
    return Evidence(numbers, shut, np.where(hit.any(1), hit.argmax(1), slots))


def fit_level(parts: Sequence[Evidence]) -> Level:
    """The numbers of one level.

    Args:
        parts: evidence, all of it alike; without a position in any it is the plain level.
    """
    if not any(len(part.came) for part in parts):
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
        value.backward()  # type: ignore[no-untyped-call]  # torch leaves it without types
        return value

    optimiser.step(loss)  # type: ignore[no-untyped-call]  # likewise
    head, prior, ngram, *prompt_lookup, outside = fitted.tolist()
    with torch.no_grad():
        estimated = (numbers @ fitted).masked_fill(shut, -torch.inf).log_softmax(-1)[:, :-1]
    hit = torch.nn.functional.one_hot(came, numbers.shape[1])[:, :-1]
    likely, places = estimated.topk(min(_JUDGED, estimated.shape[1]), dim=1)
    odds = fit_odds(likely.numpy().ravel(), hit.gather(1, places).numpy().ravel())
    return Level(head, prior, ngram, tuple(prompt_lookup), outside, odds)


def fit_odds(estimated: NDArray[np.float64], came: NDArray[np.int64]) -> tuple[tuple[float, float], ...]:
    """How often candidates of each estimated probability came: a rising curve, in log-odds.

    Candidates are put into groups of like estimates; groups that would fall are joined with their neighbours until none
    does (isotonic regression).

    Args:
        estimated: float64 [n], log-probabilities.
        came: int64 [n], 1 where the candidate came.

    Returns:
        Pairs of log-odds, estimated and found, as `treeopt.drafter.Level` holds them.
    """
    chance = estimated > _UNLIKELY
    estimated, came = estimated[chance], came[chance]
    if len(came) < 2 * _GROUP:
        return ()
    _, alike, times = np.unique(estimated, return_inverse=True, return_counts=True)
    rate = (np.bincount(alike, came) / times)[alike]  # equal estimates share their hits, whichever group they are in
    order = np.argsort(estimated, kind="stable")
    groups = np.array_split(order, min(_GROUPS, len(order) // _GROUP))
    # [groups, 3]: sum of estimates, hits, candidates
    sums = np.array([(np.exp(estimated[group]).sum(), rate[group].sum(), len(group)) for group in groups])
    fitted = isotonic(sums[:, 1] / sums[:, 2], sums[:, 2])
    starts = np.flatnonzero(np.append(True, fitted[:-1] < fitted[1:] * _AS_GOOD))
    pooled: list[tuple[float, float, float]] = [tuple(row) for row in np.add.reduceat(sums, starts).tolist()]
    pairs: list[tuple[float, float]] = []
    for total, hits, size in pooled:
        # Half a hit and half a miss more keep odds finite; where that makes them fall, or estimates are equal, none.
        pair = _log_odds(total / size), _log_odds((hits + 0.5) / (size + 1))
        if not pairs or (pair[0] > pairs[-1][0] and pair[1] >= pairs[-1][1]):
            pairs.append(pair)
    return tuple(pairs)


def _log_odds(probability: float) -> float:
    kept = min(probability, 1 - 1e-9)
    return math.log(kept) - math.log1p(-kept)
