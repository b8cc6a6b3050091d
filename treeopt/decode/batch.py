"""The rows of a batch: the state of texts in progress between two steps of the decoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from treeopt.decode.accept import NOT_A_NUMBER
from treeopt.decode.draft_metrics import Step
from treeopt.drafting.interface import AcceptedPart, Drafts, ProposerSession
from treeopt.models.base import Base
from treeopt.models.finite import not_finite
from treeopt.tree import ROOT
from treeopt.verify.buffers import PAD, Buffers
from treeopt.verify.session import Session


@dataclass(frozen=True, eq=False)
class Mark:
    """The place of rows in their texts, for `Rows.rewind`."""

    lengths: list[int]
    drafting: Any
    roots: list[int]
    root: Tensor
    hidden: Tensor


class Rows:
    """Texts in progress; made by `TreeDecoder.prefill`, advanced by `TreeDecoder.step`.

    Args:
        session: the prompts, prefilled.
        drafting: the drafter's session for the same rows.
        roots: each row's first token.
        root: the same as int64 [B] on the model's device.
        hidden: float [B, d], the states that chose the roots.
        logits: float [B, V], the base's logits there.
        generator: of random draws; None for torch's default.

    Attributes:
        indices: the prompt of each row.
        roots: each row's next token, chosen but not yet emitted; the next step emits it first.
    """

    def __init__(
        self,
        session: Session,
        drafting: ProposerSession,
        roots: list[int],
        root: Tensor,
        hidden: Tensor,
        logits: Tensor | None,
        generator: torch.Generator | None,
    ) -> None:
        self.indices = list(range(len(roots)))
        self.session, self.drafting = session, drafting
        self.roots, self.root, self.hidden = roots, root, hidden
        self.generator = generator
        with torch.inference_mode():
            observed = drafting.observe(hidden, logits)
        if observed is not None:
            drafting.look(observed.numpy(force=True))

    def advance_(self, drafts: Drafts, verified: tuple[Tensor, Tensor], node: Tensor, root: Tensor) -> list[Step]:
        """Keep each row's path to the accepted node, and continue after it. One synchronisation with the device.

        Args:
            drafts: the verified trees.
            verified: logits [B, N, V] and hidden states [B, N, d] of all nodes.
            node: int64 [B], the accepted nodes.
            root: int64 [B], the tokens chosen after them.

        Returns:
            For each row its old root and the accepted drafts, with the number of its draft tokens.
        """
        logits, hidden = verified
        self.hidden = _at(hidden, node)
        observed = self.drafting.observe(self.hidden, _at(logits, node))
        one_node = drafts.tokens.shape[1] == 1
        paths = node[:, None] if one_node else drafts.tree.paths_to(node)  # [B, D+1]
        parts = [root[:, None]] if one_node else _of_step(drafts, paths, root)
        columns = sum(part.shape[1] for part in parts)
        if observed is not None:
            parts.append(observed)
        host = torch.cat([part.int() for part in parts], dim=1).numpy(force=True)  # the only transfer to the host
        numbers: list[list[int]] = host[:, :columns].tolist()
        roots = [row[0] for row in numbers]
        if one_node:
            known, emitted = [[ROOT]] * len(roots), [Step([old]) for old in self.roots]
        else:
            known, emitted = _emitted(numbers, paths.shape[1], drafts)
        self.session.keep(known, paths)
        new = [[*step[1:], next_root] for step, next_root in zip(emitted, roots, strict=True)]
        self.drafting.keep(AcceptedPart(new, paths, logits, hidden, drafts))
        if observed is not None:
            self.drafting.look(host[:, columns:])
        self.roots, self.root = roots, root
        return emitted

    def keep(self, rows: Sequence[int]) -> None:
        """Continue with these rows (0 .. B-1, ascending) only; they are renumbered from 0."""
        if len(rows) == len(self.indices):
            return
        self.indices = [self.indices[row] for row in rows]
        self.roots = [self.roots[row] for row in rows]
        if rows:
            self.drafting.select(rows)
            self.session.select(rows)
            self.root, self.hidden = self.root[list(rows)], self.hidden[list(rows)]

    def mark(self) -> Mark:
        """The place in the texts, for `rewind`."""
        return Mark(self.session.lengths, self.drafting.mark(), self.roots, self.root, self.hidden)

    def rewind(self, mark: Mark) -> None:
        """Undo the steps since `mark`; the rows must be the same."""
        self.session.rewind(mark.lengths)
        self.drafting.rewind(mark.drafting)
        self.roots, self.root, self.hidden = mark.roots, mark.root, mark.hidden

    def check(self, base: Base) -> None:
        """Raise E504, which names the base, where a row's next token was chosen from scores that are not finite."""
        if NOT_A_NUMBER in self.roots:
            row = self.roots.index(NOT_A_NUMBER)
            where = f"prompt {self.indices[row]}, after {self.session.lengths[row]} tokens of prompt and text"
            error = not_finite(base, outputs="logits")
            error.at = where
            raise error


def _at(states: Tensor, node: Tensor) -> Tensor:
    """The state of one node of each row: [B, N, d] -> [B, d]."""
    if states.shape[1] == 1:
        return states[:, 0]
    if len(node) == 1:
        return states[0].index_select(0, node)
    return states[torch.arange(len(node), device=node.device), node]


def _of_step(drafts: Drafts, paths: Tensor, root: Tensor) -> list[Tensor]:
    """The columns that the host reads: next root, accepted path, its tokens, and `_lost` where nodes are void."""
    tokens = drafts.tokens.gather(1, paths.clamp(min=0))
    lost = [] if drafts.void is None else [_lost(drafts.tree, drafts.void)]
    return [root[:, None], paths, tokens, *lost]


def _emitted(rows: list[list[int]], width: int, drafts: Drafts) -> tuple[list[list[int]], list[Step]]:
    """The nodes of each row's accepted path, and its tokens, from the columns of `_of_step` with paths [B, width]."""
    most = drafts.tokens.shape[1] - 1
    known = [[node for node in row[1 : width + 1] if node != PAD] for row in rows]
    steps = [
        Step(row[width + 1 :][: len(path)], most if drafts.void is None else most - row[-1])
        for row, path in zip(rows, known, strict=True)
    ]
    return known, steps


def _lost(tree: Buffers, void: Tensor) -> Tensor:
    """int64 [B, 1]: each row's nodes that are void or below a void node, which no rule can accept."""
    return (tree.along_paths(void.float()) > 0).sum(1, keepdim=True)
