"""Baselines: stock `generate`, its prompt lookup and assisted generation, and autoregressive decoding.

They are timed like our own loop with a tree. Metrics are tokens per step and speed of texts, with their spread.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList

from treeopt.decode.decoder import TreeDecoder
from treeopt.decode.draft_metrics import Decoded, DraftMetrics
from treeopt.decode.rules import Rule
from treeopt.errors import first_line
from treeopt.models.base import Base, now
from treeopt.texts.answers import cut_at_end, left_padded
from treeopt.texts.encode import Text
from treeopt.tree import Tree

GENERATE, LOOKUP, AUTOREGRESSIVE, TREE = "generate", "prompt lookup", "autoregressive", "tree"
ASSISTED = "assisted generation"
STOCK = (GENERATE, LOOKUP, ASSISTED)  # methods of transformers
LOOKUP_TOKENS = 10  # drafts of one prompt lookup: the value in the documentation of transformers
_QUARTILES = (0.25, 0.5, 0.75)


@dataclass(frozen=True)
class Run:
    """One text, decoded once. Texts decoded together get equal shares of the seconds."""

    tokens: list[int]  # the new ones
    step_lengths: list[int]  # in tokens; a step of stock decoding is one forward, that of the prompt included
    prefilled: int  # tokens known at the end of the prompt's forward
    prefill_seconds: float  # up to there
    seconds: float  # after it
    drafts: DraftMetrics | None = None  # stock decoding does not report them


MEASURED, WARMING, TESTED = range(3)  # what texts are for


class Call(NamedTuple):
    """The batch, turn and repeat of a call, and what its texts are for: what its draws and its memory depend on."""

    batch: int
    turn: int = 0
    repeat: int = 0
    part: int = MEASURED


# Takes the token ids of prompts that are decoded together, the maximum number of new tokens of each, and the call.
Baseline = Callable[[Sequence[Sequence[int]], int, Call], list[Run]]


def warm_up(
    baselines: Mapping[str, Baseline], prompts: Sequence[Sequence[int]], max_new_tokens: int
) -> tuple[dict[str, Baseline], dict[str, str]]:
    """Run every baseline once; those that remain, and the error messages of prompt lookup and assisted generation by
    name.

    These two are left out where they fail: they do not support batches or every cache.
    """
    left_out = {}
    for name, baseline in baselines.items():
        try:
            baseline(prompts, max_new_tokens, Call(0, part=WARMING))
        except Exception as error:  # transformers raises many types for the same fact
            if name not in (LOOKUP, ASSISTED):
                raise
            left_out[name] = first_line(error)
    return {name: baseline for name, baseline in baselines.items() if name not in left_out}, left_out


def with_decoder(decoder: TreeDecoder) -> Baseline:
    """Our own loop with the decoder's tree; with the one-node tree it is autoregressive."""

    def run(prompts: Sequence[Sequence[int]], max_new_tokens: int, _call: Call) -> list[Run]:
        begin = now(decoder.base)
        decoding = decoder.start_all(prompts, max_new_tokens)
        ready = now(decoder.base)
        steps = list(decoding)
        end = now(decoder.base)
        share = len(prompts)
        runs = []
        for row in range(share):
            text = Decoded([step[row] for step in steps if row in step], decoder.trees.depth)
            seconds = (ready - begin) / share, (end - ready) / share
            runs.append(Run(text.tokens, text.step_lengths, 1, *seconds, text.draft_metrics))
        return runs

    return run


def autoregressive(base: Base, rule: Rule | None = None) -> Baseline:
    """Our own loop without a tree."""
    return with_decoder(TreeDecoder(base, None, Tree(()), acceptance=rule, probe=False))


def with_memory(decoder: TreeDecoder, memory: Tensor, *, across: bool = False) -> Baseline:
    """Our own loop with a drafter whose `memory` every text changes, such as the matrix of Token Recycling.

    Every batch begins with the memory at the time of this call, so the result depends on no order; with `across`, with
    that after the batch before. Later turns begin with the memory after the turn before, and so do their repeats.
    """
    run, of_turn = with_decoder(decoder), (0, 0)
    first, before = memory.clone(), memory.clone()

    def begin_equal(prompts: Sequence[Sequence[int]], max_new_tokens: int, call: Call) -> list[Run]:
        nonlocal of_turn
        if (call.batch, call.turn) != of_turn:
            of_turn = call.batch, call.turn
            before.copy_(memory if call.turn or across else first)
        memory.copy_(before)
        return run(prompts, max_new_tokens, call)

    return begin_equal


def learning_texts(run: Baseline, learn: Callable[[Sequence[Text]], object]) -> Baseline:
    """A method that learns the texts of each batch, once, before the next one."""
    texts: list[Text] = []
    of_batch = 0

    def after_others(prompts: Sequence[Sequence[int]], max_new_tokens: int, call: Call) -> list[Run]:
        nonlocal of_batch
        if call.batch != of_batch:
            of_batch = call.batch
            learn(texts)
            texts.clear()
        runs = run(prompts, max_new_tokens, call)
        if (call.part, call.repeat) == (MEASURED, 0):
            texts.extend(Text("", prompt, one.tokens) for prompt, one in zip(prompts, runs, strict=True))
        return runs

    return after_others


def with_generate(base: Base, **options: Any) -> Baseline:
    """Stock greedy `generate` of the model; `options` are passed to it, such as `prompt_lookup_num_tokens`."""

    @torch.inference_mode()
    def run(prompts: Sequence[Sequence[int]], max_new_tokens: int, _call: Call) -> list[Run]:
        ids, mask = left_padded(prompts, base.pad_id)
        ids, mask = ids.to(base.device), mask.to(base.device)
        forwards = _Forwards(base)
        begin = now(base)
        out = base.generate(ids, mask, max_new_tokens, stopping_criteria=StoppingCriteriaList([forwards]), **options)
        end = now(base)
        lengths = torch.tensor([ids.shape[1], *forwards.lengths]).diff().tolist()
        share = len(prompts)
        runs = []
        for row in out[:, ids.shape[1] :].tolist():
            tokens = cut_at_end(row, base.eos_ids)
            sums = itertools.accumulate(lengths, initial=0)
            clipped = [min(length, len(tokens) - before) for length, before in zip(lengths, sums, strict=False)]
            steps = [length for length in clipped if length > 0]
            seconds = (forwards.first - begin) / share, (end - forwards.first) / share
            runs.append(Run(tokens, steps, steps[0], *seconds))
        return runs

    return run


class _Forwards(StoppingCriteria):
    """Notes the tokens of the whole text after each forward of `generate`, and when the first, the prefill, ended."""

    def __init__(self, base: Base) -> None:
        self._base = base
        self._continue = torch.zeros(1, dtype=torch.bool, device=base.device)
        self.lengths: list[int] = []
        self.first = 0.0

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: object) -> Tensor:
        self.first = self.first or now(self._base)
        self.lengths.append(input_ids.shape[1])
        return self._continue


def seeded(base: Base, baseline: Baseline, seed: int, name: str) -> Baseline:
    """The baseline with a seed for each call, which depends on `seed`, its name and the call."""

    def run(prompts: Sequence[Sequence[int]], max_new_tokens: int, call: Call) -> list[Run]:
        sequence = np.random.SeedSequence([seed, *name.encode()], spawn_key=call)
        with torch.random.fork_rng([base.device] if base.device.type == "cuda" else []):
            torch.manual_seed(int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(1)))
            return baseline(prompts, max_new_tokens, call)

    return run


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
