"""Node budgets of several drafters: the same texts, naive replay, and the right denominator."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from helpers import random_calibration
from naive_steps import left_out_sums, tau
from per_step_traces import naive, traced

from treeopt.calibration import Calibration
from treeopt.errors import Code, TreeoptError
from treeopt.optimize.intervals import ratio_interval, sampling_interval
from treeopt.optimize.sweep_sizes import INDEPENDENT, PER_STEP, STATIC, SizePoint, common_texts, sweep_sizes
from treeopt.optimize.tree_builder import build_tree
from treeopt.policy import TreePolicy

TOP_K = 4
NODES = (2, 5, 9)


def numbered(calibration: Calibration) -> Calibration:
    """The same with different texts."""
    return dataclasses.replace(calibration, token_hashes=tuple(f"t{s}" for s in range(calibration.sequences)))


def of_heads(seed: int = 1, sequences: int = 20) -> Calibration:
    """Traces of heads alone."""
    return numbered(random_calibration(seed, sequences=sequences, length=40, heads=3, top_k=8))


def by_key(points: tuple[SizePoint, ...]) -> dict[tuple[str, str, int], SizePoint]:
    """The points by calibration, kind of trees and nodes."""
    return {(one.calibration, one.trees, one.nodes): one for one in points}


def test_sizes_equal_naive_replay() -> None:
    """Medusa trees by brute force on the other folds, the best static trees as built, ratios paired over texts."""
    calibration = of_heads()
    found = by_key(sweep_sizes(calibration, sizes=NODES, top_k=TOP_K).points)
    assert list(found) == [("calibration", trees, n) for trees in (INDEPENDENT, STATIC) for n in NODES]
    for nodes in NODES:
        sums = left_out_sums(calibration, nodes, top_k=TOP_K)
        tokens, steps = np.array(sums).T
        medusa, static = found["calibration", INDEPENDENT, nodes], found["calibration", STATIC, nodes]
        assert medusa.tokens_per_step == tau(sums)
        assert (medusa.ratio, medusa.ratio_interval.low, medusa.ratio_interval.high) == (1.0, 1.0, 1.0)
        assert medusa.sampling == sampling_interval(tokens, steps)
        built = build_tree(calibration, nodes, top_k=TOP_K)
        assert built.expected is not None
        assert static.tokens_per_step == pytest.approx(built.expected.cross_validated, rel=1e-6)
        assert static.method.startswith(built.source["method"]["values"])
        assert static.ratio == pytest.approx(static.tokens_per_step / tau(sums))


def test_per_step_trees_are_a_naive_loop() -> None:
    """Where they are traced, per-step trees of each size are replayed, and compared with heads on the same texts."""
    heads = of_heads(2, 12)
    drafter = numbered(traced(2, sequences=12))
    lengths = np.diff(drafter.offsets)
    heads = dataclasses.replace(numbered(random_calibration(2, sequences=12, heads=3)), prompt_ids=drafter.prompt_ids)
    found = sweep_sizes({"d": drafter, "h": heads}, sizes=(3, 8), top_k=TOP_K)
    assert found.medusa == "h"
    points = by_key(found.points)
    assert ("h", PER_STEP, 3) not in points
    for nodes in (3, 8):
        steps, _ = naive(TreePolicy(nodes, 3, "d1"), drafter)
        point = points["d", PER_STEP, nodes]
        assert (point.tokens_per_step, point.method) == (lengths.sum() / sum(steps), "")
        medusa = np.array(left_out_sums(heads, nodes, top_k=TOP_K))
        assert point.ratio == pytest.approx(point.tokens_per_step / tau([tuple(one) for one in medusa]))
        assert point.ratio_interval == ratio_interval(lengths, np.array(steps), *medusa.T)


def test_common_texts_are_those_of_all() -> None:
    """Texts with another prompt or other tokens are left out, and counted."""
    one, other = of_heads(1, 12), of_heads(2, 12)
    later = dataclasses.replace(
        other,
        prompt_ids=(*one.prompt_ids[2:], "set:00000012", "set:00000013"),
        token_hashes=(*one.token_hashes[2:11], "x", "y", "z"),
    )
    chosen = common_texts({"one": one, "later": later})
    assert chosen["one"].prompt_ids == chosen["later"].prompt_ids == one.prompt_ids[2:11]
    assert np.array_equal(chosen["one"].sequence(0), one.sequence(2))
    assert np.array_equal(chosen["later"].sequence(0), other.sequence(0))
    found = sweep_sizes({"one": one, "later": later}, sizes=(3,), top_k=TOP_K)
    assert (found.texts, found.left_out) == (9, 6)


def test_different_texts_and_few_texts_are_errors() -> None:
    """Calibrations of other texts are not compared (E221); one with four texts has no fifth to leave out (E303)."""
    one = of_heads(1)
    other = dataclasses.replace(of_heads(2), token_hashes=tuple(f"u{s}" for s in range(20)))
    with pytest.raises(TreeoptError, match="0 texts in common") as caught:
        sweep_sizes({"one": one, "other": other}, sizes=(3,))
    assert caught.value.code is Code.CALIBRATION_MISMATCH
    with pytest.raises(TreeoptError, match="4 different texts") as caught:
        sweep_sizes(of_heads(1, 4), sizes=(3,))
    assert caught.value.code is Code.PROMPTS_EMPTY
    with pytest.raises(TreeoptError) as caught:
        sweep_sizes(one, sizes=(3, 100), top_k=TOP_K)
    assert caught.value.code is Code.RANK_TOO_LARGE
    with pytest.raises(ValueError, match="no calibration"):
        sweep_sizes({})
