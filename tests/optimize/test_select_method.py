"""The choice of a method: by texts that a tree was not fitted to, with the Medusa tree always among the candidates."""

from __future__ import annotations

import functools
import itertools
import math

import numpy as np
import pytest
from helpers import make_calibration, random_calibration, random_tree
from looped import looped
from numpy.typing import NDArray

from treeopt.calibration import Calibration
from treeopt.optimize.grow import Growth, grow
from treeopt.optimize.replay import TextSums, TraceRows, children_of, replay, visits
from treeopt.optimize.select_method import FOLDS, MEDUSA, STRENGTHS, Fitter, Limits, Method, candidates
from treeopt.optimize.tree_builder import build_tree
from treeopt.optimize.trie import PathTrie
from treeopt.optimize.values import IndependentValues, JointValues, Values
from treeopt.tree import Path, Tree

JOINT = Method("joint", "visits", 256.0)
METHODS = [MEDUSA, Method("independent", "visits"), Method("joint", "uniform", 64.0), JOINT]


@functools.cache
def subtrees(heads: int, ranks: int) -> tuple[frozenset[Path], ...]:
    """All prefix-closed sets of paths of at most `heads` ranks below `ranks`."""
    if heads == 0:
        return (frozenset(),)
    branches: list[list[frozenset[Path]]] = []
    for rank in range(ranks):
        grown = [frozenset({(rank,)} | {(rank, *path) for path in paths}) for paths in subtrees(heads - 1, ranks)]
        branches.append([frozenset(), *grown])
    return tuple(frozenset().union(*choice) for choice in itertools.product(*branches))


def all_values(values: Values) -> dict[Path, float]:
    """The value of every possible path, a node at a time."""
    heads, ranks = values.shape
    found: dict[Path, float] = {(): 1.0}
    for depth in range(heads):
        for path in [path for path in found if len(path) == depth]:
            row = values.children(np.array([path], np.int32).reshape(1, depth), np.array([found[path]]))[0]
            found.update({(*path, rank): float(row[rank]) for rank in range(ranks)})
    del found[()]
    return found


def stretches(seed: int, texts: int, *, length: int = 200, heads: int = 4) -> Calibration:
    """A source that stays easy or hard for some thirty tokens: all heads are mostly right, or all of them guess."""
    rng = np.random.default_rng(seed)
    tables = []
    for _ in range(texts):
        hard = (np.cumsum(rng.random(length) < 0.03) + rng.integers(2)) % 2 == 1
        easy, spread = rng.geometric(0.85, (length, heads)) - 1, rng.geometric(0.18, (length, heads)) - 1
        tables.append(np.where(hard[:, None], spread, easy))
    return make_calibration(tables)


def chosen(growth: Growth) -> list[Path]:
    """The paths in the order of growth."""
    return [tuple(rank for rank in row if rank >= 0) for row in growth.paths.tolist()]


@looped("weights", ["uniform", "visits"])
@looped("shape", [(1, 4), (2, 3), (3, 2)])
@looped("seed", range(3))
def test_joint_growth_equals_brute_force(seed: int, shape: tuple[int, int], weights: str) -> None:
    """No prefix-closed set of the same size has a greater sum of joint values, at any size."""
    heads, top_k = shape
    ranks = random_calibration(seed, sequences=5, length=12, heads=heads).ranks
    begun = np.random.default_rng(seed).random(len(ranks)) * 2
    trie = PathTrie(ranks, top_k)
    counts = trie.count(np.ones(len(ranks)))
    values = JointValues(trie, counts, 2.0, trie.count(begun) if weights == "visits" else None)
    table = all_values(values)
    best: dict[int, float] = {}
    for paths in subtrees(heads, top_k):
        best[len(paths)] = max(best.get(len(paths), 0.0), math.fsum(table[path] for path in paths))
    for size, most in best.items():
        grown = chosen(grow(values, size + 1))
        assert {path[:-1] for path in grown} <= {(), *grown}
        assert math.fsum(table[path] for path in grown) == pytest.approx(most, abs=1e-12)


