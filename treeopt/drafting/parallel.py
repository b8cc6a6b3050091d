"""The drafter `block` of P-EAGLE: an EAGLE-3 head that drafts all levels in one forward (arXiv:2602.01469).

The root's row gives the first level, and a row of a mask below it each further one. They do not know the drafts above.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from treeopt.drafter import Drafter
from treeopt.drafting.interface import Expansion, Ints
from treeopt.drafting.kernel.session import KernelRows, KernelSession
from treeopt.drafting.module import ModuleProposer, ModuleSession, TracedModule
from treeopt.errors import Code, TreeoptError
from treeopt.models.base import Base


class ParallelProposer(ModuleProposer):
    """A P-EAGLE head as a drafter. E101 where the record has more levels."""

    def __init__(self, base: Base, draft: Base, drafter: Drafter) -> None:
        super().__init__(base, draft, drafter)
        check_levels(draft, drafter)

    def start(
        self, texts: Sequence[Sequence[int]], depth: int, ends: Sequence[Sequence[int]] | None = None
    ) -> ModuleSession:
        return ParallelSession(self, texts, depth, None) if ends is None else TracedParallel(self, texts, depth, ends)


def check_levels(draft: Base, drafter: Drafter) -> None:
    """Raise E101 where a record has more levels than a block."""
    most = draft.model.levels
    if drafter.depth > most:
        what = f"the drafter has {drafter.depth} levels, and {draft.name} drafts {most}"
        raise TreeoptError(Code.TREE_TOO_DEEP, what, fix=f"at most {most} (--levels)")


class _Parallel(KernelSession, ModuleSession):
    """What a session in progress and one of finished texts share; the kernel grows trees, as all logits are known."""

    source: ParallelProposer  # type: ignore[assignment]  # its logits are not of the roots' states alone

    def observe(self, states: Tensor, logits: Tensor | None = None) -> Tensor | None:
        """Nothing: the rows are run when a step begins."""
        return None

    def begin(self, roots: Tensor, states: Tensor) -> None:
        packed = self.source.pack(self.block(roots)[:, : self.depth])
        self.set_step(packed.reshape(len(packed), -1))

    @torch.inference_mode()
    def block(self, roots: Tensor) -> Tensor:
        """Logits of all levels, float [B, levels, V_draft]."""
        first = self.advance()[:, None]
        tokens, hidden = self.source.module.masks(len(first))
        if not tokens.shape[1]:
            return first
        below, _ = self._model.block(tokens, np.tri(tokens.shape[1], dtype=np.bool_), hidden)
        return torch.cat([first, below], dim=1)

    def prepare(self, true: Ints) -> None:
        """Nothing: all logits are known when a step begins."""

    def expand(self, nodes: int, depth: int) -> Expansion:
        return KernelRows.expand(self, nodes, depth)


class ParallelSession(_Parallel):
    """Drafting of a batch."""


class TracedParallel(_Parallel, TracedModule):
    """Positions of finished texts as rows."""

    def advance(self) -> Tensor:
        return self.source.module.logits(self.at_roots())
