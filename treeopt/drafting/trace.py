"""Trace a drafter: which rank, and which place in a step's tree, it gives to the tokens that came.

Every position is a step that might begin there: the heads' logits of that state, the text so far, and level by level
the candidates after the true tokens. It is the decoder's own code that ranks them, so replay stays exact.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treeopt.calibration import MISS, NONE, Ranks, StepTraces
from treeopt.drafter import Drafter
from treeopt.drafting.expand import Expansion, expand, orders_of, tokens_by_size
from treeopt.drafting.ngram import DraftModel, Ints, Start
from treeopt.errors import Code, TreeoptError
from treeopt.models.base import Base
from treeopt.models.heads import MedusaHeads
from treeopt.policy import STEP_SIZES
from treeopt.texts.encode import Text
from treeopt.texts.hidden_states import LOGITS_BYTES, check_finite, hidden_states

_PIECE = 256  # positions worked on together: their arrays stay in the processor's cache
_PLACES = 253  # places of a step's tree that are told apart
_ENDED = -5  # in place of tokens beyond the end of a text; no token, and none of the drafter's own marks


@dataclass(frozen=True, eq=False)
class Piece:
    """Some positions of one text.

    Args:
        first: the first of them.
        start: a step at each.
        true: int64 [n, L], the tokens that came after each root; negative beyond the end.
    """

    first: int
    start: Start
    true: Ints


@torch.inference_mode()
def pieces(
    base: Base,
    heads: MedusaHeads,
    model: DraftModel,
    text: Text,
    hidden: Tensor,
    chosen: NDArray[np.bool_] | None = None,
) -> Iterator[Piece]:
    """The positions of a text's answer as steps, a few at a time.

    Args:
        base: the base model.
        heads: its heads.
        model: the drafter.
        text: prompt and answer.
        hidden: [G, d], the states that chose the answer's tokens.
        chosen: bool [G], only these positions; all where None.
    """
    depth = model.drafter.depth
    recent, true = windows(text, model.window), _true(text, depth)
    if chosen is not None:
        hidden, recent, true = hidden[torch.from_numpy(chosen).to(hidden.device)], recent[chosen], true[chosen]
    room = LOGITS_BYTES // (heads.num_heads * base.vocab_size * 4)
    size = max(1, min(_PIECE, room))
    for first in range(0, len(true), size):
        part = slice(first, first + size)
        logits = heads(hidden[part], base.lm_head)  # [H, n, V]
        check_finite(logits, first)
        yield Piece(first, model.begin(logits, recent[part], depth), true[part])


def windows(text: Text, size: int) -> Ints:
    """int64 [G, size]: the last tokens up to each token of the answer, itself included; -1 before the text."""
    tokens = np.concatenate([np.full(size, -1), text.prompt, text.answer]).astype(np.int64)
    first = len(text.prompt) + 1
    return np.lib.stride_tricks.sliding_window_view(tokens, size)[first : first + len(text.answer)]


def _true(text: Text, depth: int) -> Ints:
    """int64 [G, depth]: the tokens after each token of the answer."""
    tokens = np.concatenate([text.answer, np.full(depth, _ENDED)]).astype(np.int64)
    return np.lib.stride_tricks.sliding_window_view(tokens, depth + 1)[:, 1:]


@dataclass(frozen=True, eq=False)
class Traced:
    """uint8 [G, L] ranks of one text, and the traces of its steps' trees."""

    ranks: Ranks
    steps: StepTraces | None


def trace_drafts(
    base: Base,
    heads: MedusaHeads,
    models: Sequence[DraftModel],
    texts: Sequence[Text],
    top_k: int,
    *,
    steps: int,
) -> list[Traced]:
    """The ranks of answers' tokens among their drafters' candidates; one forward for all texts.

    Args:
        base: the base model.
        heads: its heads.
        models: the drafter of each text.
        texts: prompts and answers.
        top_k: ranks from there on, and tokens that are no candidates, are `MISS`.
        steps: how deep the trees chosen per step are that are traced too; 0 traces none.
    """
    states = hidden_states(base, texts)
    return [
        _traced(pieces(base, heads, model, text, hidden), model, top_k, steps)
        for model, text, hidden in zip(models, texts, states, strict=True)
    ]


def check_drafter(drafter: Drafter, base: Base, heads: MedusaHeads) -> None:
    """Raise E223 unless the drafter was made for as many heads and the same vocabulary."""
    faults = []
    if drafter.num_heads != heads.num_heads:
        faults.append(f"it was made for {drafter.num_heads} heads, there are {heads.num_heads}")
    table = drafter.ngram_table
    if table is not None and table.vocab_size != base.vocab_size:
        faults.append(f"its vocabulary holds {table.vocab_size} tokens, the base's {base.vocab_size}")
    if faults:
        what = f"the drafter does not fit {base.name}: {'; '.join(faults)}"
        raise TreeoptError(Code.DRAFTER_MISMATCH, what, fix="treeopt learn")


def _traced(steps_of_text: Iterator[Piece], model: DraftModel, top_k: int, steps: int) -> Traced:
    depth = model.drafter.depth
    ranks = [np.zeros((0, depth), np.uint8)]
    traced = [StepTraces(ranks[0], np.zeros((0, len(STEP_SIZES)), np.float32), np.zeros((0, depth), np.float16))]
    for piece in steps_of_text:
        own, confidence = _ranks(model, piece, top_k)
        ranks.append(own)
        if steps:
            tree = expand(model, piece.start, _PLACES + 1, min(steps, depth))
            traced.append(StepTraces(_orders(tree, piece.true), tokens_by_size(tree.log_probability), confidence))
    return Traced(np.concatenate(ranks), StepTraces.joined(traced) if steps else None)


def _ranks(model: DraftModel, piece: Piece, top_k: int) -> tuple[Ranks, NDArray[np.float16]]:
    """Ranks uint8 [n, L], and the estimated probability of rank 0, float16 [n, L]."""
    ranks = np.full(piece.true.shape, NONE, np.uint8)
    confidence = np.zeros(piece.true.shape, np.float16)
    nodes, each = piece.start.root, np.arange(len(ranks))
    for level in range(piece.true.shape[1]):
        true = piece.true[:, level]
        children = model.children(piece.start, nodes)
        hit = (children.tokens == true[:, None]) & np.isfinite(children.scores)
        rank = np.where(hit.any(1), hit.argmax(1), MISS)
        ranks[:, level] = np.where(true < 0, NONE, np.where(rank < top_k, rank, MISS))
        confidence[:, level] = np.exp(model.log_probability(level, children.scores)[:, 0])
        nodes = model.follow(piece.start, nodes, each, np.maximum(true, 0))
    return ranks, confidence


def _orders(tree: Expansion, true: Ints) -> Ranks:
    """uint8 [n, L]: places of the true paths."""
    orders = orders_of(tree, true)
    held = min(_PLACES, tree.tokens.shape[1])  # a number beyond the tree's own nodes is that of no node
    return np.where(true < 0, NONE, np.where(orders <= held, orders, MISS)).astype(np.uint8)
