"""Validate under sampling: whether texts have the base's distribution, and the predicted tokens per step.

Sampled texts differ by nature, so no tokens are compared. Every prompt is decoded several times by stock `generate`, by
our own loop without a tree, and with the tree, with independent draws. The prediction is a sum of probabilities over
the texts of stock `generate`; tokens per step are measured on the tree's own texts. So the two are independent given
the prompts, and their difference has a standard error.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treeopt.decode.decoder import TreeDecoder
from treeopt.decode.rules import Sample
from treeopt.evaluate.baselines import AUTOREGRESSIVE, GENERATE, TREE, Baseline, with_decoder, with_generate
from treeopt.evaluate.inputs import Inputs, parts, replayed
from treeopt.evaluate.runs import Runs, decode_all
from treeopt.evaluate.seeds import seeded
from treeopt.evaluate.text_distribution import ALPHA, DistributionTest, adjusted_p, compare_texts
from treeopt.evaluate.validation import Measured
from treeopt.optimize.sums import standard_error
from treeopt.progress import Progress
from treeopt.tree import Tree

TESTED = 4  # prompts whose texts are tested: the shortest, as each is decoded many times
_ROUNDING = 2**-11  # of the traced probabilities, which are float16
Z_LIMIT = 4.0  # of the difference between measured and predicted tokens per step, in standard errors of many prompts
LEAST_DRAFTS = 10  # accepted drafts of a z-score that a warning is based on

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class SampleValidation(Measured):
    """The results of a validation under sampling. Its trials are the texts of all repeats.

    Args:
        rule: temperature, top-k, top-p and seed; no seed is seed 0.
        measured_standard_error: of the measured tokens per step, clustered by prompt; None with fewer than two prompts.
        predicted_standard_error: the same of the predicted tokens per step.
        z_score: (measured - predicted) / standard error of the difference, clustered by prompt; None where there is no
            standard error.
        tests: of the distribution of texts, one a prompt.
    """

    rule: Sample
    measured_standard_error: float | None
    predicted_standard_error: float | None
    z_score: float | None
    tests: tuple[DistributionTest, ...]

    @property
    def lossless(self) -> bool | None:
        """Whether no test found another distribution than the base's: `p_value` >= `ALPHA`; None without tests."""
        return None if self.p_value is None else self.p_value >= ALPHA

    @property
    def p_value(self) -> float | None:
        """The least p-value of all tests times their number (Bonferroni); None where nothing was tested."""
        return adjusted_p(self.tests)

    @property
    def as_predicted(self) -> bool:
        """Whether the z-score is at most as rare as `Z_LIMIT` of a normal distribution, or says nothing.

        Its standard error is estimated from the prompts, so it has Student's distribution with one degree of freedom
        less. With few accepted drafts it is not normal, and the estimated error may be 0.
        """
        from scipy import stats

        if self.z_score is None or self.few_drafts:
            return True
        prompts = len({text.dialogue for text in self.texts})
        return abs(self.z_score) <= float(stats.t.isf(stats.norm.sf(Z_LIMIT), prompts - 1))

    @property
    def few_drafts(self) -> bool:
        """Whether fewer than `LEAST_DRAFTS` were accepted, and fewer are expected by the prediction."""
        sums = self.predicted.sums
        expected = float(sums.tokens.sum() - sums.steps.sum())
        return max(self.metrics.tokens - self.metrics.steps, expected) < LEAST_DRAFTS


def validate_sample(inputs: Inputs, rule: Sample, progress: Progress) -> SampleValidation:
    """Decode every prompt `repeats` times with independent draws, predict the steps, and test the distribution."""
    base, options = inputs.base, inputs.options
    rule = dataclasses.replace(rule, seed=rule.seed or 0)
    baselines = _baselines(inputs, rule)
    once = dataclasses.replace(options, repeats=1)
    runs = _joined(
        [
            decode_all(baselines, base, inputs.texts, once, progress, first_repeat=repeat, content=inputs.content)
            for repeat in range(options.repeats)
        ]
    )
    shortest = sorted(inputs.texts, key=lambda text: (len(text.prompt), text.prompt_id))[:TESTED]
    decoders = baselines[TREE], baselines[GENERATE]

    def tested(number: int) -> dict[str, Any]:
        found = compare_texts(base, shortest[number], rule.scores, decoders, options.draws, number)
        return dataclasses.asdict(found)

    tests = options.division.each(len(shortest) if options.draws else 0, tested)
    options.division.leader_only()
    return _compare(inputs, rule, runs, [DistributionTest(**test) for test in tests])


