"""Chains and engines' dynamic trees, against simulations of each engine; the formulas against simulated acceptance."""

from __future__ import annotations

import dataclasses
import functools
import random

import numpy as np
import pytest
from eagle_simulation import MadeUpDrafter, accepted, chosen_tree, engine_steps, traces_of
from helpers import make_calibration, random_calibration
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refusal_of

from treeopt.calibration import Calibration
from treeopt.errors import Code
from treeopt.optimize.budget import LEAST_GAIN
from treeopt.optimize.chains import (
    MOST_DRAFTS,
    DynamicTree,
    best_shape,
    chain_tokens,
    choose_dynamic_tree,
    expected_tokens,
    predict_chains,
    replay_chain,
    replay_dynamic_tree,
    sampled_acceptance,
)
from treeopt.optimize.replay import replay
from treeopt.traces import NONE
from treeopt.tree import Tree

LEVELS, WIDTH = 4, 5
EXACT = [
    *[(4, 5, 6), (4, 4, 5), (4, 5, 4), (4, 3, 4), (4, 2, 3), (4, 1, 5), (4, 1, 3)],
    *[(2, 1, 3), (1, 1, 2), (1, 4, 5), (1, 5, 3)],
]
ESTIMATED = [(2, 2, 4), (3, 2, 6), (4, 2, 8), (4, 4, 8), (4, 4, 16), (4, 5, 32), (3, 4, 8), (2, 4, 8), (4, 3, 16)]


@functools.cache
def texts() -> tuple[MadeUpDrafter, ...]:
    return tuple(MadeUpDrafter(seed, 40, LEVELS, WIDTH) for seed in range(5))


@functools.cache
def traces() -> Calibration:
    return traces_of(list(texts()))


def simulated(shape: tuple[int, int, int]) -> tuple[list[int], list[int]]:
    """The accepted drafts at every position, and the number of steps of each text."""
    everywhere = [
        accepted(text, position, chosen_tree(text, position, *shape))
        for text in texts()
        for position in range(text.length)
    ]
    return everywhere, [len(engine_steps(text, *shape)) for text in texts()]


def test_dynamic_tree_is_replayed_exactly() -> None:
    """Where the shape says so, every position accepts what the engine accepts, and the steps are the engine's."""
    for shape in EXACT:
        tree = DynamicTree(*shape)
        assert tree.replays_exactly(LEVELS)
        everywhere, steps = simulated(shape)
        found = replay_dynamic_tree(traces(), tree)
        assert found.accepted.tolist() == everywhere
        assert found.sums.steps.tolist() == steps
        assert not found.accepted[found.offsets[1:] - 1].any()  # no draft is accepted past the end of a text


def test_dynamic_tree_is_estimated() -> None:
    """Elsewhere most positions accept what the engine accepts."""
    for shape in ESTIMATED:
        tree = DynamicTree(*shape)
        assert not tree.replays_exactly(LEVELS)
        assert (replay_dynamic_tree(traces(), tree).accepted == np.array(simulated(shape)[0])).mean() > 0.75


def test_chosen_numbers_agree_with_the_engine() -> None:
    """With the numbers that treeopt chooses, the engine's tokens per step are within 3 % of the replay, or equal."""
    for nodes in (2, 4, 6, 8, 12):
        choice = choose_dynamic_tree(traces(), None, nodes)
        assert choice.shape is not None
        assert choice.replay is not None
        shape = (choice.shape.steps, choice.shape.top_k, choice.shape.nodes)
        engine = traces().positions / sum(simulated(shape)[1])
        tolerance = 1e-12 if choice.shape.replays_exactly(LEVELS) else 0.03
        assert choice.replay.tokens_per_step == pytest.approx(engine, rel=tolerance)
        assert choice.shape.nodes == nodes


def test_the_fewest_candidates_are_chosen() -> None:
    """Where every draft is right, the narrowest expansion is as good as any."""
    right = dataclasses.replace(traces(), ranks=np.where(traces().ranks == NONE, NONE, 0).astype(np.uint8))
    assert best_shape(right, 3)[0] == DynamicTree(2, 1, 3)


def test_impossible_numbers_are_refused() -> None:
    """There must be a level, a candidate and a draft, and as many candidates as drafts; the limit itself is allowed."""
    for numbers in ((0, 2, 3), (2, 0, 3), (2, 2, 1), (1, 2, 4), (2, 1, 4), (2, 2, 8)):
        with pytest.raises(ValueError, match="DynamicTree"):
            DynamicTree(*numbers)
    assert DynamicTree(2, 2, 7).nodes == 7  # top_k of level 1 and top_k squared of each further one


def test_per_step_traces_are_needed() -> None:
    """Without them a dynamic tree is not replayed."""
    for call in (
        lambda: replay_dynamic_tree(random_calibration(1), DynamicTree(2, 2, 4)),
        lambda: choose_dynamic_tree(random_calibration(1), None, 4),
    ):
        assert refusal_of(call).code is Code.CALIBRATION_INVALID


