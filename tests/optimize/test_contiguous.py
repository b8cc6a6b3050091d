"""Growth without gaps among siblings: against brute force over all prefix-closed sets without gaps."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math

import numpy as np
import pytest
from helpers import make_calibration
from hypothesis import given, settings
from hypothesis import strategies as st

from treeopt.engines import ALL_LEVELS
from treeopt.errors import TreeoptError
from treeopt.optimize.grow import Growth, gaps, grow, grow_contiguous
from treeopt.optimize.refine import Limits
from treeopt.optimize.select_method import MEDUSA, Fitter
from treeopt.optimize.values import Floats, IndependentValues
from treeopt.tree import Path

SHAPES = [(1, 5), (2, 3), (3, 2)]  # heads, ranks


@functools.cache
def forests(heads: int, ranks: int, closed: int) -> tuple[frozenset[Path], ...]:
    """All prefix-closed sets of paths; on the first `closed` levels, children 0 .. r of a node come together."""
    if heads == 0:
        return (frozenset(),)
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
    return tuple(found)


def value_of(path: Path, table: Floats) -> float:
    """The product of a path's accuracies."""
    return math.prod(float(table[head, rank]) for head, rank in enumerate(path))


@functools.cache
def best_of(text: bytes, shape: tuple[int, int], closed: int) -> dict[int, float]:
    """The greatest sum of values of at most so many paths."""
    table = np.frombuffer(text).reshape(shape)
    best: dict[int, float] = {}
    for paths in forests(*shape, closed):
        total = math.fsum(value_of(path, table) for path in paths)
        best[len(paths)] = max(best.get(len(paths), 0.0), total)
    sizes = range(max(best) + 1)
    return {size: max(best[m] for m in sizes if m <= size) for size in sizes}


def paths_of(growth: Growth) -> dict[Path, float]:
    """The grown paths with their values."""
    rows = [tuple(rank for rank in row if rank >= 0) for row in growth.paths.tolist()]
    return dict(zip(rows, growth.values.tolist(), strict=True))


def has_gap(paths: set[Path], closed: int) -> bool:
    """Whether a path on the first levels lacks a smaller sibling."""
    return any((*path[:-1], rank) not in paths for path in paths if len(path) <= closed for rank in range(path[-1]))


def check(table: Floats, closed: int) -> None:
    """Every budget: a tree within it, without gaps, with the values of its paths and the greatest sum."""
    for size, best in best_of(table.tobytes(), table.shape, closed).items():
        growth = grow_contiguous(IndependentValues(table), size + 1, closed)
        found = paths_of(growth)
        assert len(found) <= size
        assert {path[:-1] for path in found} <= {(), *found}
        assert not has_gap(set(found), closed)
        for path, value in found.items():
            assert value == pytest.approx(value_of(path, table), rel=1e-12)
        assert math.fsum(found.values()) == pytest.approx(best, rel=1e-12, abs=1e-15)
        listed = list(found)
        assert all(path[:-1] == () or listed.index(path[:-1]) < i for i, path in enumerate(listed))


@pytest.mark.parametrize("closed", [0, 1, 2, ALL_LEVELS])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_growth_equals_brute_force(seed: int, shape: tuple[int, int], closed: int) -> None:
    """No tree without gaps of at most as many nodes has a greater sum of values, at any size."""
    rng = np.random.default_rng(seed)
    check(rng.random(shape) * (rng.random(shape) < 0.7), closed)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_growth_equals_brute_force_with_ties_and_zeros(data: st.DataObject) -> None:
    """Equal values, zeros and ones, in any order of ranks."""
    shape = data.draw(st.sampled_from(SHAPES))
    accuracy = st.sampled_from([0.0, 0.125, 0.25, 0.5, 1.0]) | st.floats(0.0, 1.0, allow_subnormal=False)
    count = shape[0] * shape[1]
    table = np.array(data.draw(st.lists(accuracy, min_size=count, max_size=count))).reshape(shape)
    check(table, data.draw(st.sampled_from([1, 2, ALL_LEVELS])))


