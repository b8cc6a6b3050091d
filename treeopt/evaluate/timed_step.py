"""A decode step that is timed: after cached texts, again and again."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from treeopt.decode.batch import Rows
from treeopt.decode.decoder import TreeDecoder
from treeopt.decode.rules import Greedy
from treeopt.drafting.interface import Drafts
from treeopt.models.base import Base
from treeopt.models.clock import now

_SEED = 0  # of the random prompts
_LEAD_IN = 3  # steps of the same size before a timed one, which fill the processor's caches


@dataclass(frozen=True)
class AcceptDeepest(Greedy):
    """Greedy acceptance at its full cost, whose result is replaced: the last node, a deepest one, is accepted.

    Random text accepts nothing, but keeping a deep path means moving cache entries, which a timed step must include.
    """

    def accept(self, drafts: Drafts, logits: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        node, root = super().accept(drafts, logits, generator)
        return node.fill_(drafts.tokens.shape[1] - 1), root


class TimedStep:
    """A step of a decoder after cached texts, which can be run again and again.

    Args:
        decoder: with `AcceptDeepest` as its rule.
        cached: the texts in the cache of a decoder of the same base, whose trees are at least as large and as deep; all
            sizes share the one cache.
        prompts: int64 [B, T], the same texts.
    """

    def __init__(self, decoder: TreeDecoder, cached: Rows, prompts: Tensor) -> None:
        self.decoder = decoder
        texts = [[*text, root] for text, root in zip(prompts.tolist(), cached.roots, strict=True)]
        drafting = decoder.trees.start(texts)
        self.rows = Rows(cached.session, drafting, cached.roots, cached.root, cached.hidden, None)
        self._start = self.rows.mark()

    def seconds(self) -> float:
        """Run the step, and return the rows to the state before it."""
        begin = now(self.decoder.base)
        self.decoder.step(self.rows)
        end = now(self.decoder.base)
        self.rows.rewind(self._start)
        return end - begin

    def after_lead_in(self) -> float:
        """Seconds of a step that follows `_LEAD_IN` steps of the same size."""
        for _ in range(_LEAD_IN):
            self.seconds()
        return self.seconds()


def random_prompts(base: Base, batch: int, context: int) -> Tensor:
    """int64 [B, T], the same at every call."""
    # Raises at once where not even the hidden states fit; texts are prefilled as a list, which takes long to make.
    torch.empty(batch, context, base.hidden_size, dtype=base.dtype, device=base.device)
    rng = torch.Generator().manual_seed(_SEED)
    return torch.randint(base.vocab_size, (batch, context), generator=rng).to(base.device)