@looped("top_k", [3, 16])
@looped("seed", range(3))
def test_medusa_is_growth_on_accuracies(seed: int, top_k: int) -> None:
    """The Medusa tree is growth on the products of the calibration's accuracies, to the last bit."""
    calibration = random_calibration(seed)
    growth = Fitter(calibration, Limits(40, top_k, 3)).build(MEDUSA)
    wanted = grow(IndependentValues(calibration.accuracy[:, :top_k]), 40, max_depth=3)
    assert growth.paths.tolist() == wanted.paths.tolist()
    assert growth.values.tolist() == wanted.values.tolist()
    assert growth.makes_the_tree_of(wanted)


def test_visits_come_from_replay() -> None:
    """Independent values weighted by visits are accuracies where steps begin, averaged over the rounds of settling."""
    calibration = random_calibration(3)
    limits = Limits(12, 16)
    ranks = calibration.ranks

    def values_of(weights: NDArray[np.float64]) -> IndependentValues:
        rows = []
        for column in ranks.T:
            trials = weights[column != 255].sum()
            rows.append([weights[column == rank].sum() / trials for rank in range(16)])
        return IndependentValues(np.array(rows))

    tree = grow(values_of(np.ones(len(ranks))), 12).tree()
    seen = []
    trees: list[Tree] = []
    while tree not in trees and len(trees) <= 3:
        trees.append(tree)
        seen.append(visits(children_of(tree).accepted(ranks)).astype(float))
        tree = grow(values_of(seen[-1]), 12).tree()
    wanted = grow(values_of(np.mean(seen, axis=0)), 12).tree()
    found = Fitter(calibration, limits).build(Method("independent", "visits")).tree()
    assert found.paths == wanted.paths
    assert found.values == pytest.approx(wanted.values)


def test_joint_visits_settle_at_their_own_strength() -> None:
    """Joint values settle with strength 256 and count visits as the mean of the rounds, not as their sum."""
    calibration = random_calibration(4)
    ranks, trie = calibration.ranks, PathTrie(calibration.ranks, 16)
    uniform = trie.count(np.ones(len(ranks)))
    tree = grow(IndependentValues(calibration.accuracy), 12).tree()
    seen: dict[Tree, NDArray[np.float64]] = {}
    while tree not in seen and len(seen) <= 3:
        seen[tree] = visits(children_of(tree).accepted(ranks)).astype(float)
        tree = grow(JointValues(trie, uniform, 256.0, trie.count(seen[tree])), 12).tree()
    assert len(seen) > 1
    mean = np.mean(list(seen.values()), axis=0)
    wanted = grow(JointValues(trie, uniform, 64.0, trie.count(mean)), 12)
    found = Fitter(calibration, Limits(12, 16)).build(Method("joint", "visits", 64.0))
    assert found.paths.tolist() == wanted.paths.tolist()
    np.testing.assert_allclose(found.values, wanted.values, rtol=1e-9)


def test_candidates_begin_with_the_medusa() -> None:
    """Whatever is wished for competes with the Medusa tree, which comes first and so wins every tie."""
    joint = [Method("joint", "visits", strength) for strength in STRENGTHS]
    assert candidates("joint", "visits") == [MEDUSA, *joint]
    assert candidates("independent", "uniform") == [MEDUSA]
    assert candidates("independent", "visits") == [MEDUSA, Method("independent", "visits")]
    assert len({str(method) for method in candidates("joint", "uniform")}) == 4


def test_exact_candidates_leave_the_medusa_out() -> None:
    """Where values and weights are wanted exactly, joint ones compete by strength alone and others not at all."""
    joint = [Method("joint", "visits", strength) for strength in STRENGTHS]
    assert candidates("joint", "visits", exactly=True) == joint
    assert candidates("independent", "visits", exactly=True) == [Method("independent", "visits")]
    assert candidates("independent", "uniform", exactly=True) == [MEDUSA]


def test_exact_method_of_few_texts_backs_off_most() -> None:
    """Below five texts nothing tells strengths apart: the greatest is taken, and not the Medusa tree."""
    methods = candidates("joint", "uniform", exactly=True)
    fit = Fitter(random_calibration(1, sequences=3), Limits(16, 16)).choose(methods)
    assert (fit.method, fit.sums) == (Method("joint", "uniform", 1024.0), None)


@looped("values", ["joint", "independent"])
def test_progress_counts_folds(values: str) -> None:
    """Each fold is counted, and the last one makes the task whole."""
    told: list[tuple[int, int]] = []

    def progress(done: int, total: int, note: str) -> None:
        assert note
        told.append((done, total))

    fitter = Fitter(random_calibration(2), Limits(12, 16), progress=progress)
    fit = fitter.choose(candidates(values, "visits"))
    assert told == [(fold, FOLDS) for fold in range(1, FOLDS + 1)]
    told.clear()
    fitter.build(fit.method)
    assert told == []
    fitter.cross_validated_sums(Method(values, "visits", 256.0), [1, 4, 12])
    assert told[-1] == (FOLDS, FOLDS)


