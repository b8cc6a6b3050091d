"""Typical acceptance by epsilon: tokens per step, and the quality of the texts (arXiv:2401.10774, figure 5)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from treeopt.decode.rules import Typical
from treeopt.defaults import EPSILON_TEMPERATURE, EPSILONS
from treeopt.evaluate.baselines import GENERATE, TREE, with_decoder
from treeopt.evaluate.inputs import Inputs, replayed
from treeopt.evaluate.memory import memory_as_error
from treeopt.evaluate.quality import Quality
from treeopt.evaluate.runs import Runs, decode_all
from treeopt.evaluate.validate import make_inputs
from treeopt.evaluate.validate_typical import SAMPLED, TypicalValidation, baselines_for, judge_typical
from treeopt.files.policies import GivenPlan
from treeopt.models.given import GivenHeads, GivenModel
from treeopt.optimize.intervals import Interval, by_text, sampling_interval
from treeopt.progress import Progress, silent
from treeopt.texts.encode import Skipped, Text
from treeopt.texts.given_prompts import GivenPrompts

_RULE = "epsilon "  # begins the names of the trees under a rule


@dataclass(frozen=True)
class EpsilonPoint:
    """The texts of a decoder.

    Args:
        texts: `greedy`, `sampled` or `typical`.
        epsilon: of typical acceptance; None for the others.
        delta: sqrt(epsilon); None for the others.
        tokens_per_step: of the tree. Typical: measured by the decoder. Greedy and sampled: by replay over the texts of
            stock generate, which exact acceptance decodes in these steps.
        predicted: by replay of the rule on the texts; for greedy and sampled texts equal to `tokens_per_step`.
        sampling: 90 % interval of `tokens_per_step`; None where there are too few texts.
        quality: of the texts.
        misses: texts whose number of steps was not predicted.
    """

    texts: str
    epsilon: float | None
    delta: float | None
    tokens_per_step: float
    predicted: float
    sampling: Interval | None
    quality: Quality
    misses: int


@dataclass(frozen=True)
class EpsilonSweep:
    """The result of `sweep_epsilon`.

    Args:
        points: greedy, sampled, then typical by epsilon.
        temperature: of the rule and of the sampling.
        texts: number of prompts, turns counted.
        nodes: of the tree, root counted; the maximum for a tree chosen per step.
        skipped: prompts that do not fit into the context.
    """

    points: tuple[EpsilonPoint, ...]
    temperature: float
    texts: int
    nodes: int
    skipped: tuple[Skipped, ...]


def sweep_epsilon(
    model: GivenModel,
    heads: GivenHeads | None,
    tree: GivenPlan | None,
    prompts: GivenPrompts | Sequence[Text],
    *,
    epsilons: Sequence[float] = EPSILONS,
    temperature: float = EPSILON_TEMPERATURE,
    progress: Progress = silent,
    **options: Any,
) -> EpsilonSweep:
    """Decode every prompt by typical acceptance with each epsilon and delta = sqrt(epsilon), and judge the texts.

    Each point is what `validate` finds with `acceptance=Typical(temperature, epsilon, sqrt(epsilon))`. Greedy and
    sampled texts are decoded once. Source: arXiv:2401.10774, section 2.3.1 (the rule), figure 5 (epsilon from 0.01 to
    0.25, delta = sqrt(epsilon), temperature 0.7).

    Args:
        model: as `validate`.
        heads: as `validate`.
        tree: as `validate`.
        prompts: as `validate`.
        epsilons: above 0 and at most 1, in any order.
        temperature: of the rule and of the sampled texts.
        progress: called after each text.
        options: `tokenizer`, `drafter`, and fields of `ValidateOptions`: `max_new_tokens`, `batch_size`,
            `chat_template`, `draft`.

    Raises:
        TreeoptError: as `validate`.
        TypeError: as `validate`, and where an option is one of the rule or the repeats.
        ValueError: where a number is out of range, or there is no epsilon.
    """
    rules = rules_of(epsilons, temperature)
    for name in ("acceptance", "repeats"):
        if name in options:
            raise TypeError(f"{name} is no option of sweep_epsilon")
    tokenizer, drafter = (options.pop(name, None) for name in ("tokenizer", "drafter"))
    inputs, _ = make_inputs(model, heads, tree, prompts, tokenizer, drafter, {**options, "acceptance": rules[0]})
    by_name = {f"{_RULE}{rule.epsilon!r}": rule for rule in rules}
    with memory_as_error("a smaller batch, fewer new tokens or a smaller tree"):
        trees = {name: with_decoder(inputs.decoder(rule)) for name, rule in by_name.items()}
        baselines = {**baselines_for(inputs.base, temperature), **trees}
        runs = decode_all(baselines, inputs.base, inputs.texts, inputs.options, progress, content=inputs.content)
        inputs.options.division.leader_only()
        found = [judge_typical(inputs, rule, _of_rule(runs, name)) for name, rule in by_name.items()]
        exact = [_exact_point(inputs, found[0], name) for name in (GENERATE, SAMPLED)]
    points = (*exact, *map(_typical_point, found))
    first = found[0]
    return EpsilonSweep(points, temperature, len(first.texts), first.nodes, first.skipped)


def rules_of(epsilons: Sequence[float], temperature: float = EPSILON_TEMPERATURE) -> list[Typical]:
    """The rules of different epsilons with delta = sqrt(epsilon), ascending.

    Raises:
        ValueError: where there is no epsilon, one is not in (0, 1], or the temperature is 0 or out of range.
    """
    if not epsilons:
        raise ValueError("no epsilon: give one or more")
    for epsilon in epsilons:
        if isinstance(epsilon, bool) or not 0 < epsilon <= 1:  # the square root of others is no delta
            raise ValueError(f"epsilon {epsilon!r}: it must be above 0 and at most 1")
    if temperature == 0:
        raise ValueError("temperature 0 is greedy decoding, whatever epsilon is")
    return [Typical(temperature, epsilon, math.sqrt(epsilon)) for epsilon in sorted(set(epsilons))]


def _of_rule(runs: Runs, name: str) -> Runs:
    """The runs of one rule, as those of the tree, beside those without a tree."""
    by_text = tuple(
        {one: found for one, found in by_name.items() if not one.startswith(_RULE)} | {TREE: by_name[name]}
        for by_name in runs.by_text
    )
    return dataclasses.replace(runs, by_text=by_text)


def _typical_point(found: TypicalValidation) -> EpsilonPoint:
    trials, rule = found.metrics.trials, found.rule
    sums = np.array([[trial.tokens, trial.steps] for trial in trials], np.int64).T
    interval = sampling_interval(*by_text([trial.prompt_id for trial in trials], *sums))
    predicted, misses = found.predicted.tokens_per_step, len(found.prediction_misses)
    quality = found.quality[TREE]
    return EpsilonPoint(
        "typical", rule.epsilon, rule.delta, found.tokens_per_step, predicted, interval, quality, misses
    )


def _exact_point(inputs: Inputs, found: TypicalValidation, name: str) -> EpsilonPoint:
    """The tree under greedy acceptance or sampling: replay over the texts of stock generate."""
    pairs = zip(found.texts, found.metrics.trials, strict=True)
    texts = [dataclasses.replace(text, answer=trial.runs[name][0].tokens) for text, trial in pairs]
    traces = inputs.traces(texts)
    sums = replayed(inputs.tree, traces).sums
    tau = sums.tokens_per_step
    interval = sampling_interval(*by_text(traces.prompt_ids, sums.tokens, sums.steps))
    names = {GENERATE: "greedy", SAMPLED: "sampled"}
    return EpsilonPoint(names[name], None, None, tau, tau, interval, found.quality[name], 0)
