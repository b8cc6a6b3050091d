"""Drafts, against candidates and scores written out for one path at a time."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from kernel_scorer import Candidates, Nodes, Scorer, Step
from looped import looped
from naive_draft import SOURCES, Case, Table, naive_match, random_case, random_table
from numpy.typing import NDArray

from treeopt.drafter import MAX_MATCH, NO_CHANCE, Drafter, Level
from treeopt.drafting.count import NgramCounts
from treeopt.drafting.interface import Features
from treeopt.drafting.kernel.data import NGRAM
from treeopt.models.logits import top_ids

SEEDS = int(os.environ.get("TREEOPT_SEEDS", "6"))  # of each source
FLAT = Table({(): {0: 0.0}}, {(): 0.0}, (-1.0,) * 60)  # knows nothing of sixty tokens


def begin(case: Case, model: Scorer) -> Step:
    """A step of all rows of a case."""
    return model.begin(torch.from_numpy(case.logits), case.recent, case.drafter.depth)


def random_paths(seed: int, case: Case, depth: int, count: int) -> list[tuple[int, list[int]]]:
    """Rows and paths of one depth; half of the paths go on as the text did after a token that equals the root."""
    rng = np.random.default_rng(seed)
    paths = []
    for _ in range(count):
        row = int(rng.integers(len(case.recent)))
        path = rng.integers(case.drafter.ngram_table.vocab_size, size=depth).tolist()  # type: ignore[union-attr]
        text = case.recent[row].tolist()
        places = [place for place in range(len(text) - 1) if text[place] == text[-1]]
        if places and rng.random() < 0.5:
            path = (text[int(rng.choice(places)) + 1 :] * (depth + 1))[:depth]
        paths.append((row, path))
    return paths


def nodes_of(paths: Sequence[tuple[int, list[int]]]) -> Nodes:
    """The nodes at the ends of paths of one depth, all together."""
    rows = np.array([row for row, _ in paths])
    return Nodes(rows, np.array([path for _, path in paths], np.int64).reshape(len(paths), -1))


def listed(children: Candidates, node: int) -> list[tuple[int, float]]:
    """Tokens and scores of one node, the repeated ones left out."""
    pairs = zip(children.tokens[node].tolist(), children.scores[node].tolist(), strict=True)
    return [(token, score) for token, score in pairs if score != -math.inf]


def check_against_naive(case: Case, seed: int) -> None:
    """Candidates of random nodes of every depth."""
    model = Scorer(case.drafter)
    start = begin(case, model)
    for depth in range(case.drafter.depth):
        paths = random_paths(seed, case, depth, 6)
        children = model.candidates(start, nodes_of(paths))
        for node, (row, path) in enumerate(paths):
            naive = case.naive(row)
            found, candidates = listed(children, node), naive.candidates(path)
            assert sorted(token for token, _ in found) == sorted(candidates)
            for token, score in found:
                assert score == pytest.approx(naive.score(path, token), abs=1e-4)
            order = [(-score, candidates.index(token)) for token, score in found]
            assert order == sorted(order)


@looped("source", SOURCES)
def test_children_equal_the_naive_ones(source: str) -> None:
    """The same candidates, each once, with the same scores; equal scores in the order in which they were proposed."""
    for seed in range(SEEDS):
        check_against_naive(random_case(seed, source=source), seed)


@looped("source", SOURCES)
def test_window_of_none_copies_nothing(source: str) -> None:
    """Without a window heads and n-gram table alone score; the last tokens are still the context."""
    for seed in range(4):
        case = random_case(seed, window=0, source=source)
        assert Scorer(case.drafter).window == 4
        check_against_naive(case, seed)


def test_window_without_table_is_the_root() -> None:
    """Heads alone want to see no text."""
    assert Scorer(Drafter.heads_only(2, 3)).window == 1


@looped("source", SOURCES)
def test_equal_scores_keep_the_order_of_proposal(source: str) -> None:
    """Equal scores: the head's top, then the context's successors, the match, and the tokens voted for."""
    for seed in range(6):
        case = random_case(seed, source=source)
        equal = replace(Level(), head=0.0)
        case = replace(case, drafter=replace(case.drafter, levels=(equal,) * case.drafter.depth))
        model = Scorer(case.drafter)
        start = begin(case, model)
        for depth in range(case.drafter.depth):
            paths = random_paths(seed, case, depth, 4)
            children = model.candidates(start, nodes_of(paths))
            for node, (row, path) in enumerate(paths):
                assert [token for token, _ in listed(children, node)] == case.naive(row).candidates(path)


def found_after(recent: list[int], path: Sequence[int] = (), *, window: int = 0) -> Features:
    """Features at the end of a path, of a drafter that only copies."""
    drafter = Drafter((Level(),) * 30, 1, 1, window or len(recent), FLAT.record())
    model = Scorer(drafter)
    start = model.begin(torch.zeros(1, 1, 60), np.array([recent]), len(path) + 1)
    return model.features(start, nodes_of([(0, list(path))]))


def copied_after(recent: list[int], path: Sequence[int] = ()) -> tuple[int, int]:
    """The prompt_lookup token and the length of its match; the root and 0 where there is none."""
    found = found_after(recent, path)
    length = int(found.length[0])
    return int(found.tokens[0, found.looked_up[0]]) if length else recent[-1], length


# Recent tokens with the root, path, prompt_lookup token, length of its match.
MATCHES: dict[str, tuple[list[int], list[int], int, int]] = {
    "none": ([1, 2, 3, 4], [], 4, 0),
    "one token": ([5, 1, 7, 1], [], 7, 1),
    "the latest of equals": ([1, 5, 1, 6, 2, 1], [], 6, 1),
    "the longest, not the latest": ([3, 1, 5, 1, 6, 3, 1], [], 5, 2),
    "the place before the root": ([2, 3, 4, 4], [], 4, 1),
    "one that overlaps itself": ([4, 4, 4, 4, 4], [], 4, 4),
    "a whole period": ([1, 2, 1, 2, 1, 2], [], 1, 4),
    "into the path": ([1, 2, 3, 9, 1], [2], 3, 2),
    "of the path alone": ([5, 2, 3, 9, 1], [2], 3, 1),
    "at the end of a path of two": ([1, 2, 3, 8, 9, 1], [2, 3], 8, 3),
    "begun anew below a root without one": ([7, 2, 3, 8, 9, 1], [2, 3], 8, 2),
    "left by the path": ([1, 2, 3, 9, 1], [9], 1, 1),
    "nothing below a root with one": ([1, 2, 3, 9, 1], [4], 1, 0),
    "what followed is the root": ([1, 2, 3, 1], [2, 3], 1, 3),
    "the root is no place": ([6, 7, 8, 1], [1], 1, 0),
    "tokens of the path are no places": ([6, 7, 8, 1], [5, 5], 1, 0),
    "padding": ([-1, -1, -1, 4], [], 4, 0),
    "padding before equal tokens": ([-1, -1, 4, 4], [], 4, 1),
    "padding around a match": ([-1, 4, 5, -1, 4], [], 5, 1),
    "one more than the longest": ([1] * 14, [], 1, MAX_MATCH),
}


def test_latest_longest_match_by_hand() -> None:
    """Its follower is a candidate, the root with no weight where there is none; the naive search agrees."""
    for case, (recent, path, token, length) in MATCHES.items():
        assert copied_after(recent, path) == (token, length), case
        assert naive_match(recent, path) == (token, length), case


def test_matches_equal_a_naive_search() -> None:
    """Texts of two or three tokens, where matches are many and long, below paths of any depth."""
    for seed in range(30):
        rng = np.random.default_rng(seed)
        for _ in range(10):
            recent = rng.integers(0, rng.integers(2, 4), rng.integers(4, 40))
            recent[: rng.integers(0, len(recent))] = -1 if rng.random() < 0.3 else recent[0]
            path = rng.integers(0, 2, rng.integers(0, 6)).tolist()
            assert copied_after(recent.tolist(), path) == naive_match(recent.tolist(), path)


def test_weight_of_a_match_is_that_of_its_length() -> None:
    """Lengths beyond `MAX_MATCH` weigh as it does, at the root and below; a root without a match weighs nothing."""
    for length in (1, 2, 11, 12, 13, 20):
        check_weight(length)


def check_weight(length: int) -> None:
    """Of a match of this length at the root."""
    weights = tuple(float(number) for number in range(1, MAX_MATCH + 1))
    drafter = Drafter((replace(Level(), head=0.0, prompt_lookup=weights),) * 8, 1, 10, 64, FLAT.record())
    model = Scorer(drafter)
    text = list(range(1, 31))
    recent = [*text[: length + 7], 50, *text[:length]]
    start = model.begin(torch.zeros(1, 1, 60), np.array([[-1] * (64 - len(recent)) + recent]), 7)
    for depth in range(7):
        children = model.candidates(start, nodes_of([(0, text[length : length + depth])]))
        assert children.tokens[0, 0] == text[length + depth]
        assert children.scores[0, 0] == min(length + depth, MAX_MATCH)
    nothing = model.candidates(start, nodes_of([(0, [0])]))
    assert set(nothing.scores[0].tolist()) == {0.0, -math.inf}


def test_backs_off_to_the_longest_stored_context() -> None:
    """(5, 6) is stored, (4, 5, 6) is not, (3, 4, 5, 6) is; what a row does not hold has its backoff."""
    rows: dict[tuple[int, ...], dict[int, float]] = {
        (): {0: 0.0},
        (6,): {1: 1.0},
        (5, 6): {2: 2.0},
        (3, 4, 5, 6): {3: 4.0},
    }
    table = Table(rows, {(): 0.0, (6,): -1.0, (5, 6): -2.0, (3, 4, 5, 6): -4.0}, (-1.0,) * 10)
    model = Scorer(Drafter((Level(),) * 5, 1, 10, 0, table.record()))

    def above_backoff(recent: list[int], path: list[int]) -> dict[int, float]:
        start = model.begin(torch.zeros(1, 1, 10), np.array([recent]), 5)
        found = model.features(start, nodes_of([(0, path)]))
        ratios = dict(zip(found.tokens[0].tolist(), found.terms[NGRAM][0].tolist(), strict=True))
        return {token: ratio for token, ratio in ratios.items() if ratio != min(ratios.values())}

    assert above_backoff([9, 9, 9, 7], []) == {}
    assert above_backoff([9, 9, 9, 6], []) == {1: 1.0}
    assert above_backoff([9, 4, 5, 6], []) == {2: 2.0}
    assert above_backoff([3, 4, 5, 6], []) == {3: 4.0}
    assert above_backoff([9, 9, 3, 4], [5, 6]) == {3: 4.0}
    assert above_backoff([9, 9, 9, 9], [3, 4, 5, 6]) == {3: 4.0}
    assert above_backoff([-1, -1, -1, 6], []) == {1: 1.0}
    assert above_backoff([-1, -1, 5, 6], []) == {2: 2.0}


def tied(seed: int, dtype: torch.dtype, vocab: int) -> torch.Tensor:
    """Logits [2, 3, V] of nine values, or normal ones that tie by rounding."""
    generator = torch.Generator().manual_seed(seed)
    if seed % 2:
        return torch.randn(2, 3, vocab, generator=generator).to(dtype)
    values = torch.tensor([-2.0, -1.0, -0.5, -0.0, 0.0, 0.5, 1.0, 2.0, 3.0], dtype=dtype)
    return values[torch.randint(9, (2, 3, vocab), generator=generator)]


@looped("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_heads_drafts_are_those_of_the_heads(dtype: torch.dtype) -> None:
    """Plain, with weights of zero, or by a uniform table of no text, the first drafts are `top_ids`, ties and all."""
    for vocab, seed in itertools.product((1, 2, 8, 300), range(4)):
        check_first_drafts(vocab, seed, dtype)


def check_first_drafts(vocab: int, seed: int, dtype: torch.dtype) -> None:
    """Of one drafter of each kind."""
    logits, top = tied(seed, dtype, vocab), min(vocab, 10)
    wanted = top_ids(logits, top)
    counts = NgramCounts(vocab)
    rng = np.random.default_rng(seed)
    counts.add(rng.integers(vocab, size=50).tolist(), rng.integers(vocab, size=50).tolist())
    empty = Level(1.0, 0.5)
    drafters = [
        Drafter.heads_only(2, top),
        Drafter((Level(),) * 2, 2, top, 8, counts.table()),
        Drafter((Level(),) * 2, 2, top, 0, counts.table()),
        Drafter((empty,) * 2, 2, top, 8, NgramCounts(vocab).table()),
    ]
    for drafter in drafters:
        model = Scorer(drafter)
        recent = rng.integers(vocab, size=(3, model.window))
        start = model.begin(logits, recent, 2)
        below = model.follow(start, start.root, np.arange(3), rng.integers(vocab, size=3))
        for level, nodes in enumerate((start.root, below)):
            assert model.candidates(start, nodes).tokens[:, :top].tolist() == wanted[level].tolist()


def test_heads_scores_are_log_probabilities() -> None:
    """Logits 2, 1, 0 -> 2, 1 and 0 less log(e^2 + e + 1) = 2.4076, weighed by the head's number."""
    model = Scorer(Drafter((Level(head=0.5),), 1, 2))
    start = model.begin(torch.tensor([[[1.0, 2.0, 0.0]]]), np.array([[0]]), 1)
    children = model.candidates(start, start.root)
    assert children.tokens.tolist() == [[1, 0]]
    assert children.scores[0].tolist() == pytest.approx([-0.2038, -0.7038], abs=1e-4)
    assert model.drafter.levels[0].other_logit == NO_CHANCE


