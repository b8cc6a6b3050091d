"""Validate typical acceptance, which is lossy: the quality of its texts, and the predicted tokens per step."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from treeopt.decode.decoder import TreeDecoder
from treeopt.decode.rules import Typical
from treeopt.evaluate.baselines import AUTOREGRESSIVE, GENERATE, TREE, seeded, with_decoder, with_generate
from treeopt.evaluate.metrics import Trial
from treeopt.evaluate.runs import Inputs, Measured, decode_all
from treeopt.models.base import Base
from treeopt.models.logits import rows_at_once
from treeopt.progress import Progress
from treeopt.texts.encode import Text
from treeopt.tree import Tree

Tokens = Sequence[int]
_LENGTHS = (1, 2, 3)  # of the n-grams
_DOUBLE = 2  # a number in float64 takes as much memory as so many in float32


@dataclass(frozen=True)
class Quality:
    """The measures of texts of one decoder.

    Args:
        log_likelihood: mean over all tokens of log p(token) in nats, p the base's distribution at temperature 1.
        distinct: distinct-1, distinct-2 and distinct-3.
        agreement: with the greedy texts of the same prompts.
    """

    log_likelihood: float
    distinct: tuple[float, ...]
    agreement: float


def quality(base: Base, texts: Sequence[Text], greedy: Sequence[Text]) -> Quality:
    """The measures of texts, beside the greedy texts of the same prompts."""
    answers = [text.answer for text in texts]
    return Quality(
        log_likelihood(base, texts),
        tuple(distinct(answers, n) for n in _LENGTHS),
        agreement(answers, [text.answer for text in greedy]),
    )


@torch.inference_mode()
def log_likelihood(base: Base, texts: Sequence[Text]) -> float:
    """Mean of log p(token) in nats over all tokens of all answers, from one teacher-forced pass a text."""
    total, count = 0.0, 0
    for text in texts:
        ids = torch.tensor([[*text.prompt, *text.answer]], device=base.device)
        size = len(text.answer)
        logits = base.forward(ids, use_cache=False, logits_to_keep=size + 1)[0][0, :-1]  # [G, V]
        rows = rows_at_once(base.vocab_size, _DOUBLE)
        parts = zip(torch.split(logits, rows), torch.split(ids[0, -size:, None], rows), strict=True)
        logs = torch.cat([part.double().log_softmax(-1).gather(1, true) for part, true in parts])
        total, count = total + float(logs.sum()), count + size
    if math.isnan(total):
        raise base.not_finite("logits")
    return total / count


def distinct(answers: Sequence[Tokens], n: int) -> float:
    """Distinct n-grams / n-grams of all texts, which cross no texts (arXiv:1510.03055 divides by tokens)."""
    found = [tuple(answer[i : i + n]) for answer in answers for i in range(len(answer) - n + 1)]
    return len(set(found)) / len(found) if found else 0.0


def agreement(answers: Sequence[Tokens], greedy: Sequence[Tokens]) -> float:
    """Tokens before the first difference to the greedy text / tokens of the longer text of the two, both summed."""
    pairs = list(zip(answers, greedy, strict=True))
    return sum(_common(one, other) for one, other in pairs) / sum(max(len(one), len(other)) for one, other in pairs)


def _common(one: Tokens, other: Tokens) -> int:
    shorter = min(len(one), len(other))
    return next((i for i in range(shorter) if one[i] != other[i]), shorter)


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


def validate_typical(inputs: Inputs, rule: Typical, progress: Progress) -> TypicalValidation | None:
    """Decode every prompt greedily, by sampling, and with the tree, and compare the texts and the steps.

    The steps are predicted on the tree's own texts. The token after an accepted path is none of its children, as the
    rule would have accepted it, so the accepted path is the deepest node on the text, as in the replay of exact rules.
    None in a process that follows another.
    """
    base = inputs.base
    baselines = {
        GENERATE: with_generate(base),
        SAMPLED: seeded(base, with_generate(base, temperature=rule.temperature), SEED, SAMPLED),
        AUTOREGRESSIVE: with_decoder(TreeDecoder(base, None, Tree(()), probe=False)),
        TREE: with_decoder(inputs.decoder(rule)),
    }
    runs = decode_all(baselines, base, inputs.texts, inputs.options, progress, content=inputs.content)
    if inputs.options.division.follows:
        return None
    texts = {
        name: [
            dataclasses.replace(text, answer=by_name[name][0].tokens)
            for text, by_name in zip(runs.texts, runs.by_text, strict=True)
        ]
        for name in (GENERATE, SAMPLED, TREE)
    }
    return TypicalValidation(
        **inputs.measured(runs, inputs.traces(texts[TREE]), parts=False),
        rule=rule,
        quality={name: quality(base, found, texts[GENERATE]) for name, found in texts.items()},
    )