def naive_steps(calibration: Calibration, drafts: int) -> tuple[int, int]:
    """Steps of a chain and its accepted drafts, position by position."""
    steps = taken = 0
    for s in range(calibration.sequences):
        at, end = int(calibration.offsets[s]), int(calibration.offsets[s + 1])
        while at < end:
            right = 0
            while right < drafts and calibration.ranks[at, right] == 0:
                right += 1
            steps, taken, at = steps + 1, taken + right, at + 1 + right
    return steps, taken


def test_chain_is_walked() -> None:
    """A chain accepts the leading levels whose first candidate is right; its tokens per step are those of a tree."""
    calibration = random_calibration(3)
    for drafts in range(5):
        found = replay_chain(calibration, drafts)
        steps, taken = naive_steps(calibration, drafts)
        assert (found.steps, int(found.accepted[found.visited].sum())) == (steps, taken)
        assert steps + taken == calibration.positions
        chain = replay(Tree.chain(drafts), calibration)
        assert chain_tokens(calibration)[drafts] == found.tokens_per_step == chain.tokens_per_step
    short = make_calibration([np.zeros((1, 2), int), np.zeros((2, 2), int)])
    assert replay_chain(short, 2).accepted.tolist() == [0, 1, 0]  # the last text ends inside


def test_expected_tokens_are_those_of_simulated_steps() -> None:
    """A step accepts drafts until one is wrong, then takes one token of the target."""
    for alpha in (0.0, 0.3, 0.75, 1.0):
        for drafts in (0, 1, 4):
            chance, steps, tokens = random.Random(1), 20_000, 0
            for _ in range(steps):
                right = 0
                while right < drafts and chance.random() < alpha:
                    right += 1
                tokens += right + 1
            assert expected_tokens(alpha, drafts) == pytest.approx(tokens / steps, rel=0.02)


@given(st.floats(0.0, 0.999), st.integers(0, 40))
def test_expected_tokens_are_the_closed_form(alpha: float, drafts: int) -> None:
    """The sum is (1 - alpha^(g+1)) / (1 - alpha); where nearly all drafts are accepted, nearly their number and one."""
    assert expected_tokens(alpha, drafts) == pytest.approx((1 - alpha ** (drafts + 1)) / (1 - alpha))
    assert expected_tokens(1 - 1e-16, 9) == pytest.approx(10.0)


@settings(deadline=None, max_examples=50)
@given(st.floats(0.0, 2.0), st.integers(0, 20))
def test_best_drafts_is_the_fastest_chain(cost: float, seed: int) -> None:
    """Speedup is tokens per step / (g c + 1); the best length is the shortest with the greatest one, if that pays."""
    found = predict_chains(random_calibration(seed, sequences=3), cost)
    for chain in found.chains:
        assert chain.speedup == expected_tokens(found.alpha, chain.drafts) / (chain.drafts * cost + 1)
        if chain.replayed_tokens_per_step is not None:
            assert chain.replayed_speedup == chain.replayed_tokens_per_step / (chain.drafts * cost + 1)
    for best, name in ((found.best_drafts, "speedup"), (found.best_replayed_drafts, "replayed_speedup")):
        speedups = [getattr(one, name) for one in found.chains if getattr(one, name) is not None]
        assert best == (speedups.index(max(speedups)) + 1 if max(speedups) >= 1 + LEAST_GAIN else 0)


def test_drafts_at_the_ends() -> None:
    """Drafts that are free or always right are as many as there may be; a draft model as slow as its target is none."""
    right = make_calibration([np.zeros((50, 4), int)])
    assert predict_chains(right, 0.5).best_drafts == MOST_DRAFTS
    assert predict_chains(right, 0.5).best_replayed_drafts == 4
    assert predict_chains(right, 1.0).best_drafts == predict_chains(right, 1.0).best_replayed_drafts == 0


def test_sampled_acceptance_by_hand_and_by_rejection() -> None:
    """sum min(p, q) is the share of draws from q that rejection with min(1, p / q) accepts."""
    p, q = np.array([[0.5, 0.3, 0.2], [1.0, 0.0, 0.0]]), np.array([[0.2, 0.3, 0.5], [0.0, 0.5, 0.5]])
    assert sampled_acceptance(p[:1], q[:1]) == pytest.approx(0.7)
    assert sampled_acceptance(p, q) == pytest.approx(0.35)
    assert sampled_acceptance(p, p) == 1.0
    assert sampled_acceptance(p * 1.0005, p * 1.0005) == 1.0  # rows may be rounded
    chance = np.random.default_rng(0)
    drawn = chance.choice(3, size=40_000, p=q[0])
    kept = chance.random(40_000) < p[0, drawn] / q[0, drawn]
    assert kept.mean() == pytest.approx(sampled_acceptance(p[:1], q[:1]), abs=0.01)


def test_acceptance_rate_counts_positions_with_a_next_token() -> None:
    """Of two texts of 3 and 2 tokens three positions have a next token; two of these drafts are right."""
    table = [np.array([[0], [2], [0]]), np.array([[0], [0]])]
    assert predict_chains(make_calibration(table), 0.1).alpha == pytest.approx(2 / 3)
    assert predict_chains(make_calibration([np.zeros((1, 1), int)]), 0.1).alpha == 0.0  # one token: no draft
