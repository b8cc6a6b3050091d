"""Figures: tokens per step and speed of texts decoded several ways, with their spread over the repeats."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from treeopt.evaluate.baselines import Run

GENERATE, LOOKUP, AUTOREGRESSIVE, TREE = "generate", "prompt lookup", "autoregressive", "tree"
_QUARTILES = (0.25, 0.5, 0.75)


@dataclass(frozen=True)
class Trial:
    """One text: how each way decoded it, in every repeat, and how many steps replay said that the tree would take.

    `turn` counts from 1; `category` is the prompt file's own, None where it has none.
    """

    prompt_id: str
    category: str | None
    turn: int
    runs: Mapping[str, Sequence[Run]]
    predicted_steps: int

    @property
    def tokens(self) -> int:
        """New tokens of the tree's text."""
        return len(self.runs[TREE][0].tokens)

    @property
    def steps(self) -> int:
        """Steps that the tree took."""
        return len(self.runs[TREE][0].step_lengths)

    @property
    def same(self) -> bool:
        """Whether the tree's text is that of stock generate, which the prediction was made on."""
        return self.runs[TREE][0].tokens == self.runs[GENERATE][0].tokens


@dataclass(frozen=True)
class Spread:
    """Median and quartiles over the repeats; all three are the one value where there was one repeat."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Figures:
    """What some texts add up to. Sums over texts come first, ratios of them after; spreads are over repeats."""

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
    def predicted_tokens_per_step(self) -> float:
        """tau by replay: tokens of stock generate / predicted steps."""
        tokens = sum(len(trial.runs[GENERATE][0].tokens) for trial in self.trials)
        return tokens / sum(trial.predicted_steps for trial in self.trials)

    def tokens_per_step(self, way: str = TREE) -> float:
        """tau: all tokens / all steps."""
        runs = [trial.runs[way][0] for trial in self.trials]
        return sum(len(run.tokens) for run in runs) / sum(len(run.step_lengths) for run in runs)

    def tokens_per_second(self, way: str = TREE) -> Spread | None:
        """Tokens that came after the prefill, per second after it; None where there were none."""
        return self._spread(lambda repeat: self._rate(way, repeat))

    def prefill_seconds(self, way: str = TREE) -> float:
        """Of all texts; the median over the repeats."""
        return float(np.median([sum(run.prefill_seconds for run in self._runs(way, r)) for r in range(self.repeats)]))

    @property
    def overhead(self) -> Spread | None:
        """Seconds of a tree step / seconds of a one-token step of our own loop without heads; None untimed."""
        return self._spread(self._overhead)

    def speedup(self, way: str = TREE) -> Spread | None:
        """Tokens a second / one by one. Of the tree it is tau / overhead. None untimed."""
        return self._spread(lambda repeat: self._speedup(way, repeat))

    @property
    def by_category(self) -> dict[str, Figures]:
        """Those of each category of the prompt file, in its order; none where the file has none."""
        names = dict.fromkeys(trial.category for trial in self.trials if trial.category is not None)
        return {name: Figures(tuple(one for one in self.trials if one.category == name)) for name in names}

    @property
    def by_turn(self) -> dict[int, Figures]:
        """Those of first turns, of second turns, and so on."""
        turns = sorted({trial.turn for trial in self.trials})
        return {turn: Figures(tuple(one for one in self.trials if one.turn == turn)) for turn in turns}

    @property
    def repeats(self) -> int:
        """How often each text was decoded each way."""
        return len(self.trials[0].runs[TREE])

    @property
    def ways(self) -> tuple[str, ...]:
        """The ways that the texts were decoded."""
        return tuple(self.trials[0].runs)

    def _runs(self, way: str, repeat: int) -> list[Run]:
        return [trial.runs[way][repeat] for trial in self.trials]

    def _rate(self, way: str, repeat: int) -> float | None:
        runs = self._runs(way, repeat)
        tokens, seconds = sum(len(run.tokens) - run.prefilled for run in runs), sum(run.seconds for run in runs)
        return tokens / seconds if tokens and seconds else None

    def _overhead(self, repeat: int) -> float | None:
        if self._rate(TREE, repeat) is None or self._rate(AUTOREGRESSIVE, repeat) is None:
            return None
        tree, plain = (_seconds_per_step(self._runs(way, repeat)) for way in (TREE, AUTOREGRESSIVE))
        return tree / plain

    def _speedup(self, way: str, repeat: int) -> float | None:
        if way == TREE:
            overhead = self._overhead(repeat)
            return None if overhead is None else self.tokens_per_step() / overhead
        rate, plain = self._rate(way, repeat), self._rate(AUTOREGRESSIVE, repeat)
        return None if rate is None or plain is None else rate / plain

    def _spread(self, value: Callable[[int], float | None]) -> Spread | None:
        values = [value(repeat) for repeat in range(self.repeats)]
        known = [one for one in values if one is not None]
        if len(known) < len(values):
            return None
        low, median, high = np.quantile(known, _QUARTILES).tolist()
        return Spread(median, low, high)


def _seconds_per_step(runs: Sequence[Run]) -> float:
    return sum(run.seconds for run in runs) / sum(len(run.step_lengths) for run in runs)
