"""The records of a validation: its options and its results."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Integral

from treeopt.decode.rules import Greedy, Rule, Sample, Typical
from treeopt.errors import check_counts
from treeopt.evaluate.baselines import AUTOREGRESSIVE, TREE
from treeopt.evaluate.divergence import Cause, Difference, Judge, tolerated
from treeopt.evaluate.metrics import Metrics, Trial
from treeopt.models.base import Base
from treeopt.models.given import GivenModel
from treeopt.optimize.replay import Replay
from treeopt.runs.division import ALONE, Division
from treeopt.texts.encode import Text
from treeopt.texts.prompts import Skipped

DRAWS = 1000  # texts drawn of each prompt for the test of their distribution, by each decoder
JUDGED = 5  # differing texts judged by default: each takes a float64 forward of the model on the CPU
_OURS = (AUTOREGRESSIVE, TREE)  # decoders that must give the text of stock generate; prompt lookup is not ours


@dataclass(frozen=True)
class ValidateOptions:
    """How texts are decoded and judged.

    Args:
        max_new_tokens: maximum number of new tokens of each text.
        repeats: runs of each text and baseline.
        batch_size: prompts decoded together, by every baseline.
        chat_template: apply the tokenizer's chat template to requests, where it has one.
        judge: number of differing texts to judge, as in `Validation.judged`; 0 judges none.
        draft: the draft model of the drafter, in any form that models have; None where it has none.
        acceptance: `Greedy()`, `Sample(...)` or `Typical(...)`.
        draws: under `Sample`, texts drawn of each prompt whose distribution is tested; 0 tests none.
        division: the processes of a command, which divide the batches. The first one returns, the others end with
            SystemExit(0).

    Raises:
        TypeError: where the rule is another one.
        ValueError: where a number is not whole or out of range, or the temperature of the rule is 0.
    """

    max_new_tokens: int = 128
    repeats: int = 1
    batch_size: int = 1
    chat_template: bool = True
    judge: int = JUDGED
    draft: GivenModel | None = None
    acceptance: Rule = field(default_factory=Greedy)
    draws: int = DRAWS
    division: Division = ALONE

    def __post_init__(self) -> None:
        check_counts(max_new_tokens=self.max_new_tokens, repeats=self.repeats, batch_size=self.batch_size)
        for name, value in (("judge", self.judge), ("draws", self.draws)):
            if not isinstance(value, Integral) or isinstance(value, bool) or value < 0:
                raise ValueError(f"{name} {value!r}: it is not a whole number from 0")
        if not isinstance(self.acceptance, (Greedy, Sample, Typical)):
            kind = type(self.acceptance).__name__
            raise TypeError(f"acceptance is Greedy(), Sample(...) or Typical(...), not an object of type {kind}")
        if isinstance(self.acceptance, (Sample, Typical)) and self.acceptance.temperature == 0:
            raise ValueError("temperature 0 is greedy decoding: validate it as Greedy()")


@dataclass(frozen=True)
class Measured:
    """What the validations of all rules have in common.

    Args:
        metrics: tokens per step and speed of all texts.
        predicted: replay over the texts of stock generate, under sampling with the expected drafts of every step; under
            typical acceptance over the texts that the tree decoded.
        measured_by_depth: share of steps that accepted d drafts or more, d = 1 .. D.
        expected_tokens_per_step: from the tree file; None where it has none.
        nodes: N of the tree; the maximum for a tree chosen per step.
        smaller: tokens per step, by replay on these texts, of the most used part of the tree, by its nodes.
        skipped: prompts, and later turns of dialogues, that do not fit into the context.
        left_out: baselines that do not support this model or batch size, and their error messages.
        repeats: as in `ValidateOptions`; under sampling each gives texts of its own, which are trials.
        batch_size: texts decoded together.
        made_by: versions, device, threads, dtype, attention.
        texts: prompts and answers of stock generate, one for each trial of the metrics.
    """

    metrics: Metrics
    predicted: Replay
    measured_by_depth: tuple[float, ...]
    expected_tokens_per_step: float | None
    nodes: int
    smaller: Mapping[int, float]
    skipped: tuple[Skipped, ...]
    left_out: Mapping[str, str]
    repeats: int
    batch_size: int
    made_by: dict[str, str]
    texts: tuple[Text, ...]

    @property
    def tokens_per_step(self) -> float:
        """tau: all tokens / all steps."""
        return self.metrics.tokens_per_step()

    @property
    def overhead(self) -> float | None:
        """Seconds of a tree step / seconds of an autoregressive step; the median repeat, None where not timed."""
        spread = self.metrics.overhead
        return None if spread is None else spread.median

    @property
    def speedup(self) -> float | None:
        """tau / overhead: tokens per second of the tree / of autoregressive decoding; median, None where not timed."""
        spread = self.metrics.speedup()
        return None if spread is None else spread.median


@dataclass(frozen=True)
class Validation(Measured):
    """The results of a validation under greedy acceptance.

    Args:
        differences: every text that is not that of stock generate, those of prompt lookup included; `judged` finds
            their causes.
    """

    differences: tuple[Difference, ...]

    @property
    def lossless(self) -> bool:
        """Whether every text of our loop is, token for token, that of stock greedy `generate`."""
        return not self.our_differences

    @property
    def our_differences(self) -> tuple[Difference, ...]:
        """Differences of the tree and of autoregressive decoding by our loop."""
        return tuple(found for found in self.differences if found.decoder in _OURS)

    @property
    def differing(self) -> int:
        """Number of texts with a difference of ours."""
        return len({one.prompt_id for one in self.our_differences})

    @property
    def num_judged(self) -> int:
        """Number of differing texts with a known cause."""
        return self.differing - len(self._unjudged())

    def judged(self, base: Base, most: int = JUDGED) -> Validation:
        """A copy in which the causes of our differences are decided, by one float64 forward each.

        Args:
            base: the model that was validated. It is copied to the CPU in float64, 8 bytes a parameter, where a text
                differs.
            most: maximum number of texts to judge, in the order of the prompts; 0 judges none.
        """
        chosen = set(self._unjudged()[:most])
        texts = {text.prompt_id: text for text in self.texts}
        judge = Judge(base, self.nodes)
        decided = [
            judge.decide(one, texts[one.prompt_id]) if one.decoder in _OURS and one.prompt_id in chosen else one
            for one in self.differences
        ]
        return dataclasses.replace(self, differences=tuple(decided))

    def _unjudged(self) -> list[str]:
        """Prompts with an unjudged difference of ours, in their order."""
        found = (one.prompt_id for one in self.our_differences if one.cause is Cause.UNJUDGED)
        return list(dict.fromkeys(found))

    @property
    def failures(self) -> tuple[Difference, ...]:
        """Our differences but ties and, in half precision, rounding and unjudged ones."""
        return tuple(found for found in self.our_differences if not tolerated(found, self.made_by["dtype"]))

    @property
    def prediction_misses(self) -> tuple[Trial, ...]:
        """Texts equal to those of stock generate, whose number of steps was not predicted."""
        return tuple(one for one in self.metrics.trials if one.same and one.steps != one.predicted_steps)
