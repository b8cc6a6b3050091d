"""Replay of counts and of the target's probabilities, against naive simulations, loops and all texts."""

from __future__ import annotations

import dataclasses
import itertools
import math
from dataclasses import dataclass

import numpy as np
import pytest
from helpers import make_calibration, random_calibration, random_tree
from looped import looped
from refusals import refusal_of
from sampled_traces import LEVELS, RANKS, TRACED, of_drafter, sampled

from treeopt.calibration import Calibration
from treeopt.errors import Code
from treeopt.optimize.curve import measure_curve, policy_curve
from treeopt.optimize.intervals import by_text, difference_interval, replayed_gain
from treeopt.optimize.per_step import build_policy, replay_policy
from treeopt.optimize.replay import Replay, TextSums, children_of, replay, standard_error
from treeopt.optimize.select_method import MEDUSA, Fitter, Limits, Method
from treeopt.optimize.tree_builder import build_tree
from treeopt.optimize.trie import PathTrie
from treeopt.policy import TreePolicy
from treeopt.traces import MISS, NONE, TargetTraces
from treeopt.tree import Tree

KEPT = 16


@dataclass
class Naive:
    """What a step-by-step simulation counts."""

    steps_by_sequence: list[int]
    visited: list[bool]
    acceptance_by_depth: list[float]
    tokens: int


def simulate(tree: Tree, calibration: Calibration) -> Naive:
    """Each text on its own: emit the root, then drafts while the path is in the tree and the text goes on."""
    paths = set(tree.paths)
    steps: list[int] = []
    visited: list[bool] = []
    lengths: list[int] = []
    tokens = 0
    for s in range(calibration.sequences):
        rows = calibration.sequence(s).tolist()
        begins = [False] * len(rows)
        position = 0
        while position < len(rows):
            begins[position] = True
            drafts = 0
            for depth in range(1, min(calibration.num_heads, len(rows) - position - 1) + 1):
                if tuple(rows[position][:depth]) not in paths:
                    break
                drafts = depth
            lengths.append(drafts)
            tokens += 1 + drafts
            position += 1 + drafts
        steps.append(sum(begins))
        visited += begins
    shares = [sum(length >= depth for length in lengths) / max(len(lengths), 1) for depth in range(1, tree.depth + 1)]
    return Naive(steps, visited, shares, tokens)


def check(tree: Tree, calibration: Calibration) -> Replay:
    """Compare every figure with the simulation's."""
    got, expected = replay(tree, calibration), simulate(tree, calibration)
    assert got.visited.tolist() == expected.visited
    assert got.sums.steps.tolist() == expected.steps_by_sequence
    assert got.steps == sum(expected.steps_by_sequence)
    assert got.tokens == expected.tokens == calibration.positions
    assert got.acceptance_by_depth().tolist() == pytest.approx(expected.acceptance_by_depth, rel=1e-15)
    assert got.tokens_per_step == expected.tokens / sum(expected.steps_by_sequence)
    return got


@looped("seed", range(60))
def test_replay_equals_simulation(seed: int) -> None:
    """Steps, tokens, visits and acceptance of any tree on any traces are those of a decoder that steps through."""
    heads = 1 + seed % 5
    calibration = random_calibration(seed, heads=heads, top_k=KEPT)
    for nodes in (2, 9, 40):
        tree = random_tree(seed + nodes, nodes=min(nodes, 4**heads), depth=heads, ranks=5)
        check(tree, calibration)


