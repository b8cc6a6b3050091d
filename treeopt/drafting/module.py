"""The drafters `eagle` and `mtp`, alone or with an n-gram table: a draft module that reads the base's hidden states.

As a draft model they run once for each level of the tree. A row of the module is a token with the base's state at the
token before it; below the first level it reads its own state at the parent. After each step the rows of the accepted
tokens are run again with the base's states.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from treeopt.drafter import Drafter
from treeopt.drafting.interface import AcceptedPart, Expansion, Ints, TokenLists
from treeopt.drafting.model import FIRST, PIECE, ModelProposer, ModelSession
from treeopt.models.base import Base
from treeopt.models.draft_module import DraftModule
from treeopt.verify.session import pick


class ModuleProposer(ModelProposer):
    """A draft module as a drafter; `draft.model` is a `DraftModule`."""

    def __init__(self, base: Base, draft: Base, drafter: Drafter) -> None:
        super().__init__(base, draft, drafter)
        assert isinstance(draft.model, DraftModule)
        self.module = draft.model

    def start(self, texts: TokenLists, depth: int, ends: TokenLists | None = None) -> ModuleSession:
        return ModuleSession(self, texts, depth, None) if ends is None else TracedModule(self, texts, depth, ends)

    def ids(self, tokens: Ints) -> Tensor:
        return torch.from_numpy(tokens.clip(0)).to(self.draft.device)


class ModuleSession(ModelSession):
    """Drafting of a batch by a draft module. Row i of a text is its token i + 1 with the base's state at token i."""

    source: ModuleProposer
    first = 1
    traced = False

    def __init__(self, proposer: ModuleProposer, texts: TokenLists, depth: int, ends: TokenLists | None = None) -> None:
        super().__init__(proposer, texts, depth, ends)
        self._given = texts
        self._states = torch.zeros(len(texts), 0, 0)  # [T, n, h], those that the rows of each text read

    def prefill(self, texts: TokenLists) -> None:
        """Nothing yet: the rows are run when the base's states are known."""

    @torch.inference_mode()
    def read(self, states: Sequence[Tensor]) -> None:
        for text, read in enumerate(states):
            self._write(np.array([text]), np.zeros(1, np.int64), self.source.module.states(read)[None])
        if not self.traced:
            self._run_texts([text[self.first : -1] for text in self._given])

    def _run_texts(self, texts: TokenLists) -> list[Tensor]:
        """Run tokens of each text from its second on, a piece at a time; the states float [T, n, h] of each."""
        hidden = []
        for start in range(0, max(map(len, texts)), PIECE):
            self._append([text[start : start + PIECE] for text in texts], logits_to_keep=1)
            assert self._model.hidden is not None
            hidden.append(self._model.hidden)
        return hidden

    def _write(self, texts: Ints, starts: Ints, states: Tensor, part: slice | None = None) -> None:
        """Set a part of the states of some texts from a token each on: float [n, m, h]."""
        end, wide = int(starts.max()) + states.shape[1], self.source.module.state_width
        if end > self._states.shape[1]:
            grown = states.new_zeros(len(self._states), max(end, 2 * self._states.shape[1]), wide)
            grown[:, : self._states.shape[1]] = self._states if self._states.numel() else 0
            self._states = grown
        columns = starts[:, None] + np.arange(states.shape[1])
        part = part or slice(states.shape[-1])
        self._states[torch.from_numpy(texts)[:, None], torch.from_numpy(columns), part] = states

    def _append(self, tokens: Sequence[Sequence[int] | Ints], *, logits_to_keep: int = 0) -> Tensor:
        starts = np.array(self._model.lengths)
        columns = torch.from_numpy(starts[:, None] + np.arange(max(map(len, tokens))))
        texts = torch.from_numpy(self._rows_of_model())[:, None]
        hidden = self._states[texts, columns.clamp(max=self._states.shape[1] - 1)]
        logits = self.run(tokens, logits_to_keep, hidden=hidden)
        if self.source.module.further:
            assert self._model.hidden is not None
            further = slice(self.source.module.config.hidden_size, None)
            self._write(self._rows_of_model(), starts + 1, self._model.hidden[..., further], further)
        return logits

    def _rows_of_model(self) -> Ints:
        """The text of each row of the module's cache."""
        return self._text

    def _after_last(self, tokens: Sequence[Sequence[int] | Ints], last: Tensor) -> Tensor:
        self._append(tokens, logits_to_keep=1)
        assert self._model.hidden is not None
        hidden = pick(self._model.hidden, last)
        self._model.after(hidden)
        return self.source.module.logits(hidden)

    @torch.inference_mode()
    def keep(self, kept: AcceptedPart) -> None:
        nodes = kept.paths.clamp(min=0)[..., None].expand(-1, -1, kept.hidden.shape[-1])
        self._write(self._text, self._end - 1, self.source.module.states(kept.hidden.gather(1, nodes)))
        super().keep(kept)

    def prepare(self, true: Ints) -> None:
        """The logits after the root and the true tokens, one after the other."""
        root, seen = self._model.hidden, [self._root]
        assert root is not None
        for level in range(true.shape[1]):
            logits = self._model.extend(self.source.ids(true[:, level : level + 1]), FIRST)
            seen.append(self.source.pack(logits))
        self._model.after(root[:, 0])
        self.set_step(np.concatenate(seen, axis=1))


class TracedModule(ModuleSession):
    """Positions of finished texts as rows: copies of the rows before each position, from one pass over each text."""

    traced = True

    def _rows_of_model(self) -> Ints:
        return np.arange(len(self._model.lengths))

    def begin(self, roots: Tensor, states: Tensor) -> None:
        roots_of = self.at_roots()
        self._root = self.source.pack(self.source.module.logits(roots_of)[:, None])
        self._model.after(roots_of)
        self.set_step(self._root)

    @torch.inference_mode()
    def at_roots(self) -> Tensor:
        """Run the texts, and copy the rows before each position; the states float [B, h] at the roots."""
        hidden = torch.cat(self._run_texts([text[self.first :] for text in self._given]), dim=1)
        at = self._end - self.first - 1
        self._model.branch(self._text.tolist(), (at + 1).tolist())
        return hidden[torch.from_numpy(self._text), torch.from_numpy(at)]

    def expand(self, nodes: int, depth: int) -> Expansion:
        root: Any = self._model.hidden
        grown = super().expand(nodes, depth)
        self._model.after(root[:, 0])
        return grown
