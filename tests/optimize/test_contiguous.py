"""Trees without gaps among siblings: against brute force over all prefix-closed sets without gaps."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
from helpers import make_calibration, random_calibration
from looped import looped

from treeopt.calibration import Calibration
from treeopt.engines import ALL_LEVELS
from treeopt.export.lint import gaps
from treeopt.optimize.grow import grow
from treeopt.optimize.select_method import MEDUSA, Fitter, Limits, Method
from treeopt.optimize.values import Floats, IndependentValues
from treeopt.tree import Path


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