def test_medusa_alone_wins() -> None:
    """With one candidate there is nothing to choose, but its cross-validated steps are known."""
    fit = Fitter(random_calibration(0), Limits(16, 16)).choose([MEDUSA])
    assert fit.method == MEDUSA
    assert fit.sums is not None
    assert fit.trials == {str(MEDUSA): int(fit.sums.steps.sum())}
    assert fit.tree == fit.growth.tree(16)


@looped("method", METHODS)
def test_build_on_some_texts_equals_their_own_calibration(method: Method) -> None:
    """Texts left out leave no trace in the tree."""
    calibration = random_calibration(7)
    texts = np.arange(20) % 3 > 0
    growth = Fitter(calibration, Limits(24, 16)).build(method, texts)
    wanted = Fitter(calibration.select(np.flatnonzero(texts)), Limits(24, 16)).build(method)
    assert growth.tree().paths == wanted.tree().paths
    np.testing.assert_allclose(growth.values, wanted.values, rtol=1e-9)


@looped("sequences", [1, FOLDS - 1])
def test_too_few_texts_are_no_choice(sequences: int) -> None:
    """Below five texts the first method is built on all of them, and nothing is cross-validated."""
    calibration = random_calibration(1, sequences=sequences)
    fit = Fitter(calibration, Limits(16, 16)).choose(candidates("joint", "visits"))
    assert (fit.method, fit.trials, fit.sums) == (MEDUSA, {}, None)
    assert fit.tree == Fitter(calibration, Limits(16, 16)).build(MEDUSA).tree()
    assert Fitter(random_calibration(1, sequences=FOLDS), Limits(16, 16)).choose([MEDUSA]).sums is not None


def test_cross_validated_steps_are_of_trees_without_them() -> None:
    """Every text is replayed by a tree built from the other folds: equal folds, each with its own tree."""
    calibration = random_calibration(2)
    fitter = Fitter(calibration, Limits(24, 16))
    fit = fitter.choose([MEDUSA])
    assert fit.sums is not None
    assert fit.sums.steps.sum() > fitter.sums(fit.tree).steps.sum()
    folds = fitter.folds()
    assert np.bincount(folds).tolist() == [4] * FOLDS
    for fold in range(FOLDS):
        others = calibration.select(np.flatnonzero(folds != fold))
        tree = grow(IndependentValues(others.accuracy), 24).tree()
        alone = TraceRows.of(calibration, folds == fold).replay(tree).sums
        assert alone.steps.tolist() == fit.sums.steps[folds == fold].tolist()


@looped("method", METHODS)
def test_cross_validated_steps_of_every_size_are_those_of_prefixes(method: Method) -> None:
    """Each size replays the tree of the growth's first nodes, on the texts that the growth left out."""
    calibration = random_calibration(12, sequences=10, length=30)
    fitter = Fitter(calibration, Limits(14, 16))
    folds = fitter.folds()
    sizes = list(range(1, 15))
    for nodes, sums in zip(sizes, fitter.cross_validated_sums(method, sizes), strict=True):
        for fold in range(FOLDS):
            growth = fitter.build(method, folds != fold)
            own = replay(growth.tree(nodes), calibration.select(np.flatnonzero(folds == fold)))
            assert sums.steps[folds == fold].tolist() == own.sums.steps.tolist()


def test_sizes_beyond_a_growth_are_the_whole_growth() -> None:
    """Two ranks of one level are three nodes: larger sizes take as many steps, and accept no other rank."""
    calibration = random_calibration(2, sequences=10)
    fitter = Fitter(calibration, Limits(9, 2, max_depth=1))
    whole, beyond = fitter.cross_validated_sums(MEDUSA, [3, 9])
    assert whole.steps.tolist() == beyond.steps.tolist()
    assert whole.steps.tolist() == replay([[0], [1]], calibration).sums.steps.tolist()


