"""The drafter `block`, alone or with an n-gram table: a block drafter that reads the base's hidden states.

One forward gives the logits of all levels when a step begins. They know the root and the text before it, and not the
drafts above, but for blocks with a head that reads the token above: with such a head or an n-gram table the candidates
of a node depend on its parents.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from treeopt.drafter import Drafter
from treeopt.drafting.interface import AcceptedPart, Expansion, Floats, Ints, TokenLists
from treeopt.drafting.kernel.session import KernelRows
from treeopt.drafting.model import FIRST, PIECE, DraftSource, LevelRows
from treeopt.drafting.parallel import LevelsAtOnce, check_levels
from treeopt.models.base import Base
from treeopt.models.block_heads import log_odds, with_confidence
from treeopt.models.block_module import BlockModule
from treeopt.models.logits import rows_at_once
from treeopt.ngram_table import CONTEXT
from treeopt.verify.levels import LevelSession


class BlockProposer(DraftSource):
    """A block drafter as a drafter; `draft.model` is a `BlockModule`. E101 where the record has more levels."""

    def __init__(self, base: Base, draft: Base, drafter: Drafter) -> None:
        super().__init__(base, draft, drafter)
        assert isinstance(draft.model, BlockModule)
        self.module = draft.model
        check_levels(draft, drafter)
        self.window = 0 if drafter.ngram_table is None else max(drafter.window, CONTEXT)
        self.rows_at_once = rows_at_once(draft.vocab_size, self.module.levels)

    def start(self, texts: TokenLists, depth: int, ends: TokenLists | None = None) -> BlockRows:
        made = BlockSession if self.module.token_head is None else ConditionalSession
        return made(self, texts, depth, ends)


class BlockRows(KernelRows):
    """Texts of a batch beside a block drafter. Row i of its cache is the base's states at token i of the text."""

    source: BlockProposer

    def __init__(self, proposer: BlockProposer, texts: TokenLists, depth: int, ends: TokenLists | None = None) -> None:
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

    @torch.inference_mode()
    def block(self, roots: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of all levels by the block alone, float [B, levels, V_draft], and its rows [B, levels, h]."""
        wiring = self.source.module.wiring
        tokens = roots.to(self.source.draft.device)[:, None].expand(-1, wiring.size)
        visible = np.tri(wiring.size, dtype=np.bool_) if wiring.causal else np.ones((wiring.size,) * 2, np.bool_)
        return self._context.block(tokens, visible)

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


class BlockSession(BlockRows, LevelsAtOnce):
    """Drafting of a batch by a block drafter whose levels do not depend on each other."""

    source: BlockProposer

    def all_levels(self, roots: Tensor) -> Tensor:
        return self.block(roots)[0]


class ConditionalSession(BlockRows, LevelRows):
    """Drafting of a batch by a block drafter whose logits depend on the token above, as DSpark's and DFlash2's do.

    One forward of the block gives what the levels have in common; its head is run for each level of the tree.
    """

    source: BlockProposer

    def begin(self, roots: Tensor, states: Tensor) -> None:
        self._root = self.source.pack(self.first(roots))

    @torch.inference_mode()
    def first(self, roots: Tensor) -> Tensor:
        """Run the block; logits float [B, 1, V_draft] after the roots."""
        self._logits, self._rows = self.block(roots)
        head = self.source.module.token_head
        assert head is not None
        self._level, self._paths = 0, self._rows.new_zeros(len(roots), 1, head.state_size)
        self._roots, self._first = roots, self._after(roots[:, None].to(self._rows.device))
        return self._first

    @torch.inference_mode()
    def extend(self, tokens: Ints, parents: Ints) -> Tensor:
        self._level += 1
        self._paths = self._paths[torch.arange(len(tokens))[:, None], torch.from_numpy(parents)]
        return self._after(torch.from_numpy(tokens.clip(0)).to(self._rows.device))

    def _after(self, tokens: Tensor) -> Tensor:
        """Logits [B, n, V_draft] of this level after tokens int64 [B, n] of the level above."""
        module, level = self.source.module, self._level
        logits, self._paths = module.after(level, self._logits, self._rows, tokens, self._paths)
        weights = self.source.drafter.levels[level].confidence if level < self.source.depth else ()
        if weights:
            logits = with_confidence(logits, module.confidence(self._rows[:, level : level + 1], tokens), weights)
        return logits

    def _along(self, true: Ints) -> Iterator[Tensor]:
        """The logits after the true tokens int64 [B, n], each [B, 1, V_draft]; the session stays at the root."""
        paths = self._paths
        for level in range(true.shape[1]):
            yield self.extend(true[:, level : level + 1], FIRST)
        self._level, self._paths = 0, paths

    def prepare(self, true: Ints) -> None:
        """The logits after the root and the true tokens, one after the other."""
        self.set_step(np.concatenate([self._root, *map(self.source.pack, self._along(true))], axis=1))

    @torch.inference_mode()
    def odds(self, true: Ints) -> tuple[Floats, Floats]:
        """Of each level's likeliest token after true tokens int64 [B, L], the log-odds by the logits, and those by the
        confidence head: float64 [B, L] each.
        """
        module, levels = self.source.module, range(true.shape[1])
        above = np.concatenate([self._roots.numpy(force=True)[:, None], true[:, :-1].clip(0)], axis=1)
        tokens = torch.from_numpy(above).to(self._rows.device)
        own = torch.cat([log_odds(one)[0] for one in (self._first, *self._along(true[:, :-1]))], dim=1)[..., 0]
        sure = torch.cat([module.confidence(self._rows[:, i : i + 1], tokens[:, i : i + 1]) for i in levels], dim=1)
        return own.numpy(force=True), sure.double().numpy(force=True)

    def expand(self, nodes: int, depth: int) -> Expansion:
        paths = self._paths
        grown = super().expand(nodes, depth)
        self._level, self._paths = 0, paths
        return grown
