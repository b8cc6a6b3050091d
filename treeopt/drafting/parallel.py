"""The drafter `block` of P-EAGLE: an EAGLE-3 head that drafts all levels in one forward (arXiv:2602.01469).

The root's row gives the first level, and a row of a mask below it each further one. They do not know the drafts above.
"""

from abc import abstractmethod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from treeopt.drafter import Drafter
from treeopt.drafting.interface import Expansion, Ints, TokenLists
from treeopt.drafting.kernel.session import KernelRows, KernelSession
from treeopt.drafting.module import ModuleProposer, ModuleSession, TracedModule
from treeopt.errors import Code, TreeoptError
from treeopt.models.base import Base
from treeopt.verify.levels import LevelSession
from treeopt.verify.probe import route_of


class ParallelProposer(ModuleProposer):
    """A P-EAGLE head as a drafter. E101 where the record has more levels."""

    def __init__(self, base: Base, draft: Base, drafter: Drafter) -> None:
        super().__init__(base, draft, drafter)
        check_levels(draft, drafter)
        if route_of(draft) != "tree":
            what = f"the layers of {draft.name} cannot attend to a tree"
            raise TreeoptError(Code.NO_TREES, what, why="P-EAGLE runs the rows of a block after a cache of all texts")

    def start(self, texts: TokenLists, depth: int, ends: TokenLists | None = None) -> ModuleSession:
        return ParallelSession(self, texts, depth, None) if ends is None else TracedParallel(self, texts, depth, ends)


def check_levels(draft: Base, drafter: Drafter) -> None:
    """Raise E101 where a record has more levels than a block."""
    most = draft.model.levels
    if drafter.depth > most:
        what = f"the drafter has {drafter.depth} levels, and {draft.name} drafts {most}"
        raise TreeoptError(Code.TREE_TOO_DEEP, what, fix=f"at most {most} (--levels)")


class LevelsAtOnce(KernelSession):
    """A session of which one forward gives the logits of all levels, when a step begins."""

    source: Any  # a `DraftSource`

    @abstractmethod
    def all_levels(self, roots: Tensor) -> Tensor:
        """Logits float [B, levels, V_draft] below roots int64 [B]."""

    def observe(self, states: Tensor, logits: Tensor | None = None) -> Tensor | None:
        return None

    def begin(self, roots: Tensor, states: Tensor) -> None:
        packed = self.source.pack(self.all_levels(roots)[:, : self.depth])
        self.set_step(packed.reshape(len(packed), -1))


class ParallelSession(LevelsAtOnce, ModuleSession):
    """Drafting of a batch; the kernel grows trees, as all logits are known when a step begins."""

    source: ParallelProposer  # type: ignore[assignment]  # its logits are not of the roots' states alone
    _model: LevelSession

    @torch.inference_mode()
    def all_levels(self, roots: Tensor) -> Tensor:
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


class TracedParallel(ParallelSession, TracedModule):
    """Positions of finished texts as rows."""

    def advance(self) -> Tensor:
        return self.source.module.logits(self.at_roots())
