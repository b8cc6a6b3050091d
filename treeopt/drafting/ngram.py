"""Drafters from a record: candidates of heads, n-gram table and text so far, scored given the tokens before them.

Without heads (H = 0 in the record) the candidates are those of the n-gram table, the text so far and the LM head.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from treeopt.drafter import Drafter
from treeopt.drafting.interface import ProposerSession
from treeopt.drafting.kernel.data import Record, Shape, num_candidates, record_arrays
from treeopt.errors import Code, TreeoptError
from treeopt.models.base import Base
from treeopt.models.compatibility import check_states_fit, heads_like
from treeopt.models.heads import MedusaHeads
from treeopt.models.logits import rows_at_once, top_ids
from treeopt.ngram_table import CONTEXT
from treeopt.verify.buffers import Buffers

HEAD_SOURCE, LM_HEAD_SOURCE = "head", "LM head"  # names of logits, for `ProposerSession.sources`


class RecordProposer:
    """A drafter record, and the model that it drafts for.

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
        self.base, self.drafter = base, drafter
        self.heads = None if heads is None else heads_like(base, heads)
        check_drafter(drafter, base, heads)
        self.depth = drafter.depth
        self.window = 0 if drafter.ngram_table is None else max(drafter.window, CONTEXT)
        self.vocab_size = base.vocab_size
        self.num_candidates = num_candidates(drafter, base.vocab_size)
        self.known = min(base.vocab_size, max(drafter.top, drafter.top_logprobs or base.vocab_size))
        if drafter.ngram_table is None:
            self.known = self.num_candidates
        self.logits_name = HEAD_SOURCE if drafter.num_heads else LM_HEAD_SOURCE
        self.logits_of = f"a head on {base.name}" if drafter.num_heads else f"the LM head of {base.name}"
        self.rows_at_once = rows_at_once(base.vocab_size, drafter.num_heads or min(1, drafter.lm_head_levels))
        self._shape: tuple[Buffers, Shape] | None = None

    @functools.cached_property
    def record(self) -> Record:
        """The arrays of the record."""
        return record_arrays(self.drafter)

    def start(
        self, texts: Sequence[Sequence[int]], depth: int, ends: Sequence[Sequence[int]] | None = None
    ) -> ProposerSession:
        # Imported here as it imports numba, which takes half a second.
        from treeopt.drafting.kernel.compiled import note_compilation
        from treeopt.drafting.kernel.session import KernelSession

        note_compilation()
        return KernelSession(self, texts, depth, ends)

    def logits(self, states: Tensor, depth: int, known: Tensor | None = None) -> Tensor:
        """Logits at states [B, d]: float [min(depth, H), B, V] of the heads, or [0 or 1, B, V] of the LM head.

        `known` are the base's logits [B, V] there. Where they are the LM head's outputs, it is not run again: with one
        text that would take as long as for all nodes of a step, whose time is that of reading its weights.
        """
        if self.heads is not None or self.drafter.lm_head_levels:
            check_states_fit(self.base, states)
        if self.heads is not None:
            logits: Tensor = self.heads(states, self.base.lm_head, min(depth, self.heads.num_heads))
            return logits
        if not min(depth, self.drafter.lm_head_levels):
            return states.new_zeros(0, len(states), self.vocab_size)
        if known is not None and self.base.logits_of_lm_head:
            return known[None]
        return self.base.lm_logits(states)[None]

    def observe(self, states: Tensor, depth: int, logits: Tensor | None = None) -> Tensor:
        """`top_logprobs` of each level's logits at states [B, d]: int32 [B, H', 2 K + 1]; `logits` as `known` above."""
        return top_logprobs(self.logits(states, depth, logits), self.known).transpose(0, 1)

    def shape(self, tree: Buffers) -> Shape:
        """The kernel's arrays of a tree; those of the last tree are stored."""
        known = self._shape
        if known is None or known[0] is not tree:
            self._shape = known = tree, _shape_of(tree)
        return known[1]


def _shape_of(tree: Buffers) -> Shape:
    parents = tree.parents.numpy(force=True).astype(np.int64)
    nodes = np.arange(len(parents))
    children = parents.copy()
    children[0] = -1  # the root is no child
    return Shape(
        parents=parents,
        ranks=((tree.tree_indices.numpy(force=True) - 1) % max(tree.top_k, 1)).astype(np.int64),
        depths=tree.position_ids.numpy(force=True).astype(np.int64),
        first=np.searchsorted(children, nodes),
        last=np.searchsorted(children, nodes, side="right"),
    )


def check_drafter(drafter: Drafter, base: Base, heads: MedusaHeads | None, draft: Base | None = None) -> None:
    """Raise E223 unless a drafter fits its models; TypeError for another type.

    It fits where it was made for as many heads, for a draft model if one is given, and for the same vocabulary.
    """
    if not isinstance(drafter, Drafter):
        raise TypeError(f"drafter is treeopt.Drafter or None, not an object of type {type(drafter).__name__}")
    faults = []
    num_heads = 0 if heads is None else heads.num_heads
    if drafter.num_heads != num_heads:
        faults.append(f"it was made for {drafter.num_heads} heads, there are {num_heads}")
    if bool(drafter.draft) != (draft is not None):
        faults.append(f"it was made {_with(drafter.draft)}, and there is {'no' if draft is None else 'a'} draft model")
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
        elif drafter.draft and draft is None:
            fix = f"--draft {drafter.source.get('draft') or 'DRAFT'}, or in Python draft=..."
        elif draft is not None and not drafter.draft:
            fix = "leave out --draft, or in Python draft=None"
        elif num_heads and not drafter.num_heads:
            fix = "leave the heads out: --model MODEL without --heads, or in Python heads=None"
        raise TreeoptError(Code.DRAFTER_MISMATCH, what, fix=fix)


def _with(draft: str) -> str:
    return "with a draft model" if draft else "without one"


def top_logprobs(logits: Tensor, count: int, *, others: bool = True) -> Tensor:
    """The `count` likeliest tokens of each row; all other tokens share the rest of the probability equally.

    Args:
        logits: float [..., V].
        count: K, at most V.
        others: whether the log-probability of the other tokens is needed; else it is 0, or NaN where a logit is.

    Returns:
        int32 [..., 2 K + 1], one tensor for one transfer: the tokens, the likeliest first; the bits of their
        log-probabilities in float32; the bits of the log-probability of each other token.
    """
    tokens = top_ids(logits, count)
    scores = logits.float()
    top = scores.gather(-1, tokens)
    if not others:
        norm = scores.logsumexp(-1, keepdim=True)
        return torch.cat([tokens.int(), (top - norm).view(torch.int32), (norm - norm).view(torch.int32)], dim=-1)
    # The rest is summed by itself: 1 - the sum of the largest would be mostly rounding.
    rest = scores.scatter(-1, tokens, -torch.inf).logsumexp(-1, keepdim=True)
    norm = torch.logaddexp(top.logsumexp(-1, keepdim=True), rest)
    each_other = rest - norm - math.log(max(1, logits.shape[-1] - count))
    return torch.cat([tokens.int(), (top - norm).view(torch.int32), each_other.view(torch.int32)], dim=-1)
