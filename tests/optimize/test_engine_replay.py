"""Replay of engines' own drafts, against a simulation of each engine that walks the texts step by step."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest
from eagle_simulation import MadeUpDrafter, accepted, chosen_tree, engine_steps, traces_of
from helpers import make_calibration, random_calibration

from treeopt.calibration import NONE, Calibration
from treeopt.errors import Code, TreeoptError
from treeopt.latency import LatencyPoint, LatencyProfile
from treeopt.optimize.engine_choice import best_shape, best_stopped_chain, most_nodes, tree_of
from treeopt.optimize.engine_replay import (
    DynamicTree,
    mean_dynamic_tree,
    replay_chain,
    replay_dynamic_tree,
    replay_mean_tree,
    replay_stopped_chain,
)

LEVELS, WIDTH = 4, 5
EXACT = [
    (4, 5, 6),
    (4, 4, 5),
    (4, 5, 4),
    (4, 3, 4),
    (4, 2, 3),
    (4, 1, 5),
    (4, 1, 3),
    (2, 1, 3),
    (1, 1, 2),
    (1, 4, 5),
    (1, 5, 3),
]
BOUNDED = [(2, 2, 4), (3, 2, 6), (4, 2, 8), (4, 4, 8), (4, 4, 16), (4, 5, 32), (3, 4, 8), (2, 4, 8), (4, 3, 16)]


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


@pytest.mark.parametrize("shape", EXACT)
def test_dynamic_tree_is_replayed_exactly(shape: tuple[int, int, int]) -> None:
    """Where the shape says so, every position accepts what the engine accepts, and the steps are the engine's."""
    tree = DynamicTree(*shape)
    assert tree.replays_exactly(LEVELS)
    everywhere, steps = simulated(shape)
    for bound in ("likely", "least"):
        replay = replay_dynamic_tree(traces(), tree, bound=bound)
        assert replay.accepted.tolist() == everywhere
        assert replay.steps_by_sequence().tolist() == steps


@pytest.mark.parametrize("shape", BOUNDED)
def test_dynamic_tree_is_bounded(shape: tuple[int, int, int]) -> None:
    """Elsewhere each position accepts at least the lower bound and at most the upper one; the likely one is closer."""
    tree = DynamicTree(*shape)
    assert not tree.replays_exactly(LEVELS)
    everywhere = np.array(simulated(shape)[0])
    least = replay_dynamic_tree(traces(), tree, bound="least").accepted
    likely = replay_dynamic_tree(traces(), tree).accepted
    most = replay_dynamic_tree(traces(), tree, bound="most").accepted
    assert (least <= everywhere).all()
    assert (everywhere <= most).all()
    assert (least <= likely).all()
    assert (likely <= most).all()
    assert (least == everywhere).mean() > 0.6
    assert (likely == everywhere).mean() > 0.75


@pytest.mark.parametrize("nodes", [2, 4, 6, 8, 12])
def test_chosen_numbers_agree_with_the_engine(nodes: int) -> None:
    """With the numbers that treeopt chooses, the engine's tokens per step are within 3 % of the replay, or equal."""
    choice = tree_of(traces(), nodes)
    assert choice.shape is not None
    assert choice.replay is not None
    shape = (choice.shape.steps, choice.shape.top_k, choice.shape.nodes)
    engine = traces().positions / sum(simulated(shape)[1])
    tolerance = 1e-12 if choice.shape.replays_exactly(LEVELS) else 0.03
    assert choice.replay.tokens_per_step == pytest.approx(engine, rel=tolerance)
    assert choice.shape.nodes == nodes


def test_limit_of_tensorrt_is_kept_where_it_is_set() -> None:
    """With `narrow`, a tree has at most steps * top_k drafts, and is refused beyond; without it there are more."""
    most = most_nodes(traces(), narrow=True)
    assert most == 1 + LEVELS * WIDTH
    assert best_shape(traces(), most, narrow=True)[0].nodes == most
    assert best_shape(traces(), most + 1)[0].nodes == most + 1
    with pytest.raises(TreeoptError) as caught:
        best_shape(traces(), most + 1, narrow=True)
    assert caught.value.code is Code.TREE_INVALID


def test_stopped_chain_of_all_lengths_is_the_longest_where_drafts_are_free() -> None:
    """Where every step takes one second and every draft is right, the chain is as long as the profile allows."""
    right = dataclasses.replace(traces(), ranks=np.where(traces().ranks == NONE, NONE, 0).astype(np.uint8))
    points = [LatencyPoint(nodes, 1, 64, 1.0, 1.0, 1.0) for nodes in (1, LEVELS + 1)]
    found = best_stopped_chain(right, LatencyProfile.from_points(points, {}))
    assert found.budget.nodes == LEVELS + 1
    assert best_shape(dataclasses.replace(right, steps=None), 3)[0] == DynamicTree(2, 1, 3)  # the fewest candidates
    assert found.budget.seconds == 1.0


