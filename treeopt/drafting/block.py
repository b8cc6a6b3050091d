"""The drafter `block`, alone or with an n-gram table: a block drafter that reads the base's hidden states.

One forward gives the logits of all levels when a step begins. They know the root and the text before it, and not the
drafts above: with an n-gram table the candidates of a node depend on its parents.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from treeopt.drafter import Drafter
from treeopt.drafting.interface import AcceptedPart, Observed
from treeopt.drafting.kernel.data import KernelSource
from treeopt.drafting.kernel.session import KernelSession, top_logprobs
from treeopt.drafting.model import DRAFT_MODEL_SOURCE, PIECE
from treeopt.drafting.ngram import check_drafter
from treeopt.errors import Code, TreeoptError
from treeopt.models.base import Base
from treeopt.models.block_module import BlockModule
from treeopt.models.compatibility import check_draft
from treeopt.models.logits import rows_at_once
from treeopt.ngram_table import CONTEXT
from treeopt.verify.levels import LevelSession


class BlockProposer(KernelSource):
    """A block drafter as a drafter; `draft.model` is a `BlockModule`. E101 where the record has more levels."""

    def __init__(self, base: Base, draft: Base, drafter: Drafter) -> None:
        check_draft(base, draft)
        check_drafter(drafter, base, None, draft)
        assert isinstance(draft.model, BlockModule)
        super().__init__(drafter, base.vocab_size, DRAFT_MODEL_SOURCE, f"the model {draft.name}")
        self.draft, self.module = draft, draft.model
        if drafter.depth > self.module.levels:
            what = f"the drafter has {drafter.depth} levels, and {draft.name} drafts {self.module.levels}"
            raise TreeoptError(Code.TREE_TOO_DEEP, what, fix=f"at most {self.module.levels} (--levels)")
        self.known = min(self.known, draft.vocab_size)
        self.reads = self.module.wiring.reads
        self.window = 0 if drafter.ngram_table is None else max(drafter.window, CONTEXT)
        self.rows_at_once = rows_at_once(draft.vocab_size, self.module.levels)
        found = self.module.token_map
        self._tokens = None if found is None else found.numpy(force=True).astype(np.int32)

    def start(
        self, texts: Sequence[Sequence[int]], depth: int, ends: Sequence[Sequence[int]] | None = None
    ) -> BlockSession:
        return BlockSession(self, texts, depth, ends)

    def pack(self, logits: Tensor) -> Observed:
        """`top_logprobs` of logits on the host, with tokens of the base: [..., V] -> int32 [..., 2 K + 1]."""
        others = self.drafter.ngram_table is not None  # else all candidates are among the likeliest
        packed = top_logprobs(logits, self.known, others=others).numpy(force=True)
        if self._tokens is not None:
            packed[..., : self.known] = self._tokens[packed[..., : self.known]]
        return packed


class BlockSession(KernelSession):
    """Drafting of a batch by a block drafter. Row i of its cache is the base's states at token i of the text."""

    source: BlockProposer  # type: ignore[assignment]  # its logits are not of the roots' states alone

    def __init__(
        self,
        proposer: BlockProposer,
        texts: Sequence[Sequence[int]],
        depth: int,
        ends: Sequence[Sequence[int]] | None = None,
    ) -> None:
        super().__init__(proposer, texts, depth, ends)
        self._context, self._traced = LevelSession(proposer.draft, len(texts)), ends is not None

    @torch.inference_mode()
    def read(self, states: Sequence[Tensor]) -> None:
        found = torch.nn.utils.rnn.pad_sequence([self.source.module.states(one) for one in states], batch_first=True)
        lengths = [len(one) for one in states]
        for start in range(0, found.shape[1], PIECE):
            part = found[:, start : start + PIECE]
            self._append(part, [min(max(0, length - start), part.shape[1]) for length in lengths])
        if self._traced:
            self._context.branch(self._text.tolist(), (self._end - 1).tolist())

    def _append(self, states: Tensor, counts: Sequence[int]) -> None:
        """Cache states float [B, n, h] of tokens after each text, of which so many are real."""
        self._context.append(torch.zeros(states.shape[:2], dtype=torch.long, device=states.device), hidden=states)
        lengths = zip(self._context.lengths, counts, strict=True)
        self._context.keep([length + count for length, count in lengths])

    def observe(self, states: Tensor, logits: Tensor | None = None) -> Tensor | None:
        """Nothing: the block is run when a step begins."""
        return None

    def begin(self, roots: Tensor, states: Tensor) -> None:
        self.set_step(self.source.pack(self.logits(roots)[:, : self.depth]).reshape(len(roots), -1))

    @torch.inference_mode()
    def logits(self, roots: Tensor) -> Tensor:
        """Logits of all levels, float [B, levels, V_draft]."""
        wiring = self.source.module.wiring
        tokens = roots.to(self.source.draft.device)[:, None].expand(-1, wiring.size)
        visible = np.tri(wiring.size, dtype=np.bool_) if wiring.causal else np.ones((wiring.size,) * 2, np.bool_)
        found = self._context.block(tokens, visible)
        self._context.keep(self._context.lengths)
        return found

    @torch.inference_mode()
    def keep(self, kept: AcceptedPart) -> None:
        nodes = kept.paths.clamp(min=0)[..., None].expand(-1, -1, kept.hidden.shape[-1])
        self._append(self.source.module.states(kept.hidden.gather(1, nodes)), [len(one) for one in kept.tokens])
        super().keep(kept)

    def select(self, rows: Sequence[int]) -> None:
        super().select(rows)
        self._context.select(rows)

    def mark(self) -> Any:
        return super().mark(), self._context.lengths

    def rewind(self, mark: Any) -> None:
        of_text, lengths = mark
        super().rewind(of_text)
        self._context.keep(lengths)  # texts are known from the last tokens on, so their ends do not tell
