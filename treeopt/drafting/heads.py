"""The `heads` drafter: a node of rank r at level h gets the token of rank r of head h, for every parent."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from treeopt.calibration import MAX_RANKS
from treeopt.drafter import Drafter
from treeopt.drafting.interface import NO_CANDIDATE, Candidates, Drafts, Features, Ints, Nodes, ProposerSession
from treeopt.drafting.scores import Scorer, Step, num_candidates
from treeopt.errors import Code, TreeoptError
from treeopt.models.base import Base, check_heads_fit, heads_like
from treeopt.models.heads import MedusaHeads
from treeopt.models.ranks import rank_of, top_ids
from treeopt.texts.hidden_states import LOGITS_BYTES
from treeopt.verify.buffers import Buffers

_SCORED_AT_ONCE = 256  # rows whose scores are computed together, so that the arrays fit into the processor's cache


class HeadsProposer:
    """Medusa heads as a drafter.

    Args:
        base: the base model.
        heads: its draft heads; with None there are no levels, and only the one-node tree is drafted.
        drafter: a record without an n-gram table, which maps the heads' probabilities to observed frequencies; None
            does not change them.

    Raises:
        TreeoptError: E212 where the heads do not fit the base, E223 where the drafter does not fit the heads.
    """

    window = 0

    def __init__(self, base: Base, heads: MedusaHeads | None, drafter: Drafter | None = None) -> None:
        if heads is not None:
            check_heads_fit(base, heads, "given")
        if drafter is not None:
            check_drafter(drafter, base, heads)
        self.base = base
        self.heads = None if heads is None else heads_like(base, heads)
        self.depth = 0 if heads is None else heads.num_heads
        self.num_candidates = base.vocab_size if drafter is None else num_candidates(drafter, base.vocab_size)
        self.rows_at_once = rows_at_once(base, self.depth, scored=drafter is not None)
        self._drafter = drafter

    @functools.cached_property
    def scorer(self) -> Scorer:
        """Scores of candidates; without a record there are as many candidates as a trace has ranks."""
        top = min(MAX_RANKS, self.base.vocab_size)
        return Scorer(self._drafter or Drafter.heads_only(self.depth, top))

    def logits(self, states: Tensor, depth: int) -> Tensor:
        """float [depth, B, V]: the logits of the first heads at states [B, d]."""
        assert self.heads is not None, "a drafter without heads has no levels"
        logits: Tensor = self.heads(states, self.base.lm_head, depth)
        return logits

    def start(self, texts: Sequence[Sequence[int]] | Ints, depth: int) -> HeadsSession:
        return HeadsSession(self, depth)


class HeadsSession(ProposerSession):
    """Drafting by heads, which depend on the hidden states alone, so no text is stored."""

    def __init__(self, proposer: HeadsProposer, depth: int) -> None:
        self._proposer = proposer
        self._depth = depth
        self._step: Step | None = None

    def begin(self, roots: Tensor, states: Tensor) -> Nodes:
        self._logits = self._proposer.logits(states, self._depth)  # [D, B, V]
        self._step = None
        return Nodes(0, np.arange(len(roots)))

    def candidates(self, nodes: Nodes) -> Candidates:
        return self._proposer.scorer.candidates(self._scored(), nodes)

    def features(self, nodes: Nodes) -> Features:
        return self._proposer.scorer.features(self._scored(), nodes)

    def follow(self, nodes: Nodes, parents: Ints, tokens: Ints) -> Nodes:
        return Nodes(nodes.depth + 1, nodes.row.take(parents))

    def rank(self, nodes: Nodes, tokens: Ints) -> Ints:
        """As `ProposerSession.rank`, on the model's device and without sorting."""
        logits = self._logits[nodes.depth]
        if not np.array_equal(nodes.row, np.arange(len(logits))):
            logits = logits[torch.from_numpy(nodes.row).to(logits.device)]
        ranks = rank_of(logits, torch.from_numpy(tokens).to(logits.device)).numpy(force=True).astype(np.int64)
        return np.where(ranks < self._proposer.num_candidates, ranks, NO_CANDIDATE)

    def fill(self, roots: Tensor, states: Tensor, tree: Buffers) -> Drafts:
        """As `ProposerSession.fill`, without the host: rank r of head h for every node of rank r at depth h."""
        if not tree.depth:
            return Drafts(roots[:, None], tree)
        self.begin(roots, states)
        guesses = top_ids(self._logits, tree.top_k).transpose(0, 1)  # [B, D, top_k]
        candidates = torch.cat([roots[:, None], guesses.flatten(1)], dim=1)
        return Drafts(candidates.index_select(1, tree.tree_indices), tree)

    def check_finite(self, first: int) -> None:
        check_logits(self._logits, first)

    def _scored(self) -> Step:
        """The step on the host, transferred on first use."""
        if self._step is None:
            roots = np.zeros((self._logits.shape[1], 1), np.int64)
            self._step = self._proposer.scorer.begin(self._logits, roots, self._depth)
        return self._step


def rows_at_once(base: Base, num_heads: int, *, scored: bool) -> int:
    """The number of rows whose logits of all heads fit into memory; fewer where scores are computed on the host."""
    size = 4 if scored else torch.finfo(base.dtype).bits // 8
    rows = max(1, LOGITS_BYTES // (max(1, num_heads) * base.vocab_size * size))
    return min(rows, _SCORED_AT_ONCE) if scored else rows


def check_logits(logits: Tensor, first: int) -> None:
    """Raise E504 where the heads' logits of rows `first` and on are not finite; the hidden states are finite."""
    if not torch.isfinite(logits.sum(dtype=torch.float32)):
        raise TreeoptError(Code.NOT_FINITE, f"the heads' logits are not finite, in rows from {first}")


def check_drafter(drafter: Drafter, base: Base, heads: MedusaHeads | None) -> None:
    """Raise E223 unless the drafter was made for as many heads and the same vocabulary; TypeError for another type."""
    if not isinstance(drafter, Drafter):
        raise TypeError(f"drafter is treeopt.Drafter or None, not an object of type {type(drafter).__name__}")
    faults = []
    num_heads = 0 if heads is None else heads.num_heads
    if drafter.num_heads != num_heads:
        faults.append(f"it was made for {drafter.num_heads} heads, there are {num_heads}")
    table = drafter.ngram_table
    if table is not None and table.vocab_size != base.vocab_size:
        faults.append(f"its vocabulary holds {table.vocab_size} tokens, the base's {base.vocab_size}")
    if faults:
        what = f"the drafter does not fit {base.name}: {'; '.join(faults)}"
        fix = (
            f"--model {drafter.source.get('model', 'MODEL')}, for which it was learned, or treeopt learn for this model"
        )
        if not num_heads and drafter.num_heads:
            fix = "--heads HEADS, or in Python heads=treeopt.load_heads(...)"
        elif num_heads and not drafter.num_heads:
            fix = "leave the heads out: --model MODEL without --heads, or in Python heads=None"
        raise TreeoptError(Code.DRAFTER_MISMATCH, what, fix=fix)
