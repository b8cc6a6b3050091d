"""Growth: the best tree of each size, with gaps among siblings and without, against brute force and a heap."""

from __future__ import annotations

import dataclasses
import functools
import heapq
import itertools
import math

import numpy as np
import pytest
from helpers import make_calibration, random_calibration
from hypothesis import given, settings
from hypothesis import strategies as st
from looped import looped

from treeopt.calibration import Calibration
from treeopt.engines import ALL_LEVELS
from treeopt.export.lint import gaps
from treeopt.optimize.grow import Growth, grow, grow_paths
from treeopt.optimize.replay import children_of
from treeopt.optimize.select_method import MEDUSA, Fitter, Limits, Method
from treeopt.optimize.values import Floats, IndependentValues
from treeopt.tree import Path, Tree

SHAPES = [(1, 4), (2, 2), (2, 3), (3, 2)]  # heads, ranks: at most 729 prefix-closed sets


@functools.cache
def subtrees(heads: int, ranks: int) -> tuple[frozenset[Path], ...]:
    """All prefix-closed sets of paths of at most `heads` ranks below `ranks`."""
    if heads == 0:
        return (frozenset(),)
    below = subtrees(heads - 1, ranks)
    branches: list[list[frozenset[Path]]] = []
    for rank in range(ranks):
        grown = [frozenset({(rank,)} | {(rank, *path) for path in paths}) for paths in below]
        branches.append([frozenset(), *grown])
    return tuple(frozenset().union(*choice) for choice in itertools.product(*branches))


def value_of(path: Path, table: Floats) -> float:
    """The product of a path's accuracies."""
    return math.prod(float(table[head, rank]) for head, rank in enumerate(path))


def best_sums(table: Floats) -> dict[int, float]:
    """For each number of paths, the greatest sum of values that any tree of as many paths has."""
    heads, ranks = table.shape
    best: dict[int, float] = {}
    for paths in subtrees(heads, ranks):
        total = math.fsum(value_of(path, table) for path in paths)
        best[len(paths)] = max(best.get(len(paths), 0.0), total)
    return best


def by_heap(table: Floats, nodes: int) -> list[tuple[Path, float]]:
    """Best-first growth one node at a time, ties by (depth, path)."""
    heads, ranks = table.shape
    grown: list[tuple[Path, float]] = []
    heap: list[tuple[float, int, Path]] = []

    def push_children(path: Path, value: float) -> None:
        if len(path) < heads:
            for rank in range(ranks):
                child = value * float(table[len(path), rank])
                if child > 0.0:
                    heapq.heappush(heap, (-child, len(path) + 1, (*path, rank)))

    push_children((), 1.0)
    while heap and len(grown) < nodes - 1:
        negative, _, path = heapq.heappop(heap)
        grown.append((path, -negative))
        push_children(path, -negative)
    return grown


def in_order(growth: Growth) -> list[tuple[Path, float]]:
    """Paths without their padding, and values, in the order of growth."""
    paths = [tuple(rank for rank in row if rank >= 0) for row in growth.paths.tolist()]
    return list(zip(paths, growth.values.tolist(), strict=True))


def random_table(seed: int, heads: int, ranks: int) -> Floats:
    """Unsorted accuracies, some of them 0."""
    rng = np.random.default_rng(seed)
    return rng.random((heads, ranks)) * (rng.random((heads, ranks)) < 0.9)


@st.composite
def tables(draw: st.DrawFn, shapes: tuple[tuple[int, int], ...]) -> Floats:
    """Accuracies in any order; ties and zeros are likely."""
    heads, ranks = draw(st.sampled_from(shapes))
    accuracy = st.sampled_from([0.0, 0.125, 0.25, 0.5, 1.0]) | st.floats(0.0, 1.0, allow_subnormal=False)
    return np.array(draw(st.lists(accuracy, min_size=heads * ranks, max_size=heads * ranks))).reshape(heads, ranks)


@looped("shape", SHAPES)
@looped("order", ["unsorted", "sorted"])
@looped("seed", range(3))
def test_growth_equals_brute_force(seed: int, order: str, shape: tuple[int, int]) -> None:
    """No prefix-closed set of the same size has a greater sum of values, at any size."""
    table = random_table(seed, *shape)
    if order == "sorted":
        table = -np.sort(-table, axis=1)
    check_against_brute_force(table)


@settings(max_examples=60, deadline=None)
@given(table=tables(tuple(SHAPES)))
def test_growth_equals_brute_force_with_ties_and_zeros(table: Floats) -> None:
    """Equal values, zeros and ones change nothing about the optimum."""
    check_against_brute_force(table)