def test_ends_of_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of one token, of two and of none, across borders of the working arrays, and no text at all."""
    lengths = [1, 2, 0, 1, 0, 3, 1]
    calibration = make_calibration([np.zeros((length, 4)) for length in lengths])
    got = check(Tree.chain(4), calibration)
    assert got.sums.steps.tolist() == [1, 1, 0, 1, 0, 1, 1]
    monkeypatch.setattr("treeopt.optimize.trie._CHUNK", 7)
    check(random_tree(0, nodes=20, depth=4, ranks=4), random_calibration(0))
    got = replay(Tree.chain(2), make_calibration([np.zeros((0, 2))]))
    assert got.histogram == (0, 0, 0)
    assert (got.steps, got.tokens, got.tokens_per_step) == (0, 0, 1.0)
    assert got.acceptance_by_depth().tolist() == [0.0, 0.0]


def test_replay_by_hand() -> None:
    """Five tokens, a step of three and a step of two: 2.5 tokens per step."""
    answers = np.array([[0, 1], [3, 3], [3, 3], [1, 0], [0, 0]])
    got = replay(Tree(((0,), (1,), (0, 1), (1, 0))), make_calibration([answers]))
    assert got.accepted.tolist() == [2, 0, 0, 1, 0]
    assert got.visited.tolist() == [True, False, False, True, False]
    assert (got.steps, got.tokens, got.tokens_per_step) == (2, 5, 2.5)
    assert got.acceptance_by_depth().tolist() == [1.0, 0.5]


def test_sentinels_are_never_accepted() -> None:
    """Misses and ends match no path, even of a tree that has the largest rank there is."""
    tree = Tree(((0,), (252,)))
    assert children_of(tree).accepted(np.array([[252], [MISS], [NONE], [0]], np.uint8)).tolist() == [1, 0, 0, 1]


def test_tree_deeper_than_the_heads_is_refused() -> None:
    """E101: head d drafts depth d, so four levels need four heads."""
    error = refusal_of(replay, Tree.chain(4), random_calibration(0, heads=3))
    assert error.code is Code.TREE_TOO_DEEP
    assert "--max-depth 3" in error.fix


def test_rank_that_was_not_kept_is_refused() -> None:
    """E102: with 16 ranks kept, rank 16 was never scored; rank 15 was."""
    calibration = random_calibration(0, top_k=KEPT)
    error = refusal_of(replay, Tree(((0,), (0, KEPT))), calibration)
    assert error.code is Code.RANK_TOO_LARGE
    assert error.at == "[0, 16]"
    check(Tree(((0,), (0, KEPT - 1))), calibration)


def naive(tree: Tree, calibration: Calibration) -> list[tuple[float, int]]:
    """Tokens and steps of each text: a node counts with its probability where its parent is on the text."""
    assert calibration.target is not None
    found = []
    for s in range(calibration.sequences):
        at, end = (int(calibration.offsets[s + i]) for i in (0, 1))
        tokens, steps = 0.0, 0
        while at < end:
            ranks, accepted = calibration.ranks[at].tolist(), 0
            tokens, steps = tokens + 1, steps + 1
            for path in tree.paths:
                *above, last = path
                if list(above) == ranks[: len(above)] and ranks[len(above)] != NONE:
                    on_text = ranks[len(above)] == last
                    accepted = max(accepted, len(path)) if on_text else accepted
                    known = last < calibration.target.ranks
                    tokens += float(calibration.target.probability[at, len(above), last]) if known else on_text
            at += 1 + accepted
        found.append((tokens, steps))
    return found


@looped("traced", [1, TRACED, RANKS])
@looped("seed", range(4))
def test_replay_equals_naive_sums(seed: int, traced: int) -> None:
    """Tokens and steps of each text, for random trees and any number of traced candidates."""
    calibration = sampled(seed, traced=traced)
    tree = random_tree(seed, nodes=25, depth=LEVELS, ranks=RANKS)
    found, wanted = replay(tree, calibration), naive(tree, calibration)
    assert found.sums.steps.tolist() == [steps for _, steps in wanted]
    np.testing.assert_allclose(found.sums.tokens, [tokens for tokens, _ in wanted], rtol=1e-12)
    total = sum(tokens for tokens, _ in wanted) / sum(steps for _, steps in wanted)
    assert found.tokens_per_step == pytest.approx(total, rel=1e-12)
    assert found.expected_drafts is not None
    assert not found.expected_drafts[~found.visited].any()
    counted = replay(tree, dataclasses.replace(calibration, target=None))
    np.testing.assert_array_equal(counted.visited, found.visited)
    assert counted.expected_drafts is None
    assert counted.tokens_per_step == calibration.positions / found.steps


@looped("nodes", [2, 7, 30, 254])
def test_policy_equals_naive_sums(nodes: int) -> None:
    """A candidate of a per-step tree counts where its place is below the size and its parent is on the text."""
    calibration = of_drafter(sampled(5))
    assert calibration.target is not None
    assert calibration.steps is not None
    places = calibration.target.places
    assert places is not None
    depth = calibration.num_heads
    found = replay_policy(TreePolicy(nodes, depth, "d1"), calibration)
    tokens = 0.0
    for i in np.flatnonzero(found.visited):
        tokens += 1
        for level in range(depth):
            if level and calibration.steps.node_rank[i, level - 1] >= nodes:
                break
            for rank in range(RANKS):
                on_text = calibration.ranks[i, level] == rank
                if rank < TRACED:
                    inside = places[i, level, rank] < nodes
                    tokens += float(calibration.target.probability[i, level, rank]) if inside else 0
                else:
                    tokens += on_text and calibration.steps.node_rank[i, level] < nodes
    assert found.sums.tokens.sum() == pytest.approx(tokens, rel=1e-12)
    assert found.tokens_per_step == pytest.approx(tokens / found.steps, rel=1e-12)


CHAIN = np.array([[0.7, 0.2, 0.1], [0.3, 0.4, 0.3], [0.25, 0.15, 0.6]])  # probabilities of the next token
DRAFTED = np.array([[1, 0, 2], [0, 1, 2], [2, 0, 1]])  # candidates after each token, the best first


def traces_of(text: tuple[int, ...], levels: int) -> tuple[np.ndarray, np.ndarray]:
    """Ranks [G, L] and probabilities [G, L, 3] of a text of the chain, whose candidates follow the token before."""
    ranks, p = np.zeros((len(text), levels), np.int64), np.zeros((len(text), levels, 3))
    for i, level in itertools.product(range(len(text)), range(levels)):
        place = i + level + 1
        if place < len(text):
            before = text[place - 1]
            ranks[i, level] = DRAFTED[before].tolist().index(text[place])
            p[i, level] = CHAIN[before][DRAFTED[before]]
    return ranks, p


def test_sum_has_the_mean_of_the_count_over_all_texts() -> None:
    """Over all texts of a Markov chain, weighted by their probability, expected and counted drafts have one mean."""
    length, levels = 6, 3
    tree = Tree.from_paths([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 2), (1, 0, 1)])
    texts = [(0, *rest) for rest in itertools.product(range(3), repeat=length - 1)]
    traced = [traces_of(text, levels) for text in texts]
    calibration = make_calibration([ranks for ranks, _ in traced], top_k=3)
    target = TargetTraces(np.concatenate([p for _, p in traced]).astype(np.float16))
    found = replay(tree, dataclasses.replace(calibration, target=target)).sums
    weights = np.array([math.prod(CHAIN[a, b] for a, b in itertools.pairwise(text)) for text in texts])
    assert weights.sum() == pytest.approx(1)
    assert weights @ found.tokens == pytest.approx(length, rel=2e-3)  # each text has its length as the count
    assert np.std(found.tokens) > 0.1  # though not each text by itself


def test_probability_one_is_the_count() -> None:
    """Where the target is certain of every token, sums are counts: the same trees, steps and figures."""
    calibration = sampled(3, traced=RANKS)
    assert calibration.target is not None
    certain = (calibration.ranks[:, :, None] == np.arange(RANKS)).astype(np.float16)
    sure = dataclasses.replace(calibration, target=dataclasses.replace(calibration.target, probability=certain))
    counted = dataclasses.replace(calibration, target=None)
    for values, weights in itertools.product(("independent", "joint"), ("uniform", "visits")):
        one, other = (build_tree(each, 12, values=values, weights=weights) for each in (sure, counted))
        assert one.paths == other.paths
        np.testing.assert_allclose(one.values, other.values, rtol=1e-6)
        assert one.expected == other.expected
    assert replay(one, sure).tokens_per_step == replay(one, counted).tokens_per_step
    limits = Limits(10, RANKS)
    curves = [measure_curve(Fitter(each, limits), MEDUSA, [1, 4, 10]) for each in (sure, counted)]
    assert [point.tokens_per_step for point in curves[0].points] == [p.tokens_per_step for p in curves[1].points]
    sure, counted = of_drafter(sure), of_drafter(counted)
    policies = [build_policy(each, 20) for each in (sure, counted)]
    assert policies[0].expected == policies[1].expected
    assert policy_curve(sure, [1, 8]).points == policy_curve(counted, [1, 8]).points


def test_counts_are_sums_of_probabilities() -> None:
    """Hits of a path's children: the weighted probability where the path is on the text; counts of untraced ranks."""
    calibration = sampled(8)
    assert calibration.target is not None
    weights = np.random.default_rng(1).random(calibration.positions)
    trie = PathTrie(calibration.ranks, RANKS, calibration.target)
    found, plain = trie.count(weights), PathTrie(calibration.ranks, RANKS).count(weights)
    for path in [(), (0,), (1,), (0, 0), (2, 1)]:
        level = len(path)
        there = (calibration.ranks[:, :level] == np.array(path, np.int64)).all(axis=1)
        parents = trie.find(np.array([path], np.int32))
        children = trie.child(level, parents[:, None], np.arange(RANKS)[None])
        hits = found[level].of_children(parents, children)[0]
        for rank in range(RANKS):
            p = calibration.target.probability[:, level, rank] if rank < TRACED else calibration.ranks[:, level] == rank
            assert hits[rank] == pytest.approx(float((weights * there * p.astype(np.float64)).sum()))
        np.testing.assert_allclose(found[level].trials, plain[level].trials)
    nowhere = np.array([-1])
    assert not found[2].of_children(nowhere, np.full((1, RANKS), -1)).any()


