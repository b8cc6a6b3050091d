"""The `heads+ngram` drafter: candidates of heads, n-gram table and prompt lookup, scored given the tokens before them.

Without heads (H = 0 in the record) the candidates are those of the n-gram table, the text so far and the LM head.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from treeopt.drafter import CONTEXT, Drafter
from treeopt.drafting.heads import check_drafter, check_logits, rows_at_once
from treeopt.drafting.interface import Candidates, Features, Ints, Kept, Nodes, ProposerSession
from treeopt.drafting.scores import Scorer, num_candidates
from treeopt.errors import Code, TreeoptError
from treeopt.models.base import Base, check_heads_fit, heads_like
from treeopt.models.heads import MedusaHeads

NO_TOKEN = -1  # padding of a row's recent tokens, before the start of its text


class NgramProposer:
    """A drafter record with an n-gram table, and the model that it drafts for.

    Args:
        base: the base model.
        heads: its draft heads; None where the record has none.
        drafter: the record.

    Raises:
        TreeoptError: E101 where the record needs heads and none are given, E212 where the heads do not fit the base,
            E223 where the record does not fit base or heads.
    """

    def __init__(self, base: Base, heads: MedusaHeads | None, drafter: Drafter) -> None:
        if heads is None and drafter.num_heads:
            raise TreeoptError(Code.TREE_TOO_DEEP, "no heads were given", fix="heads=treeopt.load_heads(...).heads")
        if heads is not None:
            check_heads_fit(base, heads, "given")
        check_drafter(drafter, base, heads)
        self.base = base
        self.heads = None if heads is None else heads_like(base, heads)
        self.scorer = Scorer(drafter)
        self.depth = drafter.depth
        self.window = self.scorer.window
        self.num_candidates = num_candidates(drafter, base.vocab_size)
        self.rows_at_once = rows_at_once(base, drafter.num_heads or min(1, drafter.lm_head_levels), scored=True)

    def start(self, texts: Sequence[Sequence[int]] | Ints, depth: int) -> NgramSession:
        # No wider than needed, as places without a token take time. A scorer reaches `depth` places less of the start.
        width = min(self.window, max(CONTEXT, *map(len, texts)) + self.depth)
        recent = np.full((len(texts), width), NO_TOKEN)
        for row, text in enumerate(texts):
            last = text[-width:]
            recent[row, width - len(last) :] = last
        return NgramSession(self, recent, depth)

    def head_logits(self, states: Tensor, depth: int) -> Tensor:
        """Logits at states [B, d]: float [min(depth, H), B, V] of the heads, or [1, B, V] of the LM head."""
        levels = min(depth, self.scorer.logit_levels)
        if self.heads is not None:
            logits: Tensor = self.heads(states, self.base.lm_head, levels)
            return logits
        if not levels:
            return states.new_zeros(0, len(states), self.base.vocab_size)
        choices: Tensor = self.base.lm_head(states)
        return choices[None]


class NgramSession(ProposerSession):
    """Drafting of a batch; the last tokens of each row are stored on the host.

    Args:
        proposer: the drafter.
        recent: int64 [B, R], the last tokens of each row, the root last; negative before the start of the text. R grows
            with the text up to the proposer's window.
        depth: levels of each step.
    """

    def __init__(self, proposer: NgramProposer, recent: Ints, depth: int) -> None:
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

    def keep(self, kept: Kept) -> None:
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

    def check_finite(self, first: int) -> None:
        check_logits(self._logits, first)