@pytest.mark.parametrize("numbers", [(0, 2, 3), (2, 0, 3), (2, 2, 1), (1, 2, 4), (2, 1, 4), (2, 2, 8)])
def test_impossible_numbers_are_refused(numbers: tuple[int, int, int]) -> None:
    """There must be a level, a candidate and a draft, and as many candidates as drafts."""
    with pytest.raises(ValueError, match="DynamicTree"):
        DynamicTree(*numbers)


def test_all_candidates_may_be_nodes() -> None:
    """The limit itself is allowed: top_k of level 1 and top_k squared of each further one."""
    assert DynamicTree(2, 2, 7).nodes == 7


def test_per_step_traces_are_needed() -> None:
    """Without them a dynamic tree is not replayed."""
    with pytest.raises(TreeoptError) as caught:
        replay_dynamic_tree(random_calibration(1), DynamicTree(2, 2, 4))
    assert caught.value.code is Code.CALIBRATION_INVALID


def naive_steps(calibration: Calibration, drafts: int, least: float = 0.0) -> tuple[int, int, int]:
    """Steps of a chain, its accepted drafts and its drafts, position by position."""
    steps = taken = made = 0
    for s in range(calibration.sequences):
        at, end = int(calibration.offsets[s]), int(calibration.offsets[s + 1])
        while at < end:
            right, drafted, known = 0, 0, True
            for level in range(drafts):
                sure = calibration.steps is None or calibration.steps.confidence[at, level] >= least
                if known and not sure:
                    break
                drafted += 1
                known = known and calibration.ranks[at, level] == 0
                right += known
            steps, taken, made, at = steps + 1, taken + right, made + drafted, at + 1 + right
    return steps, taken, made


@pytest.mark.parametrize("drafts", [0, 1, 2, 4])
def test_chain_is_walked(drafts: int) -> None:
    """A chain accepts the leading levels whose first candidate is right."""
    calibration = random_calibration(3)
    replay = replay_chain(calibration, drafts)
    steps, taken, _ = naive_steps(calibration, drafts)
    assert (replay.steps, int(replay.accepted[replay.visited].sum())) == (steps, taken)
    assert steps + taken == calibration.positions


@pytest.mark.parametrize("least", [0.0, 0.3, 0.5, 0.8, 1.0])
@pytest.mark.parametrize("drafts", [1, 3, 4])
def test_stopped_chain_is_walked(drafts: int, least: float) -> None:
    """A chain ends before the first improbable draft; after a wrong draft it counts as long as it can be."""
    replay, drafted = replay_stopped_chain(traces(), drafts, least)
    steps, taken, made = naive_steps(traces(), drafts, least)
    assert (replay.steps, int(replay.accepted[replay.visited].sum())) == (steps, taken)
    assert int(drafted[replay.visited].sum()) == made
    assert (drafted >= replay.accepted).all()


def brute_mean_tree(calibration: Calibration, steps: int, top_k: int, nodes: int) -> set[tuple[int, ...]]:
    """EAGLE-2's rule on one table of probabilities for each level, written out."""
    chances = [[float(one) for one in row[:top_k]] for row in calibration.accuracy[:steps]]
    beam, pool = [((), 1.0)], {}
    for row in chances:
        reached = {(*path, rank): value * chance for path, value in beam for rank, chance in enumerate(row)}
        pool |= reached
        beam = sorted(reached.items(), key=lambda one: (-one[1], one[0]))[:top_k]
    return set(sorted(pool, key=lambda path: (-pool[path], len(path), path))[: nodes - 1])


@pytest.mark.parametrize("shape", [(1, 3, 4), (2, 2, 4), (3, 2, 8), (4, 4, 16), (4, 8, 48), (4, 1, 5)])
def test_mean_tree_follows_the_rule(shape: tuple[int, int, int]) -> None:
    """Without per-step traces the tree is EAGLE-2's for the mean probabilities, and its replay that of its paths."""
    calibration = random_calibration(7)
    tree = mean_dynamic_tree(calibration, DynamicTree(*shape))
    assert set(tree.paths) == brute_mean_tree(calibration, *shape)
    replay = replay_mean_tree(calibration, DynamicTree(*shape))
    paths = {(), *tree.paths}
    for row, found in zip(calibration.ranks.tolist(), replay.accepted.tolist(), strict=True):
        assert found == max(length for length in range(len(row) + 1) if tuple(row[:length]) in paths)


def test_last_texts_end_inside_the_text() -> None:
    """No draft is accepted past the end of a text, by any engine."""
    short = make_calibration([np.zeros((1, 2), int), np.zeros((2, 2), int)])
    assert replay_chain(short, 2).accepted.tolist() == [0, 1, 0]
    made = dataclasses.replace(traces())
    for shape in EXACT:
        accepted_drafts = replay_dynamic_tree(made, DynamicTree(*shape)).accepted
        assert not accepted_drafts[made.offsets[1:] - 1].any()