def check_against_brute_force(table: Floats) -> None:
    """Compare every size: the sum, the prefix closure, and the size where nothing has value any more."""
    most = math.fsum(value_of(path, table) for path in max(subtrees(*table.shape), key=len))
    for size, best in best_sums(table).items():
        growth = grow(IndependentValues(table), size + 1)
        grown = [path for path, _ in in_order(growth)]
        assert len(set(grown)) == len(grown) <= size
        assert {path[:-1] for path in grown} <= {(), *grown}
        assert math.fsum(value_of(path, table) for path in grown) == pytest.approx(best, abs=1e-12)
        if len(grown) < size:  # only where nothing with value is left
            assert 1 + growth.values.sum() == pytest.approx(1.0 + most, abs=1e-12)


@settings(max_examples=100, deadline=None)
@given(table=tables(((1, 5), (2, 4), (3, 3), (4, 3))), nodes=st.integers(1, 40))
def test_growth_equals_a_heap(table: Floats, nodes: int) -> None:
    """Order, paths and values are those of best-first search with ties by (value down, depth, path)."""
    assert in_order(grow(IndependentValues(table), nodes)) == by_heap(table, nodes)


@looped("at_once", [1, 2, 5])
@looped("seed", range(3))
def test_growth_in_small_parts_equals_a_heap(seed: int, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However few nodes are expanded at a time, no tie and no node is lost, at any budget."""
    monkeypatch.setattr("treeopt.optimize.grow._FEWEST_AT_ONCE", at_once)
    monkeypatch.setattr("treeopt.optimize.grow._PARTS", 1 << 20)
    tied = np.array([[0.5, 1.0], [1.0, 0.5]])  # (0, 0) comes before (1, 1), whose parent is expanded first
    for table in (np.round(random_table(seed, 4, 5), 1), np.full((3, 4), 0.5), np.ones((3, 3)), np.eye(4), tied):
        for nodes in range(1, 60):
            assert in_order(grow(IndependentValues(table), nodes)) == by_heap(table, nodes)


@looped("seed", range(4))
def test_trees_are_nested(seed: int) -> None:
    """The best tree of n nodes lies in that of n + 1 and is the one that a budget of n gives."""
    values = IndependentValues(np.round(random_table(seed, 4, 6), 1))
    growth = grow(values, 60)
    for nodes in range(1, 60):
        small, large = growth.tree(nodes), growth.tree(nodes + 1)
        assert small.nodes == nodes
        assert set(small.paths) < set(large.paths)
        assert small == grow(values, nodes).tree()


@looped("seed", range(4))
def test_expected_is_the_prefix_sum(seed: int) -> None:
    """Tokens per step of the tree with n nodes are 1 and the sum of its values."""
    table = random_table(seed, 3, 4)
    growth = grow(IndependentValues(table), 30)
    sums = [
        1.0 + sum(value_of(path, table) for path in growth.tree(n).paths) for n in range(1, growth.tree().nodes + 1)
    ]
    np.testing.assert_allclose(1 + np.cumsum([0, *growth.values]), sums, rtol=1e-12)


@looped("max_depth", [0, 1, 2, 3, 9])
def test_max_depth_is_respected(max_depth: int) -> None:
    """With a largest depth the tree is that of as many heads."""
    table = random_table(5, 3, 4)
    growth = grow(IndependentValues(table), 40, max_depth=max_depth)
    assert in_order(growth) == by_heap(table[:max_depth], 40)
    assert growth.tree().depth == min(max_depth, 3)


@looped("nodes", [1, 2, 9, 60])
@looped("seed", range(4))
def test_orders_are_the_places_of_paths_in_growth(seed: int, nodes: int) -> None:
    """Each prefix of a row is looked up in the list of paths; sentinels and ranks that did not grow are beyond it."""
    growth = grow(IndependentValues(random_table(seed, 4, 6)), nodes)
    place = {path: i for i, (path, _) in enumerate(in_order(growth), start=1)}
    ranks = np.random.default_rng(seed).choice([0, 1, 2, 3, 4, 5, 9, 254, 255], (300, 4)).astype(np.uint8)
    depth, beyond = growth.paths.shape[1], len(growth.values) + 1
    wanted = [[place.get(tuple(row[: d + 1]), beyond) for d in range(depth)] for row in ranks.tolist()]
    assert growth.children.along(ranks).tolist() == wanted
    assert growth.children.accepted(ranks).tolist() == children_of(growth.tree()).accepted(ranks).tolist()
    paths = [(), *place]
    assert [paths[parent + 1] for parent in growth.parents] == [path[:-1] for path in place]


def test_same_tree_is_found_without_making_it() -> None:
    """Equal paths with values equal to six digits, whatever their order, and nothing else."""
    tables = [random_table(seed, 3, 4) for seed in range(3)]
    tables += [tables[0] * (1 + 1e-12), tables[0] * 0.5, tables[0][:, ::-1], np.zeros((3, 4))]
    growths = [grow(IndependentValues(table), nodes) for table in tables for nodes in (5, 12)]
    for one, other in itertools.product(growths, repeat=2):
        assert one.makes_the_tree_of(other) == (one.tree() == other.tree())
    single = [grow(IndependentValues(np.array([row])), 2) for row in ([0.5, 0.1], [0.1, 0.5], [0.4, 0.1])]
    assert not single[0].makes_the_tree_of(single[1])  # another path of the same value
    assert not single[0].makes_the_tree_of(single[2])  # another value of the same path
    tied = [grow(IndependentValues(np.array([row, [0.5] * 2])), 7) for row in ([0.4, 0.4 + 1e-13], [0.4, 0.4])]
    assert tied[0].paths.tolist() != tied[1].paths.tolist()
    assert tied[0].makes_the_tree_of(tied[1])


def test_growth_stops_where_nothing_has_value() -> None:
    """A large budget gives exactly the paths with value."""
    table = np.array([[0.5, 0.0, 0.25], [0.0, 0.5, 0.0]])
    growth = grow(IndependentValues(table), 1000)
    assert growth.tree() == Tree(((0,), (2,), (0, 1), (2, 1)), (0.5, 0.25, 0.25, 0.125))
    assert growth.tree(1000) == growth.tree()


def test_growth_without_any_value_is_the_root() -> None:
    """Heads that never hit leave the root alone."""
    growth = grow(IndependentValues(np.zeros((3, 4))), 64)
    assert growth.tree().paths == ()
    assert not len(growth.values)


def test_paths_are_as_wide_as_the_longest() -> None:
    """Where the budget leaves out the deepest candidates, no column is empty."""
    table = np.array([[0.9, 0.8, 0.7], [0.5, 0.1, 0.1], [0.1, 0.1, 0.1]])
    for nodes, depth in ((1, 0), (4, 1), (5, 2), (40, 3)):
        assert grow(IndependentValues(table), nodes).paths.shape == (nodes - 1 if nodes < 40 else 39, depth)


def forests(heads: int, ranks: int, closed: int) -> list[frozenset[Path]]:
    """All prefix-closed sets of paths; on the first `closed` levels, children 0 .. r of a node come together."""
    if heads == 0:
        return [frozenset()]
    below = forests(heads - 1, ranks, max(closed - 1, 0))
    found = []
    for present in itertools.product([False, True], repeat=ranks):
        if closed and any(b and not a for a, b in itertools.pairwise(present)):
            continue
        for subtrees in itertools.product(below, repeat=sum(present)):
            chosen = [rank for rank in range(ranks) if present[rank]]
            paths = {(rank,) for rank in chosen}
            for rank, subtree in zip(chosen, subtrees, strict=True):
                paths |= {(rank, *path) for path in subtree}
            found.append(frozenset(paths))
    return found


def total(paths: frozenset[Path] | tuple[Path, ...], table: Floats) -> float:
    """The sum of the products of accuracies."""
    return math.fsum(math.prod(float(table[head, rank]) for head, rank in enumerate(path)) for path in paths)


def few_texts(seed: int, ranks: int = 7) -> Calibration:
    """Twelve texts so short that accuracies rise with the rank somewhere."""
    rng = np.random.default_rng(seed)
    answers = [np.minimum(rng.geometric(0.3, (12, 3)) - 1, ranks) for _ in range(12)]
    return dataclasses.replace(make_calibration(answers), token_hashes=tuple(map(str, range(12))))


@looped("heads, ranks", [(2, 3), (3, 2), (1, 6)])
def test_trees_without_gaps_are_nearly_the_best(heads: int, ranks: int) -> None:
    """At every size the measured values sum to nearly those of the best set without gaps, on average to 1 % less."""
    for closed in (1, ALL_LEVELS):
        every, shares = forests(heads, ranks, closed), []
        for seed in range(8):
            calibration = few_texts(seed)
            for nodes in range(2, sum(ranks**d for d in range(heads + 1)) + 1):
                limits = Limits(nodes, ranks, heads, closed)
                tree = Fitter(calibration, limits).build(MEDUSA).tree()
                assert not gaps(tree.paths, closed)
                accuracy = calibration.accuracy
                best = max(total(paths, accuracy) for paths in every if len(paths) < nodes)
                shares.append((1 + total(tree.paths, accuracy)) / (1 + best))
        assert max(shares) <= 1 + 1e-12
        assert min(shares) > 0.95
        assert np.mean(shares) > 0.99


def test_levels_are_smoothed_where_gaps_are_refused() -> None:
    """Accuracies of these levels are pooled where they rise, with their mean; those of the other levels stay."""
    calibration = few_texts(5)
    table = calibration.accuracy[:, :7]
    assert (np.diff(table) > 0).any(axis=1).all()
    for closed in (0, 1, 2, ALL_LEVELS):
        fitter = Fitter(calibration, Limits(14, 7, contiguous=closed))
        found = fitter.independent(np.ones(calibration.positions)).accuracy
        assert (np.diff(found[:closed]) <= 0).all()
        np.testing.assert_allclose(found.sum(axis=1), table.sum(axis=1))
        assert found[closed:].tolist() == table[closed:].tolist()
        assert fitter.accuracy().tolist() == table.tolist()


def test_every_method_keeps_the_limit() -> None:
    """Independent and joint values, uniform weights and visits, and every cross-validated size."""
    calibration = few_texts(4)
    assert gaps(Fitter(calibration, Limits(14, 12)).build(MEDUSA).tree().paths, ALL_LEVELS)
    fitter = Fitter(calibration, Limits(14, 12, contiguous=ALL_LEVELS))
    for method in (MEDUSA, Method("independent", "visits"), Method("joint", "visits", 64.0)):
        assert not gaps(fitter.build(method).tree().paths, ALL_LEVELS)
    for sums, nodes in zip(fitter.cross_validated_sums(MEDUSA, [2, 5, 14]), [2, 5, 14], strict=True):
        alone = Fitter(calibration, Limits(nodes, 12, contiguous=ALL_LEVELS)).choose([MEDUSA])
        assert alone.sums is not None
        assert sums.steps.tolist() == alone.sums.steps.tolist()


def test_sorted_accuracies_give_the_usual_growth() -> None:
    """Where no accuracy rises with the rank, nothing is lost."""
    calibration = random_calibration(2, sequences=400)
    plain, closed = (Fitter(calibration, Limits(40, 4, contiguous=levels)).build(MEDUSA) for levels in (0, ALL_LEVELS))
    assert closed.makes_the_tree_of(plain)
    assert closed.makes_the_tree_of(grow(IndependentValues(calibration.accuracy[:, :4]), 40))


@looped("shape", SHAPES)
@looped("seed", range(3))
def test_path_growth_equals_brute_force(seed: int, shape: tuple[int, int]) -> None:
    """No tree of at most as many path tokens has a greater sum of values; ties and zeros included."""
    for table in (random_table(seed, *shape), np.round(random_table(seed, *shape), 1)):
        known = [
            (Tree.from_paths(paths).path_tokens, math.fsum(value_of(path, table) for path in paths))
            for paths in subtrees(*shape)
        ]
        for budget in range(1, max(price for price, _ in known) + 1):
            growth = grow_paths(IndependentValues(table), budget, 1 << 12)
            best = max((total for price, total in known if price <= budget), default=0.0)
            assert growth.values.sum() == pytest.approx(best, abs=1e-12)
            assert growth.tree().path_tokens <= max(budget, 1)


def test_path_growth_is_a_growth() -> None:
    """Nodes are sorted by value, parents come first, and the tree replays as its record does."""
    calibration = random_calibration(3, heads=4)
    fitter = Fitter(calibration, Limits(1 << 10, 8, path_tokens=24))
    growth = fitter.build(MEDUSA)
    assert (np.diff(growth.values) <= 0).all()
    assert (growth.parents < np.arange(len(growth.parents))).all()
    assert growth.tree().path_tokens <= 24
    assert fitter.sums(growth).tokens_per_step == fitter.sums(growth.tree()).tokens_per_step
    shallow = fitter.build(MEDUSA).tree()
    assert Fitter(calibration, Limits(1 << 10, 8, 1, path_tokens=24)).build(MEDUSA).tree().depth == 1
    assert shallow.depth > 1
