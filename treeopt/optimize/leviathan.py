"""Speculative decoding with a chain of drafts by the formulas of arXiv:2211.17192, and by replay.

    tokens per step of g drafts = (1 - alpha^(g+1)) / (1 - alpha)        (equation 1)
    speedup = tokens per step / (g c + 1)                                (theorem 3.8)

alpha is the acceptance rate of one draft, c the seconds of one forward of the draft model ÷ those of one of the target.
The formulas assume that drafts are accepted independently of each other, and that the target verifies g drafts in the
time of one token. Replay makes the second assumption only: it counts the steps of the chain on real traces.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treeopt.calibration import Calibration
from treeopt.optimize.replay import visits

MOST_DRAFTS = 16  # longest chain that is considered


@dataclass(frozen=True)
class ChainFigures:
    """A chain of `drafts` drafts: tokens per step and speedup by the formulas, and by replay.

    Those by replay are None where the traces have fewer levels than the chain has drafts.
    """

    drafts: int
    tokens_per_step: float
    speedup: float
    replayed_tokens_per_step: float | None
    replayed_speedup: float | None


@dataclass(frozen=True)
class ChainPrediction:
    """Chains of 1 to `MOST_DRAFTS` drafts from one acceptance rate and one cost ratio.

    Args:
        alpha: acceptance rate of a draft, 0 to 1.
        cost: c, seconds of a forward of the draft model ÷ seconds of one of the target.
        chains: the figures of each length, ascending from 1.
    """

    alpha: float
    cost: float
    chains: tuple[ChainFigures, ...]

    @property
    def best_drafts(self) -> int:
        """Length of the chain with the greatest speedup by the formulas; 0 where none is above 1."""
        return best_drafts(self.alpha, self.cost, len(self.chains))

    @property
    def best_replayed_drafts(self) -> int:
        """Length of the chain with the greatest speedup by replay; 0 where none is above 1."""
        replayed = {chain.drafts: chain.replayed_speedup for chain in self.chains}
        return _fastest({drafts: value for drafts, value in replayed.items() if value is not None})

    def chain(self, drafts: int) -> ChainFigures:
        """The figures of a chain of this many drafts, from 1."""
        return self.chains[drafts - 1]


def predict_chains(calibration: Calibration, cost: float, alpha: float | None = None) -> ChainPrediction:
    """The figures of chains by the formulas and by replay over the traces of a calibration.

    Args:
        calibration: traces of a draft model; rank 0 of each level is the token of the chain.
        cost: c, 0 or more.
        alpha: acceptance rate; None: `greedy_acceptance` of the calibration.

    Raises:
        ValueError: where a number is out of range.
    """
    rate = greedy_acceptance(calibration) if alpha is None else alpha
    replayed = replayed_chains(calibration)

    def figures(drafts: int) -> ChainFigures:
        known = float(replayed[drafts - 1]) if drafts <= len(replayed) else None
        fast = None if known is None else known / _step_cost(drafts, cost)
        return ChainFigures(drafts, expected_tokens(rate, drafts), speedup(rate, drafts, cost), known, fast)

    return ChainPrediction(rate, cost, tuple(figures(drafts) for drafts in range(1, MOST_DRAFTS + 1)))


def greedy_acceptance(calibration: Calibration) -> float:
    """alpha of greedy decoding: share of positions where the drafter's best next token is the target's.

    These are all positions of the texts that have a next token; 0.0 where there are none.
    """
    return float(calibration.accuracy[0, 0])


def sampled_acceptance(target: NDArray[np.floating], draft: NDArray[np.floating]) -> float:
    """alpha of sampling: the mean of sum_x min(p(x), q(x)) over positions (corollary 3.6).

    Args:
        target: p, float [n, V], the target's probabilities at n positions, n at least 1.
        draft: q, float [n, V], those of the draft model.

    Raises:
        ValueError: where the shapes differ, are empty, or a row is no distribution.
    """
    p, q = np.asarray(target, np.float64), np.asarray(draft, np.float64)
    if p.shape != q.shape or p.ndim != 2 or not p.size:
        raise ValueError(f"probabilities [n, V] of target and draft, not {list(p.shape)} and {list(q.shape)}")
    for rows in (p, q):
        if not (rows >= 0).all() or not np.allclose(rows.sum(1), 1.0, atol=1e-3):
            raise ValueError("a row of probabilities is negative or does not sum to 1")
    return min(float(np.minimum(p, q).sum(1).mean()), 1.0)


def cost_ratio(draft_seconds: float, target_seconds: float) -> float:
    """c: seconds of one forward of the draft model over one token ÷ those of the target.

    Raises:
        ValueError: where a time is negative or not finite, or that of the target is 0.
    """
    if not 0 <= draft_seconds < math.inf or not 0 < target_seconds < math.inf:
        raise ValueError(f"{draft_seconds!r} and {target_seconds!r} seconds: they must be finite and not negative")
    return draft_seconds / target_seconds


def expected_tokens(alpha: float, drafts: int) -> float:
    """Tokens per step of a chain of `drafts` drafts (0 or more), each accepted with probability `alpha`.

    >>> expected_tokens(0.5, 2)
    1.75

    Raises:
        ValueError: where a number is out of range.
    """
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha {alpha!r}: an acceptance rate is from 0 to 1")
    if drafts < 0:
        raise ValueError(f"{drafts!r} drafts: a chain has 0 or more")
    return math.fsum(alpha**i for i in range(drafts + 1))  # the sum is exact where alpha is 1, or nearly


def speedup(alpha: float, drafts: int, cost: float) -> float:
    """Tokens per second with a chain of `drafts` drafts ÷ autoregressive tokens per second.

    >>> speedup(0.5, 2, 0.125)
    1.4

    Raises:
        ValueError: where a number is out of range.
    """
    return expected_tokens(alpha, drafts) / _step_cost(drafts, cost)


def best_drafts(alpha: float, cost: float, most: int = MOST_DRAFTS) -> int:
    """The number of drafts, 1 to `most`, with the greatest speedup, the smaller of equal ones; 0 where none is above 1.

    >>> best_drafts(0.8, 0.1), best_drafts(0.1, 0.2)
    (5, 0)

    Raises:
        ValueError: where a number is out of range.
    """
    return _fastest({drafts: speedup(alpha, drafts, cost) for drafts in range(1, most + 1)})


def replayed_chains(calibration: Calibration) -> NDArray[np.float64]:
    """Tokens per step of chains of 1, 2, ... drafts by replay, up to `MOST_DRAFTS` and the levels: float64 [n].

    All are 1.0 where the calibration holds no text.
    """
    levels = min(calibration.num_heads, MOST_DRAFTS)
    right = np.logical_and.accumulate(calibration.ranks[:, :levels] == 0, axis=1)
    steps = [int(visits(right[:, :drafts].sum(1, dtype=np.int8)).sum()) for drafts in range(1, levels + 1)]
    return np.array([calibration.positions / count if count else 1.0 for count in steps])


def _step_cost(drafts: int, cost: float) -> float:
    """Seconds of a step of a chain ÷ seconds of a step without drafts."""
    if not 0 <= cost < math.inf:
        raise ValueError(f"cost ratio {cost!r}: it is a finite number from 0")
    return drafts * cost + 1.0


def _fastest(speedups: dict[int, float]) -> int:
    """The number of drafts with the greatest speedup, the smallest of equal ones; 0 where none is above 1."""
    value: Callable[[int], float] = speedups.__getitem__
    best = max(sorted(speedups), key=value, default=0)
    return best if best and speedups[best] > 1 else 0