@looped("source", SOURCES)
def test_log_probability_equals_the_naive_one(source: str) -> None:
    """The softmax over candidates and other_logit, after the calibration map where there is one."""
    for seed, mapped in itertools.product(range(4), (False, True)):
        check_log_probability(random_case(seed, mapped=mapped, source=source), seed)


def check_log_probability(case: Case, seed: int) -> None:
    """Of random nodes of every depth."""
    model = Scorer(case.drafter)
    start = begin(case, model)
    for depth in range(case.drafter.depth):
        paths = random_paths(seed, case, depth, 4)
        children = model.candidates(start, nodes_of(paths))
        likely = model.log_probability(depth, children.scores)
        for node, (row, path) in enumerate(paths):
            wanted = case.naive(row).log_probabilities(path)
            real = np.isfinite(children.scores[node])
            found = dict(zip(children.tokens[node, real].tolist(), likely[node, real].tolist(), strict=True))
            assert found == pytest.approx(wanted, abs=1e-3)
            assert np.isneginf(likely[node, ~real]).all()


def scored(scores: list[float], level: Level) -> NDArray[np.float64]:
    """Log-probabilities of one node's candidates."""
    table = random_table(np.random.default_rng(0), 3).record()
    model = Scorer(Drafter((level,), 1, 3, 0, table))
    likely: NDArray[np.float32] = model.log_probability(0, np.array([scores], np.float32))[0]
    return likely.astype(np.float64)


def test_log_probability_is_mapped_between_and_beyond_pairs() -> None:
    """Log-odds 0 is halfway between the pairs; beyond them the map is constant; repeated candidates keep -inf."""
    level = Level(other_logit=0.0, calibration_map=((-2.0, -3.0), (2.0, 0.0)))
    assert scored([0.0], level)[0] == pytest.approx(math.log(1 / (1 + math.exp(1.5))), abs=1e-6)
    assert scored([60.0, -math.inf], level).tolist() == pytest.approx([math.log(0.5), -math.inf])
    low = math.log(1 / (1 + math.exp(3.0)))
    assert scored([-60.0, -500.0], level).tolist() == pytest.approx([low, low])
