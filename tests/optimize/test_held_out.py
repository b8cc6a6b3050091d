"""Judgement: texts set aside had no part in the tree, and what it does there is plain replay."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from helpers import random_calibration
from looped import looped

from treeopt.calibration import Calibration
from treeopt.errors import Code, TreeoptError
from treeopt.optimize.build_job import judge, split
from treeopt.optimize.intervals import difference_interval, sampling_interval
from treeopt.optimize.replay import replay
from treeopt.optimize.tree_builder import build_tree, tree_limits


def hashed(calibration: Calibration, hashes: list[int] | None = None) -> Calibration:
    """The same with a hash for each text; all different where None."""
    named = hashes or range(calibration.sequences)
    return dataclasses.replace(calibration, token_hashes=tuple(f"hash {name}" for name in named))


def test_split_takes_the_last_texts() -> None:
    """All but the last are fitted, the last set aside, in their order."""
    calibration = hashed(random_calibration(0, sequences=8))
    fitted, aside, dropped = split(calibration, 3)
    assert fitted.prompt_ids == calibration.prompt_ids[:5]
    assert aside.prompt_ids == calibration.prompt_ids[5:]
    assert dropped == 0
    assert np.array_equal(np.concatenate([fitted.ranks, aside.ranks]), calibration.ranks)


def test_split_drops_texts_that_stand_in_both() -> None:
    """A text that was fitted is no judge, whatever its prompt; twice among the set aside is allowed."""
    calibration = hashed(random_calibration(0, sequences=8), [0, 1, 2, 3, 1, 9, 9, 0])
    fitted, aside, dropped = split(calibration, 4)
    assert fitted.token_hashes == tuple(f"hash {name}" for name in (0, 1, 2, 3))
    assert aside.prompt_ids == (calibration.prompt_ids[5], calibration.prompt_ids[6])
    assert dropped == 2


@looped("last, hashes", [(4, [0, 1, 2, 3]), (9, [0, 1, 2, 3]), (2, [0, 1, 1, 0])])
def test_split_that_leaves_nothing_is_one_error(last: int, hashes: list[int]) -> None:
    """Nothing to fit, more than there is, or only texts that were fitted: E303."""
    calibration = hashed(random_calibration(0, sequences=4), hashes)
    with pytest.raises(TreeoptError) as caught:
        split(calibration, last)
    assert caught.value.code is Code.PROMPTS_EMPTY


@looped("seed", range(3))
def test_judged_figures_are_plain_replay(seed: int) -> None:
    """Tokens per step of the tree and of the Medusa tree of the same texts, with their paired difference."""
    calibration = hashed(random_calibration(seed, sequences=40))
    fitted, aside, dropped = split(calibration, 15)
    tree = build_tree(fitted, 24, top_k=8, max_depth=3, weights="uniform")
    limits = tree_limits(fitted, 24, top_k=8, max_depth=3)
    found = judge(tree, fitted, aside, dropped, limits)
    medusa = build_tree(fitted, 24, top_k=8, max_depth=3, values="independent", weights="uniform")
    own, other = replay(tree, aside), replay(medusa, aside)
    assert (found.texts, found.dropped) == (15, 0)
    assert found.tokens_per_step == own.tokens_per_step
    assert found.medusa_tokens_per_step == other.tokens_per_step
    tokens, steps = np.diff(aside.offsets), own.steps_by_sequence()
    assert found.interval == sampling_interval(tokens, steps)
    assert found.gain == difference_interval(tokens, steps, other.steps_by_sequence())
    assert found.interval.low <= found.tokens_per_step <= found.interval.high


def test_texts_set_aside_do_not_reach_the_tree() -> None:
    """Other texts in the last half give another judgement of the very same tree."""
    first, second = (hashed(random_calibration(seed, sequences=20)) for seed in (1, 2))
    fitted, aside, _ = split(first, 10)
    _, strange, _ = split(second, 10)
    tree, limits = build_tree(fitted, 16), tree_limits(fitted, 16)
    found = [judge(tree, fitted, texts, 0, limits) for texts in (aside, strange)]
    assert found[0].tokens_per_step != found[1].tokens_per_step
    assert build_tree(split(first, 10)[0], 16) == tree
