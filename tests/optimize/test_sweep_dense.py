"""Dense trees against sparse ones: Cartesian products by brute force, replay by a naive loop, folds."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from helpers import random_calibration
from naive_steps import left_out_sums, naive_sums, tau, uneven
from sampled_traces import sampled

from treeopt.calibration import Calibration
from treeopt.errors import Code, TreeoptError
from treeopt.latency import LatencyPoint, LatencyProfile
from treeopt.optimize import sweep_dense as module
from treeopt.optimize.curve import Timing
from treeopt.optimize.intervals import difference_interval
from treeopt.optimize.methods import MEDUSA, Method
from treeopt.optimize.replay import replay
from treeopt.optimize.sweep_dense import DenseSweep, dense_tree, dense_widths, random_widths, sweep_dense

TOP_K = 4
SMALL = {"sizes": (6,), "largest": 14, "top_k": TOP_K}


def texts_of(seed: int = 1, sequences: int = 15) -> Calibration:
    """Different texts with three levels."""
    return uneven(seed, sequences)


def nodes_of(widths: tuple[int, ...]) -> int:
    """1 + s_1 + s_1 s_2 + ..., the root counted."""
    return 1 + sum(int(np.prod(widths[:depth])) for depth in range(1, len(widths) + 1))


@pytest.fixture
def medusa_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Medusa tree is the only candidate."""
    monkeypatch.setattr(module, "candidates", lambda *_, **__: [MEDUSA])


@pytest.mark.parametrize(("levels", "ranks", "largest"), [(1, 3, 9), (2, 4, 9), (3, 3, 40), (4, 2, 12), (3, 9, 2)])
def test_dense_widths_are_all_products(levels: int, ranks: int, largest: int) -> None:
    """Every tuple of widths whose tree has at most so many nodes, by nodes and then by widths."""
    every = [w for depth in range(1, levels + 1) for w in itertools.product(range(1, ranks + 1), repeat=depth)]
    fitting = [(nodes_of(widths), widths) for widths in every if nodes_of(widths) <= largest]
    assert dense_widths(levels, ranks, largest) == [widths for _, widths in sorted(fitting)]


@pytest.mark.parametrize("widths", [(2, 3), (3, 1, 2), (1, 1, 1), (4,), (1, 3, 2)])
def test_dense_tree_is_the_cartesian_product(widths: tuple[int, ...]) -> None:
    """A path is in the tree where each of its ranks is below the width of its level."""
    tree = dense_tree(widths)
    every = [path for depth in range(1, 4) for path in itertools.product(range(4), repeat=depth)]
    inside = [path for path in every if len(path) <= len(widths) and all(map(int.__lt__, path, widths))]
    assert list(tree.paths) == inside
    assert tree.nodes == nodes_of(widths)


def test_dense_tree_of_the_paper_has_eight_drafts() -> None:
    """Two candidates of head 1 and three of head 2: 2 + 6 = 8 drafts and 6 leaves (section 2.1.2)."""
    tree = dense_tree((2, 3))
    assert (tree.nodes - 1, len(tree.leaves)) == (8, 6)


def test_random_widths_are_distinct_and_seeded() -> None:
    """The same seed gives the same trees, another one others; no tree twice; 0 and too many give all."""
    first, possible = random_widths(3, 4, 30, 12, seed=5)
    assert possible == len(dense_widths(3, 4, 30)) > 30
    assert len(set(first)) == len(first) == 12
    assert set(first) <= set(dense_widths(3, 4, 30))
    assert random_widths(3, 4, 30, 12, seed=5)[0] == first != random_widths(3, 4, 30, 12, seed=6)[0]
    for trees in (0, possible, possible + 1):
        assert random_widths(3, 4, 30, trees, seed=5) == (dense_widths(3, 4, 30), possible)


def test_random_widths_are_equally_likely() -> None:
    """Over many seeds each of 11 trees is drawn about as often: within four standard errors of 3 of 11."""
    possible = dense_widths(2, 3, 8)
    counts = dict.fromkeys(possible, 0)
    for seed in range(1100):
        for widths in random_widths(2, 3, 8, 3, seed)[0]:
            counts[widths] += 1
    share = 3 / len(possible)
    assert all(abs(count - 1100 * share) < 4 * np.sqrt(1100 * share * (1 - share)) for count in counts.values())


