"""Records of decoded texts: their steps, and how many drafts were verified and accepted in them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from treeopt.facts import picked


class Step(list[int]):
    """The tokens of one step of one text: its root and the accepted drafts.

    `num_draft_tokens` counts the drafts that its forward verified, rejected ones included, but no root, void nodes
    (without a draft) and nodes below them; 0 where the step has no forward.
    """

    def __init__(self, tokens: Iterable[int] = (), num_draft_tokens: int = 0) -> None:
        super().__init__(tokens)
        self.num_draft_tokens = num_draft_tokens

    def cut(self, length: int) -> Step:
        return Step(self[:length], self.num_draft_tokens)


@dataclass(frozen=True)
class DraftMetrics:
    """Verified and accepted drafts of one or more texts, under the names that inference engines use.

    A *draft* in `num_drafts` is a step that verified one or more draft tokens. A step without drafts counts in
    `num_steps` and in `mean_acceptance_length` only: a last root, which needs no forward, and a step with the one-node
    tree. Accepted drafts beyond the end of a text or its token budget are not emitted and count as not accepted.
    """

    num_steps: int  # all steps
    num_draft_tokens: int  # draft tokens verified; without void nodes the sum over `num_drafts` steps of nodes - 1
    # [D+1], the number of steps with k accepted drafts, k = 0 .. D, among the steps that verified drafts. Its sum is
    # `num_drafts`
    acceptance_histogram: tuple[int, ...]

    @classmethod
    def of_steps(cls, step_lengths: Iterable[int], step_draft_tokens: Iterable[int], depth: int) -> DraftMetrics:
        """The metrics of one text, from the tokens of each step, root included, and the drafts that each verified.

        `depth` is D, the greatest number of drafts that a step can accept. ValueError where a step has no token, or
        more than its drafts and the root.
        """
        steps = list(zip(step_lengths, step_draft_tokens, strict=True))
        histogram = [0] * (depth + 1)
        for length, drafted in steps:
            if not 1 <= length <= drafted + 1:
                raise ValueError(f"a step of {length} tokens verified {drafted} draft tokens")
            histogram[length - 1] += drafted > 0
        return cls(len(steps), sum(drafted for _, drafted in steps), tuple(histogram))

    @classmethod
    def total(cls, parts: Iterable[DraftMetrics]) -> DraftMetrics:
        """The metrics of several texts together; a shorter histogram is continued with zeros."""
        listed = list(parts)
        columns = itertools.zip_longest(*(one.acceptance_histogram for one in listed), fillvalue=0)
        return cls(
            sum(one.num_steps for one in listed), sum(one.num_draft_tokens for one in listed), tuple(map(sum, columns))
        )

    @property
    def num_drafts(self) -> int:
        """Steps that verified drafts."""
        return sum(self.acceptance_histogram)

    @property
    def num_accepted_tokens(self) -> int:
        """Drafts that were accepted and emitted."""
        return sum(k * steps for k, steps in enumerate(self.acceptance_histogram))

    @property
    def draft_acceptance_rate(self) -> float | None:
        """Accepted / verified draft tokens; None where none were verified."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per step: 1 + accepted drafts per step, over all steps."""
        return (self.num_steps + self.num_accepted_tokens) / self.num_steps

    def as_dict(self) -> dict[str, Any]:
        """The six metrics by name, for JSON."""
        names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "draft_acceptance_rate")
        figures = picked(self, *names, "mean_acceptance_length")
        return {**figures, "acceptance_histogram": list(self.acceptance_histogram)}


@dataclass(frozen=True)
class Decoded:
    """A generated text."""

    steps: list[Step]  # the tokens of each step
    tree_depth: int = 0  # D, the greatest number of drafts that a step can accept

    @property
    def tokens(self) -> list[int]:
        return list(itertools.chain.from_iterable(self.steps))

    @property
    def step_lengths(self) -> list[int]:
        return list(map(len, self.steps))

    @property
    def step_draft_tokens(self) -> list[int]:
        """The number of drafts that each step verified."""
        return [step.num_draft_tokens for step in self.steps]

    @property
    def tokens_per_step(self) -> float:
        return sum(self.step_lengths) / len(self.steps)

    @property
    def draft_metrics(self) -> DraftMetrics:
        return DraftMetrics.of_steps(self.step_lengths, self.step_draft_tokens, self.tree_depth)
