"""A drafter record in numpy, with the calls of a session of the kernel that benches and tests compare."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from numpy_draft.levels import Candidates, LevelSession, Nodes
from numpy_draft.scores import Scorer
from treeopt.drafting.interface import AcceptedPart, Features, Ints
from treeopt.drafting.ngram import RecordProposer
from treeopt.ngram_table import CONTEXT

NO_TOKEN = -1  # padding of a row's recent tokens, before the start of its text


class NumpyProposer:
    """The drafter of a `RecordProposer`."""

    def __init__(self, proposer: RecordProposer) -> None:
        self.proposer = proposer
        self.scorer = Scorer(proposer.drafter)
        self.depth, self.window = proposer.depth, self.scorer.window

    def start(self, texts: Sequence[Sequence[int]] | Ints, depth: int) -> NgramSession:
        """A session whose rows are the texts."""
        width = min(self.window, max(CONTEXT, *map(len, texts)) + self.depth)
        recent = np.full((len(texts), width), NO_TOKEN)
        for row, text in enumerate(texts):
            last = text[-width:]
            recent[row, width - len(last) :] = last
        return NgramSession(self, recent, depth)

    def head_logits(self, states: Tensor, depth: int) -> Tensor:
        """As `RecordProposer.logits`."""
        return self.proposer.logits(states, depth)


class NgramSession(LevelSession):
    """Drafting of a batch; the last tokens of each row are stored on the host.

    Args:
        proposer: the drafter.
        recent: int64 [B, R], the last tokens of each row, the root last; negative before the start of the text. R grows
            with the text up to the proposer's window.
        depth: levels of each step.
    """

    def __init__(self, proposer: NumpyProposer, recent: Ints, depth: int) -> None:
        self._proposer = proposer
        self._recent = recent
        self._depth = depth
        self._last: tuple[Nodes, Candidates] | None = None

    def begin(self, roots: Tensor, states: Tensor) -> Nodes:
        self._logits = self._proposer.head_logits(states, self._depth)
        self._step = self._proposer.scorer.begin(self._logits, self._recent, self._depth)
        self._last = None
        return self._step.root

    def candidates(self, nodes: Nodes) -> Candidates:
        if self._last is None or self._last[0] is not nodes:
            self._last = nodes, self._proposer.scorer.candidates(self._step, nodes)
        return self._last[1]

    def features(self, nodes: Nodes) -> Features:
        return self._proposer.scorer.features(self._step, nodes)

    def follow(self, nodes: Nodes, parents: Ints, tokens: Ints) -> Nodes:
        return self._proposer.scorer.follow(self._step, nodes, parents, tokens)

    def keep(self, kept: AcceptedPart) -> None:
        rows = [np.append(recent, tokens) for recent, tokens in zip(self._recent, kept.tokens, strict=True)]
        width = min(self._proposer.window, max(map(len, rows)))
        self._recent = np.full((len(rows), width), NO_TOKEN)
        for row, recent in zip(self._recent, rows, strict=True):
            row[max(0, width - len(recent)) :] = recent[-width:]

    def select(self, rows: Sequence[int]) -> None:
        self._recent = self._recent[list(rows)]

    def mark(self) -> Ints:
        return self._recent

    def rewind(self, mark: Ints) -> None:
        self._recent = mark
