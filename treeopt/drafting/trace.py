"""Traces: the rank of each token of finished texts among a drafter's candidates, and its index in per-step trees.

Every position is a row of one step: its hidden state, the text before it, and level by level the candidates after the
true tokens. The candidates come from the same code as in decoding, so replay is exact.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treeopt.defaults import STEP_SIZES
from treeopt.drafting.interface import Expansion, Floats, Ints, Proposer, ProposerSession, reads_of
from treeopt.models.base import Base
from treeopt.models.logits import rows_at_once
from treeopt.texts.answers import answer_logits, hidden_states, text_states
from treeopt.texts.encode import Text
from treeopt.traces import MISS, NONE, TARGET_RANKS, Ranks, StepTraces, TargetTraces
from treeopt.verify.probe import verifies_paths

BASE = "base"  # the source of the root of every step, which is the base model's own token
_PLACES = 253  # indices in a per-step tree that are stored; larger ones are misses
_ENDED = -5  # beyond the end of a text; differs from every token and from the padding of drafters
Arrays = Mapping[str, NDArray[Any]]
_STEPS = tuple(field.name for field in dataclasses.fields(StepTraces))


@dataclass(frozen=True)
class Target:
    """The distribution that texts are sampled from: the softmax of the scores float32 [n, V] of logits [n, V]."""

    scores: Callable[[Tensor], Tensor]  # such as `treeopt.decode.rules.Sample.scores`
    count: int = TARGET_RANKS  # R, candidates of each level whose probability is traced

    @classmethod
    def at_temperature(cls, temperature: float, vocab_size: int) -> Target:
        """The whole distribution at a temperature above 0."""
        return cls(lambda logits: logits.float() / temperature, min(TARGET_RANKS, vocab_size))


@dataclass(frozen=True, eq=False)
class TextTraces:
    """The traces of one text of G tokens."""

    ranks: Ranks  # [G, L]
    steps: StepTraces | None = None  # of its per-step trees, where they were traced
    target: TargetTraces | None = None  # the target's probabilities of the candidates, where there is a target

    @classmethod
    def of(cls, arrays: Arrays) -> TextTraces:
        """The traces in arrays by the names of their fields."""
        found = {name: arrays[name] for name in _STEPS if name in arrays}
        steps = StepTraces(**found) if found else None
        target = TargetTraces(arrays["probability"], arrays.get("places")) if "probability" in arrays else None
        return cls(arrays["ranks"], steps, target)

    def arrays(self) -> dict[str, NDArray[Any]]:
        """The arrays that `of` reads."""
        found = {"ranks": self.ranks}
        for part in (self.steps, self.target):
            found |= {name: array for name, array in vars(part).items() if array is not None} if part else {}
        return found


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
    h: `MISS` where it is `top_k` or more or the token is not a candidate, `NONE` past the end of the text. Texts in a
    row with the same proposer are traced together, per-step trees to a depth of `step_depth`; by path tokens too where
    the base verifies paths. E504 where states or scores are not finite.
    """
    states = states_for(base, reads_of(proposers[0]) if proposers else (), texts)
    traced: list[TextTraces] = []
    count = 0 if target is None else target.count
    path_tokens = step_depth > 0 and verifies_paths(base)
    for _, group in itertools.groupby(range(len(texts)), key=lambda i: id(proposers[i])):
        numbers = list(group)
        run = slice(numbers[0], numbers[-1] + 1)
        found = [
            _trace(session, true, top_k, step_depth, count, path_tokens)
            for session, true in positions_of(proposers[run.start], texts[run], states[run])
        ]
        whole = {name: np.concatenate([part[name] for part in found]) for name in found[0]}
        ends = np.cumsum([len(text.answer) for text in texts[run]]).tolist()
        for text, first, end in zip(texts[run], [0, *ends], ends, strict=False):
            arrays = {name: array[first:end] for name, array in whole.items()}
            if target is not None:
                logits = answer_logits(base, text)
                probability = _probabilities(logits, torch.from_numpy(arrays["candidates"]).to(logits.device), target)
                arrays["probability"] = probability.numpy(force=True)
            traced.append(TextTraces.of(arrays))
    return traced


def states_for(base: Base, reads: tuple[int, ...], texts: Sequence[Text]) -> list[Tensor]:
    """The states for `positions_of` by one forward: of the answers, [G, d] each, that their tokens were predicted from;
    where a drafter `reads` others, these of whole texts, [T, d].
    """
    return text_states(base.reading(reads), texts) if reads else hidden_states(base, texts)


def states_at(states: Tensor, reads: tuple[int, ...], chosen: NDArray[np.bool_]) -> Tensor:
    """Those of one text for some positions of its answer, bool [G]; whole texts stay whole."""
    return states if reads else states[torch.from_numpy(chosen).to(states.device)]