def test_cross_validated_steps_below_five_texts_are_seen_ones() -> None:
    """Too few texts to leave any out: all are replayed by the tree of all."""
    fitter = Fitter(random_calibration(1, sequences=3), Limits(8, 16))
    growth = fitter.build(MEDUSA)
    for nodes, sums in zip([1, 8], fitter.cross_validated_sums(MEDUSA, [1, 8]), strict=True):
        assert sums.steps.tolist() == fitter.sums(growth.tree(nodes)).steps.tolist()


@looped("seed", range(3))
def test_steps_of_some_texts_are_those_of_all(seed: int) -> None:
    """A text's steps are its own, as in replay, whichever other texts are there."""
    calibration = random_calibration(seed)
    fitter = Fitter(calibration, Limits(16, 16))
    tree = random_tree(seed, nodes=20, depth=4, ranks=8)
    everywhere = fitter.sums(tree).steps
    assert everywhere.tolist() == replay(tree, calibration).sums.steps.tolist()
    texts = np.random.default_rng(seed).random(20) < 0.4
    assert TraceRows.of(calibration, texts).replay(tree).sums.steps.tolist() == everywhere[texts].tolist()


def counted(steps: NDArray[np.int64]) -> TextSums:
    """Steps of texts of 200 tokens."""
    return TextSums(np.full(len(steps), 200), steps)


KIN = [MEDUSA, *(Method("joint", "visits", strength) for strength in (64.0, 256.0, 1024.0))]


@looped(
    "excess, winner",
    [
        # Steps on eight texts above those of strength 64; the Medusa tree's always far behind.
        ({256.0: [0] * 8, 1024.0: [0] * 8}, 1024.0),  # ties go to the greatest strength
        ({256.0: [1] * 8, 1024.0: [1] * 8}, 64.0),  # a little worse on every text: no noise to hide in
        ({256.0: [5, -5] * 4, 1024.0: [9] * 8}, 256.0),  # as good on average, and noisy
        ({256.0: [9] * 8, 1024.0: [3, -2] * 4}, 1024.0),  # 4 steps more, within one standard error of 7.07
        ({256.0: [9] * 8, 1024.0: [4, -2] * 4}, 1024.0),  # 8 more, within 8.49
        ({256.0: [9] * 8, 1024.0: [4, -1] * 4}, 64.0),  # 12 more, beyond 7.07
        ({256.0: [-1] * 8, 1024.0: [9] * 8}, 256.0),  # the best is the best
    ],
)
def test_winner_backs_off_most_within_a_standard_error(excess: dict[float, list[int]], winner: float) -> None:
    """Of one kin, the greatest strength whose paired excess is at most one standard error above the best."""
    fitter = Fitter(random_calibration(0, sequences=8), Limits(8, 16))
    base = np.full(8, 100)
    results = [base + 50, base, *(base + np.array(excess[strength]) for strength in (256.0, 1024.0))]
    assert fitter._winner(KIN, list(map(counted, results))) == Method("joint", "visits", winner)


def test_medusa_wins_ties() -> None:
    """Where joint trees do no better than the Medusa tree, the Medusa tree is built."""
    fitter = Fitter(random_calibration(0, sequences=8), Limits(8, 16))
    assert fitter._winner(KIN, [counted(np.full(8, 100))] * 4) == MEDUSA


@pytest.fixture(scope="module")
def fresh_stretches() -> Calibration:
    """Texts of the easy and hard source that no tree has seen."""
    return stretches(900, 1200)


@pytest.mark.slow
@looped("nodes", [16, 64])
@looped("seed", [1, 2])
def test_joint_beats_the_medusa_where_texts_are_hard_in_stretches(
    seed: int, nodes: int, fresh_stretches: Calibration
) -> None:
    """Heads that err together, and steps that begin where they err: the joint tree is 2 % better."""
    calibration = stretches(seed, 300)
    tree = build_tree(calibration, nodes)
    medusa = build_tree(calibration, nodes, values="independent", weights="uniform")
    assert tree.source["method"]["values"] == "joint"
    fresh, of_medusa = (replay(t, fresh_stretches).tokens_per_step for t in (tree, medusa))
    assert fresh > 1.02 * of_medusa
    assert tree.expected is not None
    assert tree.expected.cross_validated is not None
    assert medusa.expected is not None
    assert tree.expected.cross_validated == pytest.approx(fresh, rel=0.015)
    assert abs(medusa.expected.independent / of_medusa - 1) > abs(tree.expected.cross_validated / fresh - 1)
