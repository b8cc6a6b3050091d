"""Levels of trees: brute force over all paths of the first levels, on texts left out of the fit."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from naive_steps import left_out_sums, naive_medusa, tau, uneven

from treeopt.calibration import Calibration
from treeopt.errors import Code, TreeoptError
from treeopt.optimize import sweep_levels as module
from treeopt.optimize.intervals import Interval, ratio_interval, sampling_interval
from treeopt.optimize.methods import MEDUSA
from treeopt.optimize.sweep_levels import LevelPoint, LevelSweep, sweep_levels
from treeopt.optimize.tree_builder import build_tree

TOP_K = 3


def texts_of(seed: int = 1, sequences: int = 15) -> Calibration:
    """Different texts with four levels."""
    return uneven(seed, sequences, heads=4)


@pytest.mark.parametrize("seed", [1, 2])
def test_levels_equal_brute_force(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each point is the best tree of all paths of at most h levels, fitted to the other folds; the share is paired."""
    monkeypatch.setattr(module, "candidates", lambda *_, **__: [MEDUSA])
    calibration = texts_of(seed)
    found = sweep_levels(calibration, sizes=(12, 5, 12), top_k=TOP_K)
    assert [(point.nodes, point.levels) for point in found.points] == [(n, h) for n in (5, 12) for h in (1, 2, 3, 4)]
    for point in found.points:
        sums = left_out_sums(calibration, point.nodes, top_k=TOP_K, levels=point.levels)
        whole = left_out_sums(calibration, point.nodes, top_k=TOP_K)
        tokens, steps = np.array(sums).T
        assert point.tokens_per_step == tau(sums)
        assert point.share == tau(sums) / tau(whole)
        assert point.sampling == sampling_interval(tokens, steps)
        assert point.share_interval == ratio_interval(tokens, steps, tokens, np.array(whole)[:, 1])
        everything = range(calibration.sequences)
        tree = naive_medusa(calibration, everything, point.nodes, top_k=TOP_K, levels=point.levels)
        assert (point.used, point.depth) == (len(tree) + 1, max(map(len, tree)))
        assert point.method == str(MEDUSA)


def test_one_level_holds_few_nodes() -> None:
    """Three ranks of one level are four nodes with the root, whatever the budget; all levels are 100 % exactly."""
    first, *_, last = sweep_levels(texts_of(), sizes=(12,), top_k=TOP_K).points
    assert (first.used, first.depth, first.tokens_per_step <= 2.0) == (4, 1, True)
    assert (last.used, last.share, last.levels) == (12, 1.0, 4)


def test_all_levels_are_what_build_builds() -> None:
    """With all levels the figure is the cross-validated one of the tree that `build_tree` builds."""
    calibration = texts_of(3, sequences=40)
    for point in sweep_levels(calibration, sizes=(6, 16), top_k=TOP_K).points:
        if point.levels == 4:
            expected = build_tree(calibration, point.nodes, top_k=TOP_K).expected
            assert expected is not None
            assert expected.cross_validated == pytest.approx(point.tokens_per_step, rel=1e-6)


def test_enough_is_the_fewest_levels_within_one_percent() -> None:
    """Exactly 1 % lost is not enough; other sizes do not count."""
    shares = {(8, 1): 0.8, (8, 2): 0.99, (8, 3): 0.991, (8, 4): 1.0, (16, 1): 0.995, (16, 2): 1.0}
    points = [LevelPoint(h, n, "m", n, h, 2.0, None, share, None) for (n, h), share in shares.items()]
    found = LevelSweep(tuple(points))
    assert (found.enough(8), found.enough(16)) == (3, 1)
    wide = dataclasses.replace(points[2], share_interval=Interval(0.985, 0.997, 0.9))
    assert LevelSweep((*points[:2], wide, *points[3:])).enough(8) == 4


@pytest.mark.parametrize(
    ("sequences", "sizes", "code"), [(4, (4,), Code.PROMPTS_EMPTY), (15, (4, 200), Code.RANK_TOO_LARGE)]
)
def test_too_few_texts_and_too_many_nodes_are_errors(sequences: int, sizes: tuple[int, ...], code: Code) -> None:
    """Four texts have no fifth to leave out; four levels of three ranks hold 121 nodes at most."""
    with pytest.raises(TreeoptError) as caught:
        sweep_levels(texts_of(sequences=sequences), sizes=sizes, top_k=TOP_K)
    assert caught.value.code is code