@looped("max_rank", [0, 3])
def test_levels_without_paths_have_no_hits(max_rank: int) -> None:
    """Few short texts have no path at deep levels: the tree of counts is built, and that of sums too."""
    for seed in range(12):
        calibration = sampled(seed, texts=6, length=8, levels=4)
        for one in (calibration, dataclasses.replace(calibration, target=None)):
            assert build_tree(one, 5, max_rank=max_rank).max_rank <= max_rank


def test_accuracy_is_a_mean_of_probabilities() -> None:
    """Independent values at a level: the mean probability over positions with a token; counts for untraced ranks."""
    calibration = sampled(9)
    assert calibration.target is not None
    accuracy = Fitter(calibration, Limits(8, RANKS)).accuracy()
    for level in range(LEVELS):
        there = calibration.ranks[:, level] != NONE
        np.testing.assert_allclose(
            accuracy[level, :TRACED], calibration.target.probability[there, level].astype(np.float64).mean(axis=0)
        )
        np.testing.assert_allclose(accuracy[level, 5], (calibration.ranks[there, level] == 5).mean())


@looped("method", [MEDUSA, Method("joint", "visits", 64.0)])
def test_cross_validation_uses_sums(method: Method) -> None:
    """The sums of each size are those of its fold's tree on the texts left out, in the order of the texts."""
    calibration = sampled(11)
    fitter = Fitter(calibration, Limits(12, RANKS))
    folds = fitter.folds()
    for nodes, found in zip((1, 5, 12), fitter.cross_validated_sums(method, [1, 5, 12]), strict=True):
        for fold in np.unique(folds):
            growth = fitter.build(method, folds != fold)
            alone = replay(growth.tree(nodes), calibration.select(np.flatnonzero(folds == fold))).sums
            assert found.steps[folds == fold].tolist() == alone.steps.tolist()
            np.testing.assert_allclose(found.tokens[folds == fold], alone.tokens, rtol=1e-12)
    fit = fitter.choose([method])
    assert fit.sums is not None
    assert fit.sums.tokens_per_step == found.tokens_per_step
    assert fit.trials == {str(method): round(calibration.positions / found.tokens_per_step)}


