"""The cache of the text so far by hand: which places vote, what votes are worth, and what an empty table gives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from kernel_scorer import Candidates, Nodes, Scorer, Step
from looped import looped
from naive_draft import Table, empty_table, naive_cache, naive_votes

from treeopt.drafter import CACHE_LENGTHS, Drafter, Level
from treeopt.drafting.interface import Features
from treeopt.drafting.kernel.data import CACHE, HEAD, NGRAM, PRIOR, num_candidates
from treeopt.ngram_table import CONTEXT, NgramTable

VOCAB = 20
UNIFORM = Table({(): {0: 0.0}}, {(): 0.0}, (-3.0,) * VOCAB)  # P_0 of every token is exp(-3)
FIRST = math.exp(-3.0)
FOREIGN = 15  # a token of no text


def drafter_of(
    levels: Sequence[Level] = (Level(),) * 4,
    *,
    window: int = 32,
    table: NgramTable | None = None,
    prior: float = 1.0,
    voted: int = 0,
) -> Drafter:
    """A drafter without heads."""
    return Drafter(tuple(levels), 0, 0, window, table or UNIFORM.record(), cache_prior=prior, voted=voted)


def started(drafter: Drafter, rows: Sequence[Sequence[int]], path: Sequence[int]) -> tuple[Scorer, Step, Nodes]:
    """The nodes at the end of one path below the roots of all rows."""
    scorer = Scorer(drafter)
    recent = np.full((len(rows), scorer.window), -1)
    for row, text in zip(recent, rows, strict=True):
        row[len(row) - len(text) :] = text
    step = scorer.begin(torch.zeros(0, len(rows), VOCAB), recent, drafter.depth)
    nodes, each = step.root, np.arange(len(rows))
    for token in path:
        nodes = scorer.follow(step, nodes, each, np.full(len(rows), token))
    return scorer, step, nodes


def features_of(drafter: Drafter, rows: Sequence[Sequence[int]], path: Sequence[int] = ()) -> Features:
    """Features at the end of one path."""
    scorer, step, nodes = started(drafter, rows, path)
    return scorer.features(step, nodes)


def candidates_of(drafter: Drafter, rows: Sequence[Sequence[int]], path: Sequence[int] = ()) -> Candidates:
    """Candidates at the end of one path."""
    scorer, step, nodes = started(drafter, rows, path)
    return scorer.candidates(step, nodes)


def by_token(found: Features, values: np.ndarray, row: int = 0) -> dict[int, float]:
    """The value of each candidate of one row, once."""
    width = found.width[row]
    return dict(zip(found.tokens[row, :width].tolist(), values[row, :width].tolist(), strict=True))


# Text with the root, path, lengths found, the token of prompt lookup, and P_last of it with a cache_prior of 1.
ESTIMATES: dict[str, tuple[list[int], list[int], int, int, float]] = {
    "one vote": ([7, 8, 7], [], 1, 8, (1 + FIRST) / 2),
    "two of three votes": ([7, 9, 7, 8, 7, 8, 1, 7], [], 1, 8, (2 + FIRST) / 4),
    "two lengths": ([6, 7, 8, 6, 7], [], 2, 8, (1 + (1 + FIRST) / 2) / 2),
    "the longer length outweighs": ([6, 7, 8, 1, 7, 9, 6, 7], [], 2, 8, (1 + (1 + FIRST) / 3) / 2),
    "five tokens have no length of their own": (
        [1, 2, 3, 4, 5, 9, 1, 2, 3, 4, 5],
        [],
        4,
        9,
        (1 + (1 + (1 + (1 + FIRST) / 2) / 2) / 2) / 2,
    ),
    "the root is the newest vote": ([7, 7], [], 1, 7, (1 + FIRST) / 2),
    "below the root": ([6, 7, 8, 6], [7], 2, 8, (1 + (1 + FIRST) / 2) / 2),
    "begun anew below the root": ([7, 8, 6], [7], 1, 8, (1 + FIRST) / 2),
    "what follows is the root": ([6, 7, 8], [7], 1, 8, (1 + FIRST) / 2),
}


@looped("case", ESTIMATES)
def test_estimates_by_hand(case: str) -> None:
    """P_n by the recursion, the number of lengths found, and the same by the naive search."""
    text, path, count, token, wanted = ESTIMATES[case]
    found = features_of(drafter_of(), [text], path)
    assert found.found.tolist() == [count]
    assert FIRST * math.exp(by_token(found, found.terms[CACHE])[token]) == pytest.approx(wanted, rel=1e-5)
    padded = [-1] * (32 - len(text)) + text
    assert naive_cache(padded, path, token, FIRST, 1.0) == (pytest.approx(wanted), count)


NO_PLACES: dict[str, tuple[list[int], list[int]]] = {
    "no repetition": ([5, 6, 7, 8], []),
    "the root is no place below itself": ([5, 6, 7, 8], [8]),
    "tokens of the path are no places": ([5, 6, 7, 8], [9, 9]),
    "padding": ([4], []),
}


@looped("case", NO_PLACES)
def test_no_places_leave_the_table_alone(case: str) -> None:
    """Without a place the term is 0, and no length is found."""
    text, path = NO_PLACES[case]
    found = features_of(drafter_of(voted=3), [text], path)
    assert found.found.tolist() == [0]
    assert not found.terms[CACHE].any()
    assert [naive_votes(text, path, length) for length in CACHE_LENGTHS] == [[]] * len(CACHE_LENGTHS)


@looped("count", range(1, len(CACHE_LENGTHS) + 1))
def test_the_weight_is_that_of_the_longest_length(count: int) -> None:
    """One weight for each longest length found; the term is that weight times the log-ratio."""
    weights = tuple(float(10**n) for n in range(len(CACHE_LENGTHS)))
    length = CACHE_LENGTHS[count - 1]
    text = [*range(length), FOREIGN, *range(length)]
    drafter = drafter_of([Level(cache=weights)] * 2)
    found, children = features_of(drafter, [text]), candidates_of(drafter, [text])
    assert children.tokens[0, 0] == FOREIGN
    assert children.scores[0, 0] == pytest.approx(
        weights[count - 1] * by_token(found, found.terms[CACHE])[FOREIGN], rel=1e-5
    )


def test_window_ends_the_places() -> None:
    """The oldest place that votes is the first token of the window; below the root it moves along with the path."""
    text = [7, 8, 1, 2, 3, 4, 5, 6, 7]

    def places(window: int, path: list[int]) -> int:
        return int(features_of(drafter_of(window=window), [text[-window:]], path).found[0])

    assert [places(window, []) for window in (9, 8)] == [1, 0]
    assert [places(window, [1]) for window in (9, 8, 7)] == [1, 1, 0]
    assert places(9, [8]) == 2
    assert places(8, [8]) == 0  # 8 is the first token of the window, which one level down begins a token later


def test_voted_order_by_hand() -> None:
    """By the weight of their votes, equal ones by id; the token of prompt lookup is a candidate before them."""
    text = [9, 3, 9, 3, 9, 5, 9, 4, 6, 9, 8, 6, 9]
    # After 9: 3, 3, 5, 4, 8. After 6, 9: 8.
    found = features_of(drafter_of(voted=6), [text])
    assert list(by_token(found, found.terms[CACHE])) == [0, 8, 3, 4, 5]
    three = features_of(drafter_of(voted=3), [text])
    assert list(by_token(three, three.terms[CACHE])) == [0, 8, 3, 4]
    assert num_candidates(drafter_of(voted=3)) == 1 + 1 + 3


def test_an_empty_table_gives_the_frequencies_of_the_text() -> None:
    """U is uniform; the row of every context is the text's most frequent tokens, of each row its own."""
    _, record = empty_table(VOCAB)
    drafter = drafter_of(table=record, prior=2.0, voted=1)
    found = features_of(drafter, [[3, 3, 5, 3, 5, 9], [8]])
    width = record.tokens.shape[1]
    others = [token for token in range(VOCAB) if token not in (3, 5, 9)]
    assert found.tokens[0, :width].tolist() == [3, 5, 9, *others][:width]
    assert found.tokens[1, :width].tolist() == [8, *range(8), *range(9, VOCAB)][:width]
    times = {3: 3, 5: 2, 9: 1}
    wanted = {t: math.log((times.get(t, 0) + 2 / VOCAB) / (6 + 2)) for t in found.tokens[0, :width].tolist()}
    assert by_token(found, found.terms[PRIOR] + found.terms[NGRAM]) == pytest.approx(wanted, abs=2e-3)
    second = by_token(found, found.terms[PRIOR] + found.terms[NGRAM], 1)
    assert second == pytest.approx({t: math.log(((t == 8) + 2 / VOCAB) / 3) for t in second}, abs=2e-3)
    assert found.terms[PRIOR][0].tolist() == pytest.approx([-math.log(VOCAB)] * found.terms[PRIOR].shape[1], abs=2e-3)


def test_levels_of_the_lm_head() -> None:
    """The first `lm_head_levels` levels have its top tokens and log-probabilities; those below have none of it."""
    logits = torch.tensor([[float(token == 11) * 5 + float(token == 13) * 4 for token in range(VOCAB)]])
    drafter = replace(drafter_of(), top=2, lm_head_levels=2)
    scorer = Scorer(drafter)
    recent = np.array([[1] * CONTEXT])
    step = scorer.begin(logits.expand(2, -1, -1), recent, drafter.depth)
    nodes = step.root
    total = math.log(math.exp(5) + math.exp(4) + VOCAB - 2)
    for level in range(drafter.depth):
        found = scorer.features(step, nodes)
        if level < 2:
            assert found.tokens[0, :2].tolist() == [11, 13]
            assert found.terms[HEAD][0, :2].tolist() == pytest.approx([5 - total, 4 - total], abs=1e-5)
        else:
            assert 11 not in found.tokens[0]
            assert not found.terms[HEAD].any()
        nodes = scorer.follow(step, nodes, np.zeros(1, np.int64), np.array([2]))
