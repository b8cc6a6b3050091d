"""Validate typical acceptance, which is lossy: the quality of its texts, and the predicted tokens per step."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treeopt.calibration import Calibration
from treeopt.decode.decoder import TreeDecoder
from treeopt.decode.rules import Typical
from treeopt.evaluate.baselines import AUTOREGRESSIVE, GENERATE, TREE, Baseline, seeded, with_decoder, with_generate
from treeopt.evaluate.inputs import Inputs, parts
from treeopt.evaluate.metrics import Trial
from treeopt.evaluate.quality import Quality, quality
from treeopt.evaluate.runs import Runs, decode_all
from treeopt.evaluate.typical_replay import typical_replay
from treeopt.evaluate.validation import Measured
from treeopt.models.base import Base
from treeopt.progress import Progress
from treeopt.texts.encode import Text
from treeopt.tree import Tree

SAMPLED = "sampled generate"  # stock generate, sampling at the temperature of the rule
SEED = 0  # of it


@dataclass(frozen=True)
class TypicalValidation(Measured):
    """The results of a validation under typical acceptance.

    Args:
        rule: temperature, epsilon and delta.
        quality: of the texts, by the name of their baseline: greedy (stock generate), sampled, and typical (the tree).
    """

    rule: Typical
    quality: Mapping[str, Quality]

    @property
    def prediction_misses(self) -> tuple[Trial, ...]:
        """Texts whose number of steps was not predicted."""
        return tuple(one for one in self.metrics.trials if one.steps != one.predicted_steps)


def baselines_for(base: Base, temperature: float) -> dict[str, Baseline]:
    """What the tree's texts are compared with: greedy texts, texts sampled at a temperature, autoregressive ones."""
    return {
        GENERATE: with_generate(base),
        SAMPLED: seeded(base, with_generate(base, temperature=temperature), SEED, SAMPLED),
        AUTOREGRESSIVE: with_decoder(TreeDecoder(base, None, Tree(()), probe=False)),
    }


def validate_typical(inputs: Inputs, rule: Typical, progress: Progress) -> TypicalValidation:
    """Decode every prompt greedily, by sampling, and with the tree, and compare the texts and the steps."""
    baselines = {**baselines_for(inputs.base, rule.temperature), TREE: with_decoder(inputs.decoder(rule))}
    runs = decode_all(baselines, inputs.base, inputs.texts, inputs.options, progress, content=inputs.content)
    inputs.options.division.leader_only()
    return judge_typical(inputs, rule, runs)


def judge_typical(inputs: Inputs, rule: Typical, runs: Runs) -> TypicalValidation:
    """The record of what was decoded by `baselines_for` the rule's temperature and, under the rule, by the tree."""
    base = inputs.base
    texts = {
        name: [
            dataclasses.replace(text, answer=by_name[name][0].tokens)
            for text, by_name in zip(runs.texts, runs.by_text, strict=True)
        ]
        for name in (GENERATE, SAMPLED, TREE)
    }
    traces, entropy = rule_traces(inputs, texts[TREE], rule)
    predicted = typical_replay(inputs.tree, traces, entropy, rule)
    smaller = {
        nodes: typical_replay(part, traces, entropy, rule).tokens_per_step
        for nodes, part in parts(inputs.tree, traces).items()
    }
    return TypicalValidation(
        **inputs.measured(runs, predicted, smaller),
        rule=rule,
        quality={name: quality(base, found, texts[GENERATE]) for name, found in texts.items()},
    )


def rule_traces(inputs: Inputs, texts: Sequence[Text], rule: Typical) -> tuple[Calibration, NDArray[np.float32]]:
    """What the rule needs of the base on these texts: traces with the candidates' probabilities, and entropies [P]."""
    traced = inputs.traced(texts, lambda logits: logits.float() / rule.temperature)
    entropy = np.concatenate([one.entropy for one in traced if one.entropy is not None])
    return inputs.record(texts, traced), entropy