def test_winner_has_the_most_expected_tokens_per_step() -> None:
    """Fewer steps do not win where the target expects fewer tokens of each."""
    fitter = Fitter(sampled(2, texts=8), Limits(8, RANKS))
    few = TextSums(np.full(8, 18.0), np.full(8, 10))
    many = TextSums(np.full(8, 24.0), np.full(8, 12))
    assert fitter._winner([MEDUSA, Method("joint", "visits", 64.0)], [few, many]).values == "joint"
    assert fitter._winner([MEDUSA, Method("joint", "visits", 64.0)], [many, few]) == MEDUSA
    # Of two strengths with equal tokens per step the greater wins, though its trees take more steps.
    strengths = [Method("joint", "visits", 64.0), Method("joint", "visits", 256.0)]
    longer = TextSums(np.full(8, 26.0), np.full(8, 13))
    assert fitter._winner(strengths, [many, longer]) == strengths[1]


def test_gain_is_of_the_sums_of_both_trees() -> None:
    """The paired interval resamples the expected tokens of each tree with its own steps."""
    calibration = sampled(21, texts=30)
    medusa = Fitter(calibration, Limits(9, RANKS)).build(MEDUSA).tree()
    tree = random_tree(3, nodes=9, depth=LEVELS, ranks=RANKS)
    gain = replayed_gain(medusa, tree, calibration)
    one, other = (
        by_text(calibration.token_hashes, s.tokens, s.steps)
        for s in (replay(t, calibration).sums for t in (tree, medusa))
    )
    assert (one[0] != other[0]).any()
    assert gain.interval == difference_interval(one[0], one[1], other[1], other[0])
    assert gain.interval != difference_interval(one[0], one[1], other[1])
    assert gain.first == replay(medusa, calibration).tokens_per_step


