"""Traces: the rank of each token of finished texts among a drafter's candidates, and its index in per-step trees.

Every position is a row of one step: its hidden state, the text before it, and level by level the candidates after the
true tokens. The candidates come from the same code as in decoding, so replay is exact.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treeopt.calibration import MISS, NONE, Ranks, StepTraces, TargetTraces
from treeopt.drafting.interface import Expansion, Floats, Ints, Proposer, ProposerSession
from treeopt.models.base import Base
from treeopt.models.logits import rows_at_once
from treeopt.policy import STEP_SIZES
from treeopt.texts.encode import Text
from treeopt.texts.hidden_states import answer_logits, hidden_states
from treeopt.traces import TARGET_RANKS, joined

_PLACES = 253  # indices in a per-step tree that are stored; larger ones are misses
_ENDED = -5  # beyond the end of a text; differs from every token and from the padding of drafters


@dataclass(frozen=True)
class Target:
    """The distribution that texts are sampled from.

    Args:
        scores: the model's logits [n, V] as float32 [n, V] whose softmax is the distribution, such as
            `treeopt.decode.rules.Sample.scores`.
        count: R, candidates of each level whose probability is traced.
    """

    scores: Callable[[Tensor], Tensor]
    count: int = TARGET_RANKS

    @classmethod
    def at_temperature(cls, temperature: float, vocab_size: int) -> Target:
        """The whole distribution at a temperature above 0."""
        return cls(lambda logits: logits.float() / temperature, min(TARGET_RANKS, vocab_size))


@dataclass(frozen=True, eq=False)
class TextTraces:
    """The traces of one text of G tokens.

    Args:
        ranks: uint8 [G, L].
        steps: traces of its per-step trees; None where they were not traced.
        target: the target's probabilities of the candidates; None without a target.
    """

    ranks: Ranks
    steps: StepTraces | None = None
    target: TargetTraces | None = None


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
    base: Base,
    proposers: Sequence[Proposer],
    texts: Sequence[Text],
    top_k: int,
    *,
    step_depth: int = 0,
    target: Target | None = None,
) -> list[TextTraces]:
    """Ranks of the tokens of answers among the candidates of a drafter; one forward for all texts.

    Row i of a text is the step in which token g[i] of its answer is the root. Column h-1 is the rank of g[i+h] at level
    h: `MISS` where it is `top_k` or more or the token is not a candidate, `NONE` past the end of the text.

    Args:
        base: the base model.
        proposers: the drafter of each text.
        texts: prompts and answers.
        top_k: ranks that are stored.
        step_depth: depth of the traced per-step trees; 0 traces none.
        target: whose probabilities of the candidates are traced; None traces none.

    Raises:
        TreeoptError: E504 where states or scores are not finite.
    """
    states = hidden_states(base, texts)
    traced: list[TextTraces] = []
    while len(traced) < len(texts):
        first = len(traced)
        run = slice(first, _end_of_run(proposers, first))
        count = 0 if target is None else target.count
        found = [
            _trace(positions, top_k, step_depth, count)
            for positions in positions_of(proposers[first], texts[run], states[run])
        ]
        ends = np.cumsum([len(text.answer) for text in texts[run]])[:-1]
        whole = _PositionTraces.joined(found)
        parts = itertools.starmap(slice, itertools.pairwise([0, *ends.tolist(), None]))
        traced += [
            _finished(base, text, whole.rows(part), target) for text, part in zip(texts[run], parts, strict=True)
        ]
    return traced


@dataclass(frozen=True, eq=False)
class _PositionTraces:
    """Traces of some positions.

    Args:
        ranks: uint8 [n, L].
        steps: traces of per-step trees; None where they were not traced.
        candidates: int64 [n, L, R], the best candidates of each level; R is 0 without a target.
        places: uint8 [n, L, R], as `TargetTraces.places`; None where `steps` is.
    """

    ranks: Ranks
    steps: StepTraces | None
    candidates: Ints
    places: Ranks | None

    def rows(self, part: slice) -> _PositionTraces:
        steps, places = self.steps, self.places
        return _PositionTraces(
            self.ranks[part],
            None if steps is None else steps.rows(part),
            self.candidates[part],
            None if places is None else places[part],
        )

    @classmethod
    def joined(cls, parts: Sequence[_PositionTraces]) -> _PositionTraces:
        places = [part.places for part in parts if part.places is not None]
        return cls(
            np.concatenate([part.ranks for part in parts]),
            joined([part.steps for part in parts]),
            np.concatenate([part.candidates for part in parts]),
            np.concatenate(places) if places else None,
        )


def _finished(base: Base, text: Text, part: _PositionTraces, target: Target | None) -> TextTraces:
    """The traces of one text."""
    if target is None:
        return TextTraces(part.ranks, part.steps)
    logits = answer_logits(base, text)
    probability = _probabilities(logits, torch.from_numpy(part.candidates).to(logits.device), target)
    traces = TargetTraces(probability.to(torch.float16).numpy(force=True), part.places)
    return TextTraces(part.ranks, part.steps, traces)


def _probabilities(logits: Tensor, candidates: Tensor, target: Target) -> Tensor:
    """The target's probability of each candidate at its position, by a few positions.

    Args:
        logits: float [G, V], of the model at the positions of the answer.
        candidates: int64 [G, L, R]; those of level h in row i may follow answer token i + h - 1; -1 is none.
        target: the target.

    Returns:
        float32 [G, L, R], 0 past the end of the text.
    """
    found = candidates.new_zeros(candidates.shape, dtype=torch.float32)
    first, levels = 0, candidates.shape[1]
    for part in torch.split(logits, rows_at_once(logits.shape[-1])):
        probability = target.scores(part).log_softmax(-1).exp()
        end = first + len(part)
        for level in range(1, levels + 1):
            begin = max(first, level)  # the candidates of the first `level` positions would begin before the answer
            if begin < end:
                tokens = candidates[begin - level : end - level, level - 1]
                known = probability[begin - first :].gather(1, tokens.clamp(min=0))
                found[begin - level : end - level, level - 1] = torch.where(tokens < 0, 0, known)
        first = end
    return found


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
        session.check_finite()
        yield Positions(session, true[part])


def _true(text: Text, depth: int) -> Ints:
    """int64 [G, depth]: the tokens after each token of the answer."""
    tokens = np.concatenate([text.answer, np.full(depth, _ENDED)]).astype(np.int64)
    return np.lib.stride_tricks.sliding_window_view(tokens, depth + 1)[:, 1:]


def _trace(positions: Positions, top_k: int, step_depth: int, count: int) -> _PositionTraces:
    """Traces of these positions, with so many candidates of each level."""
    true = positions.true
    rank, confidence = positions.session.trace(true, confidence=bool(step_depth))
    ranks = np.where(true < 0, NONE, np.where(rank < top_k, rank, MISS)).astype(np.uint8)
    candidates = positions.session.candidates(true, count) if count else np.zeros((*true.shape, 0), np.int64)
    if not step_depth:
        return _PositionTraces(ranks, None, candidates, None)
    tree = positions.session.expand(_PLACES + 1, min(step_depth, true.shape[1]))
    nodes = node_ranks(tree, true)
    steps = StepTraces(
        np.where(true < 0, NONE, _stored(nodes, tree)).astype(np.uint8),
        expected_tokens(tree.log_probability),
        np.exp(confidence).astype(np.float16),
    )
    places = _stored(child_ranks(tree, nodes, count), tree).astype(np.uint8) if count else None
    return _PositionTraces(ranks, steps, candidates, places)


def _stored(nodes: Ints, tree: Expansion) -> Ints:
    """Indices of nodes in a per-step tree as they are stored; those that are not in the tree are misses."""
    return np.where(nodes <= min(_PLACES, tree.tokens.shape[1]), nodes, MISS)


def node_ranks(expansion: Expansion, true: Ints) -> Ints:
    """The index of each prefix of a true continuation among the nodes of its row's tree, the likeliest first.

    Args:
        expansion: n nodes for each row.
        true: int64 [B, D], the tokens that followed the root; negative beyond the end of the text.

    Returns:
        int64 [B, D]: 1 .. n; n + 1 where it is not in the tree.
    """
    missing = expansion.tokens.shape[1] + 1
    numbers = np.arange(1, missing)
    places = np.full(true.shape, missing)
    node = np.zeros(len(true), np.int64)
    for level in range(true.shape[1]):
        here = (expansion.parents == node[:, None]) & (expansion.tokens == true[:, level, None])
        node = np.where(here, numbers, missing).min(1, initial=missing)  # no node's parent is the missing one
        places[:, level] = node
    return places


def child_ranks(expansion: Expansion, nodes: Ints, count: int) -> Ints:
    """The index of the candidates of each level after the true tokens among the nodes of their row's tree.

    The children of a node are its best candidates, in their order.

    Args:
        expansion: n nodes for each row.
        nodes: int64 [B, D], `node_ranks` of the true tokens.
        count: R, candidates of each level.

    Returns:
        int64 [B, D, R]: 1 .. n; n + 1 where the candidate is not in the tree.
    """
    missing = expansion.tokens.shape[1] + 1
    found = np.full((*nodes.shape, count), missing)
    parent = np.zeros(len(nodes), np.int64)
    for level in range(nodes.shape[1]):
        row, at = np.nonzero(expansion.parents == parent[:, None])
        rank = np.arange(len(row)) - np.searchsorted(row, row)
        inside = rank < count
        found[row[inside], level, rank[inside]] = at[inside] + 1
        parent = nodes[:, level]
    return found


def expected_tokens(log_probability: Floats) -> Floats:
    """Estimated tokens of a step by the size of its tree: descending [B, n] -> float32 [B, len(STEP_SIZES)]."""
    total = np.cumsum(np.exp(log_probability.astype(np.float64)), axis=1)
    total = np.concatenate([np.zeros((len(total), 1)), total], axis=1)
    return (1 + total[:, [min(size, total.shape[1]) - 1 for size in STEP_SIZES]]).astype(np.float32)


BASE = "base"  # of the root of every step, which is the base model's own token


@torch.inference_mode()
def draft_sources(
    base: Base, proposer: Proposer, prompt: Sequence[int], steps: Sequence[Sequence[int]]
) -> list[list[Mapping[str, int]]]:
    """The sources of the accepted drafts of each step, by a teacher-forced pass over the finished text.

    The decoder is not slowed by it. In float32 the pass gives the logits of decoding up to rounding, as tracing does.

    Args:
        base: the base model.
        proposer: the drafter of the text.
        prompt: token ids.
        steps: the tokens of each step, its root first.

    Returns:
        For each step and each of its tokens after the root, the rank of the token in the list of every source that has
        it. Empty where no source has it, which only rounding can cause.

    Raises:
        TreeoptError: E504 where states or scores are not finite.
    """
    answer = [token for step in steps for token in step]
    if not proposer.depth or len(answer) == len(steps):
        return [[] for _ in steps]
    text = Text("0:00000000", list(prompt), answer)
    chosen = np.zeros(len(answer), np.bool_)
    chosen[np.cumsum([0, *(len(step) for step in steps[:-1])])] = True
    [states] = hidden_states(base, [text])
    roots = states[torch.from_numpy(chosen).to(states.device)]
    found = [
        row
        for positions in positions_of(proposer, [text], [roots], chosen)
        for row in positions.session.sources(positions.true)
    ]
    return [list(row[: len(step) - 1]) for row, step in zip(found, steps, strict=True)]
