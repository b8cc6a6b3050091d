"""Traces: the rank of each token of finished texts among a drafter's candidates, and its index in per-step trees.

Every position is a row of one step: its hidden state, the text before it, and level by level the candidates after the
true tokens. The candidates come from the same code as in decoding, so replay is exact.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treeopt.calibration import MISS, NONE, Ranks, StepTraces
from treeopt.drafting.expand import expected_tokens, node_ranks
from treeopt.drafting.interface import Ints, Proposer, ProposerSession
from treeopt.models.base import Base
from treeopt.texts.encode import Text
from treeopt.texts.hidden_states import hidden_states

_PLACES = 253  # indices in a per-step tree that are stored; larger ones are misses
_ENDED = -5  # beyond the end of a text; differs from every token and from the padding of drafters


@dataclass(frozen=True, eq=False)
class Traced:
    """uint8 [G, L] ranks of one text, and the traces of its per-step trees; None where they were not traced."""

    ranks: Ranks
    steps: StepTraces | None


@dataclass(frozen=True, eq=False)
class Positions:
    """Positions of texts as the rows of one step.

    Args:
        session: of the drafter, after `begin`.
        true: int64 [n, L], the tokens after each root; negative past the end of the text.
    """

    session: ProposerSession
    true: Ints


@torch.inference_mode()
def trace_texts(
    base: Base, proposers: Sequence[Proposer], texts: Sequence[Text], top_k: int, *, step_depth: int = 0
) -> list[Traced]:
    """Ranks of the tokens of answers among the candidates of a drafter; one forward for all texts.

    Row i of a text is the step in which token g[i] of its answer is the root. Column h-1 is the rank of g[i+h] at level
    h: `MISS` where it is `top_k` or more or the token is not a candidate, `NONE` past the end of the text.

    Args:
        base: the base model.
        proposers: the drafter of each text.
        texts: prompts and answers.
        top_k: ranks that are stored.
        step_depth: depth of the traced per-step trees; 0 traces none.

    Raises:
        TreeoptError: E504 where states or scores are not finite.
    """
    states = hidden_states(base, texts)
    traced: list[Traced] = []
    while len(traced) < len(texts):
        first = len(traced)
        run = slice(first, _end_of_run(proposers, first))
        found = [
            _trace(positions, top_k, step_depth)
            for positions in positions_of(proposers[first], texts[run], states[run])
        ]
        ends = np.cumsum([len(text.answer) for text in texts[run]])[:-1]
        ranks = np.split(np.concatenate([one.ranks for one in found]), ends)
        steps = [one.steps for one in found if one.steps is not None]
        whole = StepTraces.joined(steps) if steps else None
        rows = itertools.starmap(slice, itertools.pairwise([0, *ends.tolist(), None]))
        traced += [Traced(ranks_of, whole and whole.rows(part)) for ranks_of, part in zip(ranks, rows, strict=True)]
    return traced


def _end_of_run(proposers: Sequence[Proposer], first: int) -> int:
    """The end of the texts from `first` on that have the same drafter, which are traced together."""
    end = first + 1
    while end < len(proposers) and proposers[end] is proposers[first]:
        end += 1
    return end


@torch.inference_mode()
def positions_of(
    proposer: Proposer, texts: Sequence[Text], states: Sequence[Tensor], chosen: NDArray[np.bool_] | None = None
) -> Iterator[Positions]:
    """The positions of the texts' answers as steps, a few at a time.

    Args:
        proposer: the drafter.
        texts: prompts and answers.
        states: for each text [G, d], the hidden states that the answer's tokens were predicted from; those of the
            chosen positions.
        chosen: bool [sum of G], the positions; None for all.
    """
    true = np.concatenate([_true(text, proposer.depth) for text in texts])
    ends = np.concatenate([len(text.prompt) + 1 + np.arange(len(text.answer)) for text in texts])
    of_text = np.repeat(np.arange(len(texts)), [len(text.answer) for text in texts])
    if chosen is not None:
        true, ends, of_text = true[chosen], ends[chosen], of_text[chosen]
    hidden = torch.cat(list(states))
    for first in range(0, len(true), proposer.rows_at_once):
        part = slice(first, first + proposer.rows_at_once)
        numbers, starts = np.unique(of_text[part], return_index=True)
        tokens = [[*texts[number].prompt, *texts[number].answer] for number in numbers]
        rows = [one.tolist() for one in np.split(ends[part], starts[1:])]
        session = proposer.start(tokens, proposer.depth, rows)
        roots = [text[end - 1] for text, ends_of in zip(tokens, rows, strict=True) for end in ends_of]
        session.begin(torch.tensor(roots, device=hidden.device), hidden[part])
        session.check_finite(first)
        yield Positions(session, true[part])


def _true(text: Text, depth: int) -> Ints:
    """int64 [G, depth]: the tokens after each token of the answer."""
    tokens = np.concatenate([text.answer, np.full(depth, _ENDED)]).astype(np.int64)
    return np.lib.stride_tricks.sliding_window_view(tokens, depth + 1)[:, 1:]


def _trace(positions: Positions, top_k: int, step_depth: int) -> Traced:
    true = positions.true
    rank, confidence = positions.session.trace(true, confidence=bool(step_depth))
    ranks = np.where(true < 0, NONE, np.where(rank < top_k, rank, MISS)).astype(np.uint8)
    if not step_depth:
        return Traced(ranks, None)
    return Traced(ranks, _trace_steps(positions, np.exp(confidence).astype(np.float16), step_depth))


def _trace_steps(positions: Positions, confidence: NDArray[np.float16], depth: int) -> StepTraces:
    """The per-step trees of the same positions, `depth` levels deep."""
    true = positions.true
    tree = positions.session.expand(_PLACES + 1, min(depth, true.shape[1]))
    held = min(_PLACES, tree.tokens.shape[1])  # larger indices are not in the tree
    places = node_ranks(tree, true)
    found = np.where(true < 0, NONE, np.where(places <= held, places, MISS)).astype(np.uint8)
    return StepTraces(found, expected_tokens(tree.log_probability), confidence)