@pytest.mark.parametrize("seed", [1, 2])
def test_dense_figures_are_those_of_a_naive_loop(seed: int) -> None:
    """Every dense tree has the tokens per step of a decoder's loop over its Cartesian product."""
    calibration = texts_of(seed)
    found = sweep_dense(calibration, trees=0, **SMALL)
    assert [point.widths for point in found.dense] == dense_widths(3, TOP_K, 14)
    for point in found.dense:
        paths = [p for d in range(len(point.widths)) for p in itertools.product(*map(range, point.widths[: d + 1]))]
        assert point.nodes == len(paths) + 1
        assert point.tokens_per_step == tau(naive_sums(paths, calibration, range(calibration.sequences)))


@pytest.mark.usefixtures("medusa_only")
def test_sparse_figures_are_of_texts_left_out() -> None:
    """Each text is replayed by the tree of the other folds, at the size of each dense tree."""
    calibration = texts_of()
    found = sweep_dense(calibration, trees=9, **SMALL)
    assert found.method == str(MEDUSA)
    for point in found.dense:
        assert point.sparse == tau(left_out_sums(calibration, point.nodes, top_k=TOP_K))
    shown = {point.nodes: point.tokens_per_step for point in found.sparse}
    assert list(shown) == [1, 2, 3, 4, 6, 8, 12, 14]
    assert shown[1] == 1.0
    assert shown[6] == tau(left_out_sums(calibration, 6, top_k=TOP_K))


@pytest.mark.usefixtures("medusa_only")
def test_verdict_counts_and_pairs() -> None:
    """Dense trees with fewer tokens per step are counted; the interval is that of the difference to the best one."""
    calibration = texts_of(3)
    found = sweep_dense(calibration, trees=0, **SMALL)
    [verdict] = found.verdicts
    sums = left_out_sums(calibration, 6, top_k=TOP_K)
    taus = [point.tokens_per_step for point in found.dense]
    assert (verdict.nodes, verdict.tokens_per_step) == (6, tau(sums))
    assert verdict.beaten == sum(one < tau(sums) for one in taus)
    assert 0 < verdict.beaten < verdict.trees == len(found.dense) == found.possible
    assert not verdict.beats_all
    assert verdict.best.tokens_per_step == max(taus)
    best = naive_sums(dense_tree(verdict.best.widths).paths, calibration, range(calibration.sequences))
    tokens, steps = np.array(sums).T
    assert verdict.difference == difference_interval(tokens, steps, np.array(best)[:, 1])


def test_verdict_beats_all_where_none_is_as_good() -> None:
    """A sparse tree of many nodes beats small dense trees; a tie is no victory."""
    found = sweep_dense(texts_of(), sizes=(12,), largest=3, trees=0, top_k=TOP_K)
    assert [one.beats_all for one in found.verdicts] == [True] * len(found.verdicts)
    tie = dataclasses.replace(found.verdicts[0], beaten=found.verdicts[0].trees - 1)
    assert not tie.beats_all
    found = sweep_dense(texts_of(), sizes=(2,), largest=2, trees=0, top_k=TOP_K)
    assert {one.beaten for one in found.verdicts} == {0}  # the chain of one draft, twice


def test_sampled_traces_are_sums_of_probabilities() -> None:
    """Under sampling the figures are the expected ones of replay."""
    calibration = dataclasses.replace(sampled(1), token_hashes=tuple(f"t{s}" for s in range(12)))
    found = sweep_dense(calibration, trees=6, sizes=(4,), largest=10, top_k=TOP_K)
    for point in found.dense:
        assert point.tokens_per_step == replay(dense_tree(point.widths), calibration).tokens_per_step


def profile_of(seconds: dict[int, float], **provenance: str) -> LatencyProfile:
    """Seconds by number of nodes."""
    points = [LatencyPoint(n, 1, 512, s, s, s) for n, s in seconds.items()]
    return LatencyProfile.from_points(points, provenance or None)


