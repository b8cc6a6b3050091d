"""Metrics: tokens per step and speed of decoded texts, with their spread over the repeats."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from treeopt.decode.draft_metrics import DraftMetrics
from treeopt.evaluate.baselines import AUTOREGRESSIVE, GENERATE, TREE, Run
from treeopt.texts.encode import Text

_QUARTILES = (0.25, 0.5, 0.75)


@dataclass(frozen=True)
class Trial:
    """One text: its runs by baseline and repeat, and the tokens and steps that replay predicts for the tree.

    Replay is over the answer of stock generate; under typical acceptance, over the text of the tree.
    """

    text: Text  # the prompt and the answer of stock generate
    runs: Mapping[str, Sequence[Run]]  # by baseline, one a repeat
    predicted_steps: int = 0  # of the tree; 0 where nothing is predicted
    predicted_tokens: float = 0  # of these steps; under sampling those that the probabilities expect of them

    @property
    def prompt_id(self) -> str:
        return self.text.prompt_id

    @property
    def tokens(self) -> int:
        """New tokens of the tree's text."""
        return len(self.runs[TREE][0].tokens)

    @property
    def steps(self) -> int:
        """Steps of the tree."""
        return len(self.runs[TREE][0].step_lengths)

    @property
    def same(self) -> bool:
        """Whether the tree's text equals that of stock generate, which greedy acceptance is predicted on."""
        return self.runs[TREE][0].tokens == self.runs[GENERATE][0].tokens


@dataclass(frozen=True)
class Spread:
    """Median and quartiles over the repeats; with one repeat all three are equal."""

    median: float
    low: float
    high: float

    def __format__(self, spec: str) -> str:
        """`2.10 (2.05-2.14)`; one number for one repeat."""
        ends = "" if self.low == self.high else f" ({self.low:{spec}}-{self.high:{spec}})"
        return f"{self.median:{spec}}{ends}"


@dataclass(frozen=True)
class Metrics:
    """Totals over texts. Ratios are of sums over texts; spreads are over repeats, None where nothing was timed.

    The methods take the name of a baseline, or `TREE`. What names neither is of the tree, and needs trials with one.
    """

    trials: tuple[Trial, ...]

    @property
    def tokens(self) -> int:
        """New tokens of all texts, by the tree."""
        return sum(trial.tokens for trial in self.trials)

    @property
    def steps(self) -> int:
        """Steps of all texts, by the tree."""
        return sum(trial.steps for trial in self.trials)

    @property
    def predicted_tokens_per_step(self) -> float | None:
        """tau by replay: predicted tokens / predicted steps; None where nothing is predicted."""
        steps = sum(trial.predicted_steps for trial in self.trials)
        return sum(trial.predicted_tokens for trial in self.trials) / steps if steps else None

    def tokens_per_step(self, name: str = TREE) -> float:
        """tau: all tokens / all steps."""
        runs = self._runs(name, 0)
        return sum(len(run.tokens) for run in runs) / sum(len(run.step_lengths) for run in runs)

    def draft_metrics(self, name: str = TREE) -> DraftMetrics | None:
        """Verified and accepted drafts of all texts; None for stock decoding, which does not report them."""
        known = [run.drafts for run in self._runs(name, 0) if run.drafts is not None]
        return DraftMetrics.total(known) if len(known) == len(self.trials) else None

    def tokens_per_second(self, name: str = TREE) -> Spread | None:
        """Tokens after the prefill / seconds after the prefill."""
        return self._spread(lambda repeat: self._rate(name, repeat))

    def prefill_seconds(self, name: str = TREE) -> float:
        """Sum over all texts; the median over the repeats."""
        return float(np.median([sum(run.prefill_seconds for run in self._runs(name, r)) for r in range(self.repeats)]))

    @property
    def overhead(self) -> Spread | None:
        """Seconds of a tree step / seconds of an autoregressive step of our own loop."""
        return self._spread(self._overhead)

    def speedup(self, name: str = TREE) -> Spread | None:
        """Tokens per second / those of autoregressive decoding; tau / overhead for the tree."""
        return self._spread(lambda repeat: self._speedup(name, repeat))

    @property
    def by_category(self) -> dict[str, Metrics]:
        """Metrics of each category, in the order of the prompt file; empty where it has none."""
        names = dict.fromkeys(trial.text.category for trial in self.trials if trial.text.category is not None)
        return {name: Metrics(tuple(one for one in self.trials if one.text.category == name)) for name in names}

    @property
    def by_turn(self) -> dict[int, Metrics]:
        turns = sorted({trial.text.turn for trial in self.trials})
        return {turn: Metrics(tuple(one for one in self.trials if one.text.turn == turn)) for turn in turns}

    @property
    def repeats(self) -> int:
        return len(next(iter(self.trials[0].runs.values())))

    @property
    def baselines(self) -> tuple[str, ...]:
        """Names of the baselines and of the tree."""
        return tuple(self.trials[0].runs)

    def _runs(self, name: str, repeat: int) -> list[Run]:
        return [trial.runs[name][repeat] for trial in self.trials]

    def _rate(self, name: str, repeat: int) -> float | None:
        runs = self._runs(name, repeat)
        tokens, seconds = sum(len(run.tokens) - run.prefilled for run in runs), sum(run.seconds for run in runs)
        return tokens / seconds if tokens and seconds else None

    def _overhead(self, repeat: int) -> float | None:
        if self._rate(TREE, repeat) is None or self._rate(AUTOREGRESSIVE, repeat) is None:
            return None
        tree, plain = (self._runs(name, repeat) for name in (TREE, AUTOREGRESSIVE))
        return _seconds_per_step(tree) / _seconds_per_step(plain)

    def _speedup(self, name: str, repeat: int) -> float | None:
        if name == TREE:
            overhead = self._overhead(repeat)
            return None if overhead is None else self.tokens_per_step() / overhead
        rate, plain = self._rate(name, repeat), self._rate(AUTOREGRESSIVE, repeat)
        return None if rate is None or plain is None else rate / plain

    def _spread(self, value: Callable[[int], float | None]) -> Spread | None:
        known = [one for one in map(value, range(self.repeats)) if one is not None]
        if len(known) < self.repeats:
            return None
        low, median, high = np.quantile(known, _QUARTILES).tolist()
        return Spread(median, low, high)


def _seconds_per_step(runs: Sequence[Run]) -> float:
    return sum(run.seconds for run in runs) / sum(len(run.step_lengths) for run in runs)
