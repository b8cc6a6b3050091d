"""Rows: texts in progress, one a row of a batch, between two steps of the decoder."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from treeopt.decode.accept import NOT_A_NUMBER
from treeopt.drafting.heads import NO_TOKEN
from treeopt.errors import Code, TreeoptError
from treeopt.verify.session import Session


class Rows:
    """Texts in progress; made by `TreeDecoder.prefill`, advanced by `TreeDecoder.step`.

    Args:
        session: the prompts, prefilled.
        root: int64 [B], the token that was chosen after each.
        hidden: float [B, d], the states that chose the roots.
        generator: of the draws to come.
        texts: the last `context` - 1 tokens of each prompt, or all there are; nothing is looked at where the context
            is 0.
        context: how many tokens of each text the proposer wants, the root counted.

    Attributes:
        indices: which prompt each row came from.
        roots: each row's next token, chosen but not yet emitted; the next step emits it first.
        recent: int64 [B, R], as `Proposer.propose` takes it. On the host, which knows every token anyway.
    """

    def __init__(
        self,
        session: Session,
        root: Tensor,
        hidden: Tensor,
        generator: torch.Generator | None,
        texts: Sequence[Sequence[int]] = (),
        context: int = 0,
    ) -> None:
        self.indices = list(range(len(session.lengths)))
        self.roots: list[int] = root.tolist()
        self._session = session
        self._root = root
        self._hidden = hidden
        self._generator = generator
        begin = [NO_TOKEN] * context
        ends = [[*begin, *text, own][-context:] for text, own in zip(texts, self.roots, strict=True)] if context else []
        self.recent = np.array(ends, np.int64) if context else None

    def advance_(self, steps: Sequence[Sequence[int]], roots: list[int], root: Tensor, hidden: Tensor) -> None:
        """Go on behind a step that emitted `steps`, each row's old root and its accepted drafts."""
        if self.recent is not None:
            went = zip(self.recent, steps, roots, strict=True)
            self.recent = np.stack([np.append(text, [*step[1:], own])[-len(text) :] for text, step, own in went])
        self.roots, self._root, self._hidden = roots, root, hidden

    def keep(self, rows: Sequence[int]) -> None:
        """Go on with these rows (0 .. B-1, ascending) only; they are numbered anew."""
        if len(rows) == len(self.indices):
            return
        self.indices = [self.indices[row] for row in rows]
        self.roots = [self.roots[row] for row in rows]
        if rows:
            self.recent = None if self.recent is None else self.recent[list(rows)]
            self._session.select(rows)
            self._root, self._hidden = self._root[list(rows)], self._hidden[list(rows)]

    def check(self) -> None:
        """Raise E504 where a row's next token was chosen from scores that are no numbers."""
        if NOT_A_NUMBER in self.roots:
            row = self.roots.index(NOT_A_NUMBER)
            where = f"prompt {self.indices[row]}, after {self._session.lengths[row]} tokens of prompt and text"
            raise TreeoptError(Code.NOT_FINITE, "the base model gives logits that are not numbers", at=where)