def test_speedups_are_by_the_profile() -> None:
    """Overhead is relative to one node, speedup is tokens per step / overhead, for dense and sparse trees alike."""
    profile = profile_of({1: 0.1, 14: 0.36})
    found: DenseSweep = sweep_dense(texts_of(), trees=8, timing=Timing(profile), **SMALL)
    for point in (*found.dense, *found.sparse):
        assert point.overhead == pytest.approx((0.1 + 0.02 * (point.nodes - 1)) / 0.1)
        assert point.speedup == pytest.approx(point.tokens_per_step / point.overhead)
    assert {(p.overhead, p.speedup) for p in sweep_dense(texts_of(), trees=8, **SMALL).dense} == {(None, None)}


@pytest.mark.parametrize(
    ("profile", "code"),
    [
        (profile_of({1: 0.1, 14: 0.2}, drafter="other"), Code.DRAFTER_MISMATCH),
        (profile_of({1: 0.1, 14: 0.2}, kind="dynamic"), Code.PROFILE_INVALID),
        (profile_of({1: 0.1, 13: 0.2}), Code.PROFILE_INVALID),
        (profile_of({2: 0.1, 14: 0.2}), Code.PROFILE_INVALID),
    ],
)
def test_profile_that_does_not_fit_is_one_error(
    profile: LatencyProfile, code: Code, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another drafter or kind, a missing size, no step of one node: refused before any tree is replayed."""
    monkeypatch.setattr(module, "dense_tree", None)
    with pytest.raises(TreeoptError) as caught:
        sweep_dense(texts_of(), timing=Timing(profile), **SMALL)
    assert caught.value.code is code


def test_few_texts_and_large_sizes_are_errors() -> None:
    """Four different texts cannot be judged on texts left out; a size that the traces do not hold is named."""
    few = texts_of(sequences=8)
    few = dataclasses.replace(few, token_hashes=tuple("aabbccdd"))
    with pytest.raises(TreeoptError, match="4 different texts") as caught:
        sweep_dense(few, **SMALL)
    assert caught.value.code is Code.PROMPTS_EMPTY
    with pytest.raises(TreeoptError, match="no tree of 90 nodes") as caught:
        sweep_dense(texts_of(), sizes=(6, 90), largest=14, top_k=TOP_K)
    assert caught.value.code is Code.RANK_TOO_LARGE
    assert "3 levels of 4 ranks hold 85 nodes" in caught.value.why


@pytest.mark.parametrize("wrong", [{"sizes": ()}, {"sizes": (0,)}, {"trees": -1}, {"largest": 1}, {"seed": -1}])
def test_numbers_out_of_range_are_value_errors(wrong: dict[str, object]) -> None:
    """No size, a size below 1, a negative number of trees, no room for a draft, a negative seed."""
    with pytest.raises(ValueError, match=r"size|whole number|range|seed"):
        sweep_dense(texts_of(), **{**SMALL, **wrong})


def test_joint_trees_compete_too() -> None:
    """Both the Medusa tree and the method that cross-validation chooses have a verdict for each size."""
    made = random_calibration(4, sequences=60, heads=3, top_k=8)
    made = dataclasses.replace(made, token_hashes=tuple(f"t{s}" for s in range(60)))
    found = sweep_dense(made, sizes=(6, 10), largest=14, trees=5, top_k=TOP_K)
    methods = list(dict.fromkeys([str(MEDUSA), found.method]))
    assert [(one.nodes, one.method) for one in found.verdicts] == [(n, m) for n in (6, 10) for m in methods]
    assert found.method in {str(MEDUSA), *(str(Method("joint", "visits", s)) for s in (64, 256, 1024))}


def test_sizes_beyond_the_growth_have_no_point() -> None:
    """One rank on three levels holds four nodes, so no sparse tree is said to have more."""
    found = sweep_dense(texts_of(), sizes=(3,), largest=14, top_k=1, trees=0)
    assert {point.nodes for point in found.sparse} == {1, 2, 3, 4}
