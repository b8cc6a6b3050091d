"""Chains shorter than the one that an engine ran, from its counts of accepted drafts alone."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treeopt.errors import Code, TreeoptError, counted
from treeopt.facts import Column, Part, Table
from treeopt.optimize.chains import MeasuredAcceptance, acceptance_rates, mean_acceptance

ALLOWANCE = 0.03  # of an estimate, for what the counts do not say; bench/counters.py compares with replay
_CORRELATED = 2.0  # variance of counts over that of independent steps: steps of one text are alike
_NORMAL = 1.645  # standard errors of a 90 % interval
_LONGER = 0.02  # tokens per step that one more draft would add, from which a longer chain is worth a measurement


@dataclass(frozen=True)
class ChainEstimate:
    """Estimated tokens per step of a chain of `drafts` drafts, with a 90 % interval."""

    drafts: int
    tokens_per_step: float
    low: float
    high: float


@dataclass(frozen=True)
class CounterEstimates:
    """Chains of 0, 1, ... K drafts from the counts of an engine that ran a chain of K."""

    # [K+1]; the last one is the measured one, and its interval is that of the counts alone
    chains: tuple[ChainEstimate, ...]
    steps: int  # that were counted
    rates: tuple[float, ...]  # [K], share of the steps that accept d drafts or more, d = 1 .. K

    @property
    def last_rate(self) -> float:
        """Share of the steps that accepted all K drafts."""
        return self.rates[-1] if self.rates else 0.0

    @property
    def tokens(self) -> tuple[float, ...]:
        """Tokens per step of chains of 0, 1, ... drafts."""
        return tuple(chain.tokens_per_step for chain in self.chains)

    @property
    def longest(self) -> int:
        """K, the drafts of the chain that was measured."""
        return len(self.chains) - 1

    def too_short(self, best: int | None) -> bool:
        """Whether a longer chain may be the fastest: `best` drafts are, or None where no step times are known."""
        return best == self.longest or (best is None and self.last_rate >= _LONGER)

    def report(self) -> Iterator[Part]:
        """The chains with their intervals."""
        yield (
            f"estimated from {counted(self.steps, 'step')} with {counted(self.longest, 'draft')}; "
            "90 % intervals, of the counts and of the estimate"
        )
        columns = (
            Column("drafts", "drafts"),
            Column("tokens per step", "tokens_per_step", ".3f"),
            Column("low", "low", ".3f"),
            Column("high", "high", ".3f"),
        )
        yield Table(columns, self.chains, key="estimates")


def estimate_chains(measured: MeasuredAcceptance) -> CounterEstimates:
    """Tokens per step of all chains up to the measured one.

    A step that accepts a < K drafts ends a run of right tokens; one of K accepted drafts is joined with the step after
    it, as far as its last token was right too. Whether it was is not counted: after K right tokens each further one is
    taken to be right with the probability of the last draft after the others. A chain of k drafts takes ceil(L / (k +
    1)) steps for a run and its wrong token, L tokens. That is exact where a draft depends on the text alone and its
    chance on the token before, and an estimate for drafters whose levels differ, such as heads.

    Raises:
        TreeoptError: E203 where the engine gives the mean alone.
    """
    if measured.histogram is None:
        what = "the engine gives the mean alone: shorter chains need its counts by position, or a histogram"
        raise TreeoptError(Code.FILE_INVALID, what, fix="counts by position, or --calibration")
    histogram = np.trim_zeros(np.asarray(measured.histogram, np.float64), "b")
    longest = len(measured.histogram) - 1
    counts = np.zeros(longest + 1)
    counts[: len(histogram)] = histogram
    steps = counts.sum()
    draws = np.random.default_rng(0).multinomial(int(steps / _CORRELATED) or 1, counts / steps, size=200)
    chains = [ChainEstimate(0, 1.0, 1.0, 1.0)]
    for drafts in range(1, longest + 1):
        tokens = _tokens(counts, drafts)
        allowed = 0.0 if drafts == longest else ALLOWANCE * tokens
        spread = float(np.hypot(np.std([_tokens(draw, drafts) for draw in draws]) * _NORMAL, allowed))
        chains.append(ChainEstimate(drafts, tokens, max(tokens - spread, 1.0), min(tokens + spread, drafts + 1.0)))
    return CounterEstimates(tuple(chains), int(steps), acceptance_rates(measured.histogram))


def _tokens(counts: Sequence[float] | NDArray[np.floating] | NDArray[np.integer], drafts: int) -> float:
    """Tokens per step of a chain of `drafts` from steps by accepted drafts, [K+1]."""
    longest = len(counts) - 1
    if drafts == longest:
        return mean_acceptance([int(count) for count in counts])
    rates = np.cumsum(np.asarray(counts, np.float64)[::-1])[::-1] / np.sum(counts)  # P(>= d), d = 0 .. K
    right = float(rates[-1] / rates[-2]) if rates[-2] else 0.0
    inside = float(rates[-1]) * right  # share of the steps that begin within a run
    # Of the steps at the begin of a run, as a share of all: rates - inside * right^d, which is P(L > d). The shorter
    # chain takes a step at 0, k + 1, 2 (k + 1), ... of the run, and the sum beyond K is a geometric one.
    places = np.arange(0, longest + 1, drafts + 1)
    begun = np.maximum(rates[places] - inside * right**places, 0.0).sum()
    powers = np.cumsum(right ** np.arange(longest + 1))
    further = rates[-1] * right ** (int(places[-1]) + drafts + 1 - longest) * powers[-1] / powers[drafts]
    return float(np.clip(rates.sum() / (begun + further), 1.0, drafts + 1.0))