def test_standard_error_by_hand() -> None:
    """Two texts of 6 tokens in 2 steps and 3 in 3: tau 9/5, residuals 2.4 and -2.4, sqrt(2 * 11.52) / 5."""
    assert standard_error(np.array([6, 3]), np.array([2, 3])) == pytest.approx(math.sqrt(23.04) / 5)
    assert standard_error(np.array([6]), np.array([2])) is None
    sums = TextSums(np.array([6, 3]), np.array([2, 3]))
    assert sums.tokens_per_step == 9 / 5
    assert TextSums(np.zeros(0), np.zeros(0, np.int64)).tokens_per_step == 1.0


FAULTS = ["dtype", "shape", "negative", "sum", "nan", "past the end", "places without steps", "place of a true token"]


@looped("fault", FAULTS)
def test_calibration_refuses_wrong_probabilities(fault: str) -> None:
    """One E220 for each rule."""
    calibration = sampled(6)
    assert calibration.target is not None
    assert calibration.target.places is not None
    probability, places = calibration.target.probability.copy(), calibration.target.places.copy()
    steps = calibration.steps
    first = tuple(int(i) for i in np.argwhere(calibration.ranks < TRACED)[0])
    if fault == "dtype":
        probability = probability.astype(np.float32)
    elif fault == "shape":
        probability, places = probability[:, :2], places[:, :2]
    elif fault == "negative":
        probability[first][0] = -0.1
    elif fault == "sum":
        probability[first][:] = 0.5
    elif fault == "nan":
        probability[first][0] = np.nan
    elif fault == "past the end":
        probability[tuple(np.argwhere(calibration.ranks == NONE)[0])] = 0.1
    elif fault == "places without steps":
        steps = None
    else:
        places[first][calibration.ranks[first]] ^= 1
    assert (
        refusal_of(dataclasses.replace, calibration, steps=steps, target=TargetTraces(probability, places)).code
        is Code.CALIBRATION_INVALID
    )


def test_selected_and_merged_probabilities_are_those_of_the_texts() -> None:
    """Parts of a calibration keep the rows of their texts, and merging them gives the whole back."""
    calibration = sampled(7)
    assert calibration.target is not None
    even, odd = calibration.select(range(0, 12, 2)), calibration.select(range(1, 12, 2))
    whole = odd.merge(even)
    assert whole.target is not None
    np.testing.assert_array_equal(whole.target.probability, calibration.target.probability)
    np.testing.assert_array_equal(whole.target.places, calibration.target.places)
    error = refusal_of(even.merge, dataclasses.replace(odd, target=None))
    assert error.code is Code.CALIBRATION_MISMATCH
    assert "target probabilities" in error.what
