"""The validation record: what came out of decoding texts several ways, and why some of them differ."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from treeopt.evaluate.divergence import Difference, Judge, Verdict, forgiven
from treeopt.evaluate.metrics import AUTOREGRESSIVE, TREE, Figures, Trial
from treeopt.models.base import Base
from treeopt.optimize.replay import Replay
from treeopt.texts.encode import Skipped, Text

JUDGED = 5  # texts judged unless another number is asked for: each takes a float64 forward of the model on the CPU
_OURS = (AUTOREGRESSIVE, TREE)  # what must give stock generate's text; prompt lookup is not ours to prove


@dataclass(frozen=True)
class Validation:
    """What came out.

    Args:
        figures: tokens per step and speed of all texts.
        differences: every text that is not stock generate's, prompt lookup's among them; `judged` decides why.
        predicted: replay over stock generate's texts.
        measured_by_depth: share of steps that emitted d drafts or more, d = 1 .. D.
        expected_tokens_per_step: the tree file's own; None where it has none.
        nodes: N of the tree; of a tree chosen per step the most.
        smaller: tokens per step, by replay on these texts, of the most used part of the tree, by its nodes.
        skipped: prompts, and later turns of dialogues, that did not fit into the context.
        left_out: ways that this model, or a batch, cannot be decoded by, and why.
        batch_size: texts decoded together.
        made_by: versions, device, threads, dtype, attention.
        texts: prompts and stock generate's answers, one for each trial of the figures.
    """

    figures: Figures
    differences: tuple[Difference, ...]
    predicted: Replay
    measured_by_depth: tuple[float, ...]
    expected_tokens_per_step: float | None
    nodes: int
    smaller: Mapping[int, float]
    skipped: tuple[Skipped, ...]
    left_out: Mapping[str, str]
    batch_size: int
    made_by: dict[str, str]
    texts: tuple[Text, ...]

    @property
    def lossless(self) -> bool:
        """Whether every text of ours is, token for token, that of stock greedy `generate`."""
        return not self.our_differences

    @property
    def our_differences(self) -> tuple[Difference, ...]:
        """Those of the tree, and of our loop one token a step."""
        return tuple(found for found in self.differences if found.way in _OURS)

    @property
    def differing(self) -> int:
        """Texts of which ours is not that of stock greedy `generate`."""
        return len({one.prompt_id for one in self.our_differences})

    @property
    def num_judged(self) -> int:
        """Those of the differing texts of which it is known why they differ."""
        return self.differing - len(self._unjudged())

    def judged(self, base: Base, most: int = JUDGED) -> Validation:
        """The same with the reasons of our differences, decided by a float64 forward each.

        Args:
            base: the model that was validated. It is copied to the CPU in float64, 8 bytes a parameter, where a text
                differs at all.
            most: texts that are judged, the first that differ in the order of the prompts; 0 judges none.
        """
        chosen = set(self._unjudged()[:most])
        texts = {text.prompt_id: text for text in self.texts}
        judge = Judge(base, self.nodes)
        decided = [
            judge.decide(one, texts[one.prompt_id]) if one.way in _OURS and one.prompt_id in chosen else one
            for one in self.differences
        ]
        return dataclasses.replace(self, differences=tuple(decided))

    def _unjudged(self) -> list[str]:
        """The prompts, in their order, of which a difference of ours was not judged."""
        found = (one.prompt_id for one in self.our_differences if one.verdict is Verdict.UNJUDGED)
        return list(dict.fromkeys(found))

    @property
    def failures(self) -> tuple[Difference, ...]:
        """Our differences that are not forgiven: all but ties and, in half precision, rounding and what is unjudged."""
        return tuple(found for found in self.our_differences if not forgiven(found, self.made_by["dtype"]))

    @property
    def prediction_misses(self) -> tuple[Trial, ...]:
        """Texts whose number of steps was not the predicted one, among those that are stock generate's."""
        return tuple(one for one in self.figures.trials if one.same and one.steps != one.predicted_steps)

    @property
    def tokens_per_step(self) -> float:
        """tau: all tokens / all steps."""
        return self.figures.tokens_per_step()

    @property
    def overhead(self) -> float | None:
        """Seconds of a tree step / seconds of a one-token step of our own loop; the median repeat, None untimed."""
        spread = self.figures.overhead
        return None if spread is None else spread.median

    @property
    def speedup(self) -> float | None:
        """Tokens a second with the tree / one by one = tau / overhead; the median repeat, None untimed."""
        spread = self.figures.speedup()
        return None if spread is None else spread.median