def _compare(inputs: Inputs, rule: Sample, runs: Runs, tests: Sequence[DistributionTest]) -> SampleValidation:
    """The record of what was decoded, predicted and tested."""
    texts = [dataclasses.replace(text, prompt_id=f"{i:08}") for i, text in enumerate(runs.texts)]  # ids are unique
    traces = inputs.record(texts, inputs.traced(texts, rule.scores))
    predicted = replayed(inputs.tree, traces)
    _, clusters = np.unique([text.dialogue for text in runs.texts], return_inverse=True)
    trees = [by_name[TREE][0] for by_name in runs.by_text]
    measured = [len(run.tokens) for run in trees], [len(run.step_lengths) for run in trees]
    ours, theirs = (
        (_sums(clusters, tokens), _sums(clusters, steps))
        for tokens, steps in (measured, (predicted.sums.tokens, predicted.sums.steps))
    )
    smaller = {nodes: replayed(part, traces).tokens_per_step for nodes, part in parts(inputs.tree, traces).items()}
    return SampleValidation(
        **inputs.measured(runs, predicted, smaller),
        rule=rule,
        measured_standard_error=standard_error(*ours),
        predicted_standard_error=standard_error(*theirs),
        z_score=z_score(ours, theirs),
        tests=tuple(tests),
    )


def _sums(clusters: NDArray[np.int64], values: Any) -> Floats:
    """float64: the sum of the values of each cluster."""
    found: Floats = np.bincount(clusters, weights=values).astype(np.float64)
    return found


def z_score(one: tuple[Floats, Floats], other: tuple[Floats, Floats]) -> float | None:
    """The difference of two ratios of sums over the same prompts, in standard errors; None where there is none.

    Prompts are the same in both, so the part of the variance that comes from the choice of the prompts cancels. It is
    that of the ratio estimators, linearised: for each prompt, (numerator - ratio * denominator) / sum of denominators,
    one minus the other.

    Args:
        one: float64 [S] numerators and [S] denominators of each prompt.
        other: the same of the ratio that is subtracted.
    """
    ratios = [numerators.sum() / denominators.sum() for numerators, denominators in (one, other)]
    residuals = [
        (numerators - ratio * denominators) / denominators.sum()
        for (numerators, denominators), ratio in zip((one, other), ratios, strict=True)
    ]
    share = residuals[0] - residuals[1]
    error = standard_error(share, np.ones(len(share)))
    return (
        None if error is None else float((ratios[0] - ratios[1]) / np.hypot(error * len(share), _ROUNDING * ratios[1]))
    )


def _baselines(inputs: Inputs, rule: Sample) -> dict[str, Baseline]:
    """Stock generate, our loop without and with the tree, each with draws of its own."""
    base = inputs.base
    seed, unseeded = rule.seed or 0, dataclasses.replace(rule, seed=None)
    runs = {
        GENERATE: with_generate(base, temperature=rule.temperature, top_k=rule.top_k, top_p=rule.top_p),
        AUTOREGRESSIVE: with_decoder(TreeDecoder(base, None, Tree(()), acceptance=unseeded, probe=False)),
        TREE: with_decoder(inputs.decoder(unseeded)),
    }
    return {name: seeded(base, run, seed, name) for name, run in runs.items()}


def _joined(runs: Sequence[Runs]) -> Runs:
    """The texts of all repeats; prompts that were skipped are named once."""
    return Runs(
        tuple(text for one in runs for text in one.texts),
        tuple(by_name for one in runs for by_name in one.by_text),
        tuple({skip.prompt_id: skip for one in runs for skip in one.skipped}.values()),
        runs[0].left_out,
        runs[0].batch_size,
    )
