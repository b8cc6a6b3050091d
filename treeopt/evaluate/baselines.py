"""Ways to decode texts greedily, each timed alike: stock `generate`, prompt lookup, our loop with any tree."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList

from treeopt.decode.decoder import TreeDecoder
from treeopt.models.base import Base
from treeopt.models.clock import now
from treeopt.texts.answers import cut_at_end, left_padded


@dataclass(frozen=True)
class Run:
    """One text, decoded one way. Where several were decoded together, each has an equal share of the seconds.

    Args:
        tokens: the new tokens.
        step_lengths: tokens of each step; of stock decoding a step is one forward, the prompt's included.
        prefilled: tokens that were known when the prompt's forward was done.
        prefill_seconds: until then.
        seconds: from then on.
    """

    tokens: list[int]
    step_lengths: list[int]
    prefilled: int
    prefill_seconds: float
    seconds: float


Way = Callable[[Sequence[Sequence[int]], int], list[Run]]  # prompts' ids (decoded together), most new tokens of each


def with_decoder(decoder: TreeDecoder) -> Way:
    """Our own loop with the decoder's tree; the one-node tree is one by one."""

    def run(prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[Run]:
        begin = now(decoder.base)
        decoding = decoder.start_all(prompts, max_new_tokens)
        ready = now(decoder.base)
        steps = list(decoding)
        end = now(decoder.base)
        share = len(prompts)
        runs = []
        for row in range(share):
            own = [step[row] for step in steps if row in step]
            tokens = [token for step in own for token in step]
            lengths = [len(step) for step in own]
            runs.append(Run(tokens, lengths, 1, (ready - begin) / share, (end - ready) / share))
        return runs

    return run


def with_generate(base: Base, **options: Any) -> Way:
    """The model's own greedy `generate`; `options` are its own, such as `prompt_lookup_num_tokens`."""

    @torch.inference_mode()
    def run(prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[Run]:
        ids, mask = left_padded(prompts, base.pad_id)
        ids, mask = ids.to(base.device), mask.to(base.device)
        forwards = _Forwards(base)
        begin = now(base)
        criteria = StoppingCriteriaList([forwards])
        out = base.generate(ids, mask, max_new_tokens, stopping_criteria=criteria, **options)
        end = now(base)
        lengths = torch.tensor([ids.shape[1], *forwards.lengths]).diff().tolist()
        share = len(prompts)
        runs = []
        for row in out[:, ids.shape[1] :].tolist():
            tokens = cut_at_end(row, base.eos_ids)
            own = [min(length, len(tokens) - before) for length, before in _with_sums(lengths)]
            steps = [length for length in own if length > 0]
            seconds = (forwards.first - begin) / share, (end - forwards.first) / share
            runs.append(Run(tokens, steps, steps[0], *seconds))
        return runs

    return run


def _with_sums(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Each length with the sum of those before it."""
    return list(zip(lengths, itertools.accumulate(lengths, initial=0), strict=False))


class _Forwards(StoppingCriteria):
    """Never stops; `generate` asks it after each forward, so it knows how many tokens each has brought.

    Attributes:
        lengths: of the whole text after each forward.
        first: when the first was done, which ends the prefill.
    """

    def __init__(self, base: Base) -> None:
        self._base = base
        self._go_on = torch.zeros(1, dtype=torch.bool, device=base.device)
        self.lengths: list[int] = []
        self.first = 0.0

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: object) -> Tensor:
        if not self.lengths:
            self.first = now(self._base)
        self.lengths.append(input_ids.shape[1])
        return self._go_on
