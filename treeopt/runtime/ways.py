"""Ways to decode one text greedily, each timed alike: stock `generate`, prompt lookup, our loop with any tree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList

from treeopt.models.base import Base
from treeopt.runtime.clock import now
from treeopt.runtime.decode import TreeDecoder


@dataclass(frozen=True)
class Run:
    """One text, decoded one way.

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


Way = Callable[[Sequence[int], int], Run]  # prompt ids, most new tokens


def with_decoder(decoder: TreeDecoder) -> Way:
    """Our own loop with the decoder's tree; the one-node tree is one by one."""

    def run(prompt: Sequence[int], max_new_tokens: int) -> Run:
        begin = now(decoder.base)
        decoding = decoder.start(prompt, max_new_tokens)
        ready = now(decoder.base)
        steps = list(decoding)
        end = now(decoder.base)
        tokens = [token for step in steps for token in step]
        return Run(tokens, [len(step) for step in steps], 1, ready - begin, end - ready)

    return run


def with_generate(base: Base, **options: Any) -> Way:
    """The model's own greedy `generate`; `options` are its own, such as `prompt_lookup_num_tokens`."""

    @torch.inference_mode()
    def run(prompt: Sequence[int], max_new_tokens: int) -> Run:
        ids = torch.tensor([list(prompt)], device=base.device)
        forwards = _Forwards(base)
        begin = now(base)
        criteria = StoppingCriteriaList([forwards])
        out = base.generate(ids, torch.ones_like(ids), max_new_tokens, stopping_criteria=criteria, **options)
        end = now(base)
        lengths = torch.tensor([len(prompt), *forwards.lengths]).diff().tolist()
        return Run(out[0, len(prompt) :].tolist(), lengths, lengths[0], forwards.first - begin, end - forwards.first)

    return run


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
