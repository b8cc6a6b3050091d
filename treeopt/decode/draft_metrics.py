"""Records of decoded texts: their steps, and how many drafts were verified and accepted in them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


class Step(list[int]):
    """The tokens of one step of one text: its root and the accepted drafts.

    Args:
        tokens: the tokens.
        num_draft_tokens: drafts verified by the step's forward, the rejected ones included. The root, void nodes
            (without a draft) and nodes below them, which cannot be accepted, are not counted. 0 where the step has no
            forward.
    """

    def __init__(self, tokens: Iterable[int] = (), num_draft_tokens: int = 0) -> None:
        super().__init__(tokens)
        self.num_draft_tokens = num_draft_tokens

    def cut(self, length: int) -> Step:
        """The first `length` tokens; the drafts of the others were verified all the same."""
        return Step(self[:length], self.num_draft_tokens)


@dataclass(frozen=True)
class DraftMetrics:
    """Verified and accepted drafts of one or more texts, under the names that inference engines use.

    A *draft* in `num_drafts` is a step that verified one or more draft tokens. A step without drafts counts in
    `num_steps` and in `mean_acceptance_length` only: a last root, which needs no forward, and a step with the one-node
    tree. Accepted drafts beyond the end of a text or its token budget are not emitted and count as not accepted.

    Args:
        num_steps: all steps.
        num_draft_tokens: draft tokens verified; without void nodes the sum over `num_drafts` steps of nodes - 1.
        acceptance_histogram: [D+1], the number of steps with k accepted drafts, k = 0 .. D, among the steps that
            verified drafts. Its sum is `num_drafts`.
    """

    num_steps: int
    num_draft_tokens: int
    acceptance_histogram: tuple[int, ...]

    @classmethod
    def of_steps(cls, step_lengths: Iterable[int], step_draft_tokens: Iterable[int], depth: int) -> DraftMetrics:
        """The metrics of one text, from the tokens of each step, root included, and the draft tokens that each
        verified.

        `depth` is D, the greatest number of drafts that a step can accept. ValueError where a step has no token, or
        more than its drafts and the root.
        """
        histogram, num_steps, num_draft_tokens = [0] * (depth + 1), 0, 0
        for length, drafted in zip(step_lengths, step_draft_tokens, strict=True):
            if not 1 <= length <= drafted + 1:
                raise ValueError(f"a step of {length} tokens verified {drafted} draft tokens")
            num_steps += 1
            num_draft_tokens += drafted
            if drafted:
                histogram[length - 1] += 1
        return cls(num_steps, num_draft_tokens, tuple(histogram))

    @classmethod
    def total(cls, parts: Iterable[DraftMetrics]) -> DraftMetrics:
        """The metrics of several texts together; a shorter histogram is continued with zeros."""
        listed = list(parts)
        columns = itertools.zip_longest(*(one.acceptance_histogram for one in listed), fillvalue=0)
        return cls(
            sum(one.num_steps for one in listed),
            sum(one.num_draft_tokens for one in listed),
            tuple(map(sum, columns)),
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
        return {
            "num_drafts": self.num_drafts,
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_tokens": self.num_accepted_tokens,
            "draft_acceptance_rate": self.draft_acceptance_rate,
            "mean_acceptance_length": self.mean_acceptance_length,
            "acceptance_histogram": list(self.acceptance_histogram),
        }


@dataclass(frozen=True)
class Decoded:
    """A generated text.

    Args:
        tokens: of the text.
        step_lengths: the number of tokens of each step.
        step_draft_tokens: the number of drafts that each step verified; 0 where it verified none.
        tree_depth: D, the greatest number of drafts that a step can accept.
    """

    tokens: list[int]
    step_lengths: list[int]
    step_draft_tokens: list[int] = field(default_factory=list)
    tree_depth: int = 0

    @property
    def tokens_per_step(self) -> float:
        return len(self.tokens) / len(self.step_lengths)

    @property
    def draft_metrics(self) -> DraftMetrics:
        return DraftMetrics.of_steps(self.step_lengths, self.step_draft_tokens, self.tree_depth)
