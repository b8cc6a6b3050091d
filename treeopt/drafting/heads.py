"""The `heads` drafter: a node of rank r at level h gets the token of rank r of head h, for every parent."""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

from treeopt.drafter import Drafter
from treeopt.drafting.interface import (
    NO_CANDIDATE,
    NO_FLOATS,
    Drafts,
    Expansion,
    Features,
    Floats,
    Ints,
    ProposerSession,
    SizeLimits,
    TokenLists,
)
from treeopt.drafting.kernel.data import num_candidates
from treeopt.drafting.ngram import HEAD_SOURCE, RecordProposer, check_drafter
from treeopt.errors import Code, TreeoptError
from treeopt.models.base import Base
from treeopt.models.compatibility import check_states_fit, heads_like
from treeopt.models.heads import MedusaHeads
from treeopt.models.logits import rank_of, rows_at_once, top_ids
from treeopt.traces import MAX_RANKS
from treeopt.verify.buffers import Buffers


class HeadsProposer:
    """Medusa heads as a drafter; with None there are no levels, and only the one-node tree is drafted.

    `drafter` is a record without an n-gram table, which maps the heads' probabilities to observed frequencies. E212
    where the heads do not fit the base, E223 where the drafter does not fit the heads.
    """

    window = 0

    def __init__(self, base: Base, heads: MedusaHeads | None, drafter: Drafter | None = None) -> None:
        self.base = base
        self.heads = None if heads is None else heads_like(base, heads)
        if drafter is not None:
            check_drafter(drafter, base, heads)
        self.depth = 0 if heads is None else heads.num_heads
        self.num_candidates = base.vocab_size if drafter is None else num_candidates(drafter, base.vocab_size)
        self.rows_at_once = rows_at_once(base.vocab_size, self.depth)
        self._drafter = drafter

    @functools.cached_property
    def by_probability(self) -> RecordProposer:
        """The same drafter for per-step trees; without a record it has as many candidates as a trace has ranks."""
        top = min(MAX_RANKS, self.base.vocab_size)
        return RecordProposer(self.base, self.heads, self._drafter or Drafter.heads_only(self.depth, top))

    def start(self, texts: TokenLists, depth: int, ends: TokenLists | None = None) -> HeadsSession:
        return HeadsSession(self, texts, depth, ends)


class HeadsSession(ProposerSession):
    """Static trees and traces of heads; a session of `by_probability` grows per-step trees."""

    name = HEAD_SOURCE

    def __init__(self, proposer: HeadsProposer, texts: TokenLists, depth: int, ends: TokenLists | None) -> None:
        self._proposer, self._depth = proposer, depth
        self._given = texts, ends
        self._checked = False
        self._growing: tuple[int, ProposerSession] | None = None  # of so many rows

    @functools.cached_property
    def _logits(self) -> Tensor:
        """float [D, B, V] of the current step."""
        heads = self._proposer.heads
        assert heads is not None, "a drafter without heads has no levels"
        check_states_fit(self._proposer.base, self._states)
        logits: Tensor = heads(self._states, self._proposer.base.lm_head, self._depth)
        return logits

    @functools.cached_property
    def _scored(self) -> ProposerSession:
        """The session with probabilities, in which the current step has begun."""
        texts, ends = self._given
        session = self._proposer.by_probability.start(texts, self._depth, ends)
        session.begin(self._roots, self._states)
        return session

    def begin(self, roots: Tensor, states: Tensor) -> None:
        self._roots, self._states = roots, states
        for cached in ("_logits", "_scored"):
            self.__dict__.pop(cached, None)

    def fill(self, roots: Tensor, states: Tensor, tree: Buffers) -> Drafts:
        if not tree.depth:
            return Drafts(roots[:, None], tree)
        self.begin(roots, states)
        if not self._checked:  # at the first step of a text: it waits for the device
            self.check_finite()
            self._checked = True
        guesses = top_ids(self._logits, tree.top_k).transpose(0, 1)  # [B, D, top_k]
        candidates = torch.cat([roots[:, None], guesses.flatten(1)], dim=1)
        return Drafts(candidates.index_select(1, tree.tree_indices), tree)

    def grow(self, roots: Tensor, states: Tensor, limits: SizeLimits) -> Drafts:
        rows = len(roots)
        if self._growing is None or self._growing[0] != rows:  # the heads read no text, so any token serves
            self._growing = rows, self._proposer.by_probability.start([[0]] * rows, self._depth)
        return self._growing[1].grow(roots, states, limits)

    def expand(self, nodes: int, depth: int) -> Expansion:
        return self._scored.expand(nodes, depth)

    def trace(self, true: Ints, *, confidence: bool = False) -> tuple[Ints, Floats]:
        """Ranks are found on the device, without sorting."""
        tokens = torch.from_numpy(np.maximum(true, 0)).to(self._logits.device)
        ranks = [rank_of(logits, tokens[:, level]) for level, logits in enumerate(self._logits[: true.shape[1]])]
        found = torch.stack(ranks, dim=1).numpy(force=True).astype(np.int64)
        ranks_in = np.where(found < self._proposer.num_candidates, found, NO_CANDIDATE)
        return ranks_in, self._scored.trace(true, confidence=True)[1] if confidence else NO_FLOATS

    def candidates(self, true: Ints, count: int) -> Ints:
        """They do not depend on the true tokens."""
        found = min(count, self._proposer.num_candidates)
        tokens = top_ids(self._logits[: true.shape[1]], found).transpose(0, 1).numpy(force=True).astype(np.int64)
        return np.pad(tokens, ((0, 0), (0, 0), (0, count - found)), constant_values=-1)

    def features(self, true: Ints) -> Features:
        return self._scored.features(true)

    def check_finite(self) -> None:
        largest = self._logits.flatten(1).amax(1)
        if not (largest < torch.inf).all():
            head = int((~(largest < torch.inf)).nonzero()[0, 0]) + 1
            what = f"head {head} on {self._proposer.base.name} gives logits that are not finite"
            raise TreeoptError(Code.NOT_FINITE, what)