def test_forests_of_two_levels() -> None:
    """Of two heads with two ranks: none, (0) or both on level 1, each with none, (0) or both below: 1 + 3 + 9 sets."""
    assert len(set(forests(2, 2, 2))) == len(forests(2, 2, 2)) == 13
    assert len(forests(2, 2, 0)) == 25


def test_a_poor_rank_is_taken_for_the_next_one() -> None:
    """Rank 2 is worth the two nodes before it once there is room for three; trees are not nested."""
    table = np.array([[0.3, 0.05, 0.6], [0.9, 0.0, 0.0]])
    assert set(paths_of(grow_contiguous(IndependentValues(table), 3, ALL_LEVELS))) == {(0,), (0, 0)}
    assert set(paths_of(grow_contiguous(IndependentValues(table), 4, ALL_LEVELS))) == {(0,), (1,), (2,)}
    assert set(paths_of(grow(IndependentValues(table), 3))) == {(2,), (2, 0)}


def test_sorted_accuracies_give_the_usual_growth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no accuracy rises with the rank, nothing is lost, and nothing is searched."""
    monkeypatch.setattr("treeopt.optimize.grow._Search", None)
    table = -np.sort(-np.random.default_rng(1).random((4, 8)), axis=1)
    growth = grow_contiguous(IndependentValues(table), 200, ALL_LEVELS)
    assert growth.makes_the_tree_of(grow(IndependentValues(table), 200))


@pytest.mark.parametrize("parts", [1, 50, 1 << 20])
def test_parts_of_the_search_change_nothing(parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many sums are computed at once, the tree is the same."""
    table = np.random.default_rng(2).random((3, 6)) ** 3
    whole = grow_contiguous(IndependentValues(table), 40, ALL_LEVELS)
    monkeypatch.setattr("treeopt.optimize.grow._CELLS", parts)
    assert grow_contiguous(IndependentValues(table), 40, ALL_LEVELS).tree() == whole.tree()


def test_depth_and_size_are_limited() -> None:
    """No path is longer than the limit; a search that would take too long is refused."""
    table = np.random.default_rng(3).random((4, 5))
    assert grow_contiguous(IndependentValues(table), 30, ALL_LEVELS, max_depth=2).tree().depth == 2
    with pytest.raises(TreeoptError) as caught:
        grow_contiguous(IndependentValues(np.random.default_rng(3).random((6, 9))), 2049, ALL_LEVELS)
    assert caught.value.code.number == "E105"


def test_gaps_are_found() -> None:
    """A path without its next smaller sibling, on the first levels only, in the order of the list."""
    paths = [(0,), (2,), (0, 1), (2, 0), (2, 3)]
    assert gaps(paths, 2) == [(2,), (0, 1), (2, 3)]
    assert gaps(paths, 1) == [(2,)]
    assert gaps(paths, 0) == []


def test_fitted_trees_keep_the_limit() -> None:
    """Every method, refined or not, and every cross-validated size, gives trees without gaps."""
    rng = np.random.default_rng(4)
    answers = [rng.integers(0, 7, (12, 3)) for _ in range(12)]
    calibration = dataclasses.replace(make_calibration(answers), token_hashes=tuple(map(str, range(12))))
    limits = Limits(14, 12, contiguous=ALL_LEVELS)
    fitter = Fitter(calibration, limits, refine_seconds=1.0)
    plain = Fitter(calibration, Limits(14, 12))
    [(growth, _)] = plain.build([MEDUSA])
    assert gaps(growth.tree().paths, ALL_LEVELS)  # few texts: accuracies rise somewhere
    for method in (MEDUSA, dataclasses.replace(MEDUSA, refined=True)):
        [(_, tree)] = fitter.build([method])
        assert not gaps(tree.paths, ALL_LEVELS)
    for sums, nodes in zip(fitter.cross_validated_sums(MEDUSA, [2, 5, 14]), [2, 5, 14], strict=True):
        alone = Fitter(calibration, Limits(nodes, 12, contiguous=ALL_LEVELS)).choose([MEDUSA])
        assert alone.sums is not None
        assert sums.steps.tolist() == alone.sums.steps.tolist()