@torch.inference_mode()
def positions_of(
    proposer: Proposer, texts: Sequence[Text], states: Sequence[Tensor], chosen: NDArray[np.bool_] | None = None
) -> Iterator[tuple[ProposerSession, Ints]]:
    """The positions of the texts' answers as rows of begun sessions, a few at a time, with the true tokens [n, L].

    `states` of each text are those of `states_for`, at the positions of its answer that are `chosen` (bool [sum of G];
    None for all).
    """
    whole = states if reads_of(proposer) else []
    if whole:
        pairs = zip(whole, texts, strict=True)
        states = [one[len(text.prompt) - 1 :][: len(text.answer)] for one, text in pairs]
        states = states if chosen is None else [states_at(torch.cat(states), (), chosen)]
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
        if whole:
            session.read([whole[number] for number in numbers])
        roots = [text[end - 1] for text, ends_of in zip(tokens, rows, strict=True) for end in ends_of]
        session.begin(torch.tensor(roots, device=hidden.device), hidden[part])
        session.check_finite()
        yield session, true[part]


def _true(text: Text, depth: int) -> Ints:
    """int64 [G, depth]: the tokens after each token of the answer; negative past its end."""
    tokens = np.concatenate([text.answer, np.full(depth, _ENDED)]).astype(np.int64)
    return np.lib.stride_tricks.sliding_window_view(tokens, depth + 1)[:, 1:]


def _trace(session: ProposerSession, true: Ints, top_k: int, step_depth: int, count: int, path_tokens: bool) -> Arrays:
    """The arrays of traces of these positions by name, with `count` candidates of each level."""
    rank, confidence = session.trace(true, confidence=bool(step_depth))
    found: dict[str, NDArray[Any]] = {
        "ranks": np.where(true < 0, NONE, np.where(rank < top_k, rank, MISS)).astype(np.uint8)
    }
    if count:
        found["candidates"] = session.candidates(true, count)
    if step_depth:
        tree = session.expand(_PLACES + 1, min(step_depth, true.shape[1]))
        nodes = node_ranks(tree, true)
        found["node_rank"] = np.where(true < 0, NONE, _stored(nodes, tree)).astype(np.uint8)
        found["expected_tokens"] = expected_tokens(tree.log_probability)
        found["confidence"] = np.exp(confidence).astype(np.float16)
        if path_tokens:
            # Imported here as it imports numba, which takes half a second.
            from treeopt.drafting.kernel.paths import accepted_paths, path_trees

            trees = path_trees(tree, np.array(STEP_SIZES), min(step_depth, true.shape[1]))
            found["path_accepted"], found["path_expected"] = accepted_paths(trees, nodes), trees.expected
        if count:
            found["places"] = _stored(child_ranks(tree, nodes, count), tree).astype(np.uint8)
    return found


def _stored(nodes: Ints, tree: Expansion) -> Ints:
    """Indices of nodes in a per-step tree as they are stored; those that are not in the tree are misses."""
    return np.where(nodes <= min(_PLACES, tree.tokens.shape[1]), nodes, MISS)


def _probabilities(logits: Tensor, candidates: Tensor, target: Target) -> Tensor:
    """The target's probability of each candidate at its position: float16 [G, L, R], 0 past the end of the text.

    `logits` [G, V] are of the answer, `candidates` int64 [G, L, R] those that may follow answer token i + h - 1.
    """
    found = candidates.new_zeros(candidates.shape, dtype=torch.float32)
    first, levels = 0, candidates.shape[1]
    for part in torch.split(logits, rows_at_once(logits.shape[-1])):  # a few positions at a time
        probability = target.scores(part).log_softmax(-1).exp()
        end = first + len(part)
        for level in range(1, levels + 1):
            begin = max(first, level)  # the candidates of the first `level` positions would begin before the answer
            if begin < end:
                tokens = candidates[begin - level : end - level, level - 1]
                known = probability[begin - first :].gather(1, tokens.clamp(min=0))
                found[begin - level : end - level, level - 1] = torch.where(tokens < 0, 0, known)
        first = end
    return found.to(torch.float16)


def node_ranks(expansion: Expansion, true: Ints) -> Ints:
    """int64 [B, D]: the index of each prefix of the true tokens [B, D] among the n nodes of its row's tree, from 1.

    n + 1 where it is not in the tree; negative tokens are beyond the end of the text.
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
    """int64 [B, D, R]: as `node_ranks` (of true tokens: `nodes`), of the best R candidates of each level after them.

    The children of a node are its best candidates, in their order.
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


@torch.inference_mode()
def draft_sources(
    base: Base, proposer: Proposer, prompt: Sequence[int], steps: Sequence[Sequence[int]]
) -> list[list[Mapping[str, int]]]:
    """For each step, and each of its tokens after the root, the sources that had the token, with its rank there.

    By a teacher-forced pass over the finished text. Empty where no source has the token, which only rounding can cause.
    docs/pictures.md lists the sources.
    """
    answer = [token for step in steps for token in step]
    if not proposer.depth or len(answer) == len(steps):
        return [[] for _ in steps]
    text = Text("0:00000000", list(prompt), answer)
    chosen = np.zeros(len(answer), np.bool_)
    chosen[np.cumsum([0, *(len(step) for step in steps[:-1])])] = True
    reads = reads_of(proposer)
    [states] = states_for(base, reads, [text])
    parts = positions_of(proposer, [text], [states_at(states, reads, chosen)], chosen)
    found = [row for session, true in parts for row in session.sources(true)]
    return [list(row[: len(step) - 1]) for row, step in zip(found, steps, strict=True)]
