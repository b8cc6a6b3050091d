"""Mixtures: several tasks, what the tree of each does on the others, and one tree for all."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import pytest
from helpers import make_calibration
from looped import looped
from refusals import refusal_of

from treeopt.calibration import Calibration
from treeopt.errors import Code
from treeopt.optimize.mixtures import Mixed, Tasks
from treeopt.optimize.replay import replay
from treeopt.optimize.select_method import MEDUSA, Fitter, Limits, candidates
from treeopt.optimize.tree_builder import build_tree

LIMITS = Limits(10, 12)
PAPER_ALONE = {"values": "independent", "weights": "uniform"}


def task(seed: int, best: Sequence[int], *, texts: int = 24, length: int = 40) -> Calibration:
    """Texts where each head is mostly right with one rank of its own, else with a random one."""
    rng = np.random.default_rng(seed)
    noise = rng.integers(0, 12, (texts, length, len(best)))
    right = rng.random((texts, length, 1)) < 0.6
    return make_calibration(list(np.where(right, np.array(best), noise)))


ONE, TWO, THREE = task(1, [0, 0, 0]), task(2, [4, 5, 6]), task(3, [0, 1, 1], texts=8)


def worst(mixed: Mixed, tasks: Tasks) -> float:
    """What the worst task keeps of its own tree's tokens per step."""
    trees = [fit.tree for fit in tasks.alone]
    own = [replay(tree, c).tokens_per_step for tree, c in zip(trees, tasks.calibrations, strict=True)]
    return float((mixed.tokens_per_step / own).min())


def test_matrix_is_replay_with_a_cross_validated_diagonal() -> None:
    """Each task's tree on each task; on its own task by trees that left the text out."""
    calibrations = (ONE, TWO, THREE)
    tasks = Tasks(calibrations, LIMITS, candidates("joint", "visits"))
    matrix = tasks.matrix
    assert matrix.shape == (3, 3)
    for i, own in enumerate(calibrations):
        fit = Fitter(own, LIMITS).choose(candidates("joint", "visits"))
        assert tasks.alone[i].tree == fit.tree
        assert fit.sums is not None
        for j, other in enumerate(calibrations):
            wanted = own.positions / fit.sums.steps.sum() if i == j else replay(fit.tree, other).tokens_per_step
            assert matrix[i, j] == pytest.approx(wanted)
    assert (matrix.argmax(axis=0) == [0, 1, 2]).all()  # at home each tree is the best


@looped("home", [0, 1])
def test_all_weight_on_one_task_gives_its_tree(home: int) -> None:
    """What weighs a millionth decides nothing: the mixture's paths are those of the one task's Medusa tree."""
    shares = [1e-9, 1e-9]
    shares[home] = 1.0
    mixed = Tasks([ONE, TWO], LIMITS, candidates("independent", "uniform")).weighted(shares)
    alone = build_tree([ONE, TWO][home], 10, top_k=12, values="independent", weights="uniform")
    assert mixed.fit.tree.paths == alone.paths
    assert mixed.shares[home] == pytest.approx(1.0)


def test_shares_are_of_tokens() -> None:
    """Each task's tokens weigh its share, however many texts it has: accuracies are mixed by the shares."""
    tasks = Tasks([ONE, THREE], LIMITS, candidates("independent", "uniform"))
    mixed = tasks.weighted([3, 1])
    np.testing.assert_allclose(mixed.shares, [0.75, 0.25])
    hits = [c.hits[0] / c.positions for c in (ONE, THREE)]
    trials = [c.trials[0] / c.positions for c in (ONE, THREE)]
    accuracy = (0.75 * hits[0] + 0.25 * hits[1]) / (0.75 * trials[0] + 0.25 * trials[1])
    tree = mixed.fit.tree
    assert tree.values is not None
    values = dict(zip(tree.paths, tree.values, strict=True))
    assert values[0,] == pytest.approx(accuracy[0], rel=1e-5)
    assert tree == tasks.weighted([0.75, 0.25]).fit.tree
    found = [replay(tree, c).tokens_per_step for c in (ONE, THREE)]
    np.testing.assert_allclose(mixed.tokens_per_step, found)


@looped("nodes", [3, 10])
@looped("tasks", [(ONE, TWO), (ONE, TWO, THREE), (ONE, ONE), (task(7, [0, 0, 0]), THREE, TWO)])
def test_robust_is_twelve_naive_rounds(tasks: tuple[Calibration, ...], nodes: int) -> None:
    """Shares are those of the first round with the best worst task; each round multiplies them by exp(8 * the loss)."""
    own = [replay(build_tree(c, nodes, top_k=12, **PAPER_ALONE), c).tokens_per_step for c in tasks]
    limits = Limits(nodes, 12)
    shares, rounds = [1.0 / len(tasks)] * len(tasks), []
    for _ in range(12):
        tree = Tasks(tasks, limits, [MEDUSA]).weighted(shares).fit.tree
        kept = [replay(tree, c).tokens_per_step / best for c, best in zip(tasks, own, strict=True)]
        rounds.append((min(kept), shares))
        moved = [share * math.exp(8.0 * (1.0 - each)) for share, each in zip(shares, kept, strict=True)]
        shares = [share / sum(moved) for share in moved]
    most = max(worst for worst, _ in rounds)
    wanted = next(shares for worst, shares in rounds if worst == most)
    told: list[tuple[int, int]] = []
    found = Tasks(tasks, limits, [MEDUSA], progress=lambda done, total, _: told.append((done, total))).robust()
    assert {(done, 12) for done in range(1, 13)} <= set(told)
    np.testing.assert_allclose(found.shares, wanted, rtol=1e-9)
    assert min(tau / best for tau, best in zip(found.tokens_per_step, own, strict=True)) == pytest.approx(most)


@looped("change", ["heads_id", "model_id", "drafter_id", "num_heads", "top_k"])
def test_different_heads_are_refused(change: str) -> None:
    """Ranks of other heads, models, drafters or lengths mean something else: E221, with what differs in its place."""
    if change == "num_heads":
        other = task(5, [0, 0])
    elif change == "top_k":
        other = dataclasses.replace(TWO, top_k=17)
    else:
        other = dataclasses.replace(TWO, provenance=dataclasses.replace(TWO.provenance, **{change: "other"}))
    error = refusal_of(Tasks, [ONE, other], LIMITS, candidates("joint", "visits"))
    assert error.code is Code.CALIBRATION_MISMATCH
    names = {"num_heads": "levels", "top_k": "ranks"}
    assert [line.partition(":")[0] for line in error.at.splitlines()] == [names.get(change, change)]


def test_tasks_may_have_other_settings() -> None:
    """Answers of another length or kind are what makes a task another one."""
    other = dataclasses.replace(TWO, provenance=dataclasses.replace(TWO.provenance, settings={"max_new_tokens": 9}))
    assert Tasks([ONE, other], LIMITS, candidates("joint", "visits")).joined.sequences == 48


@looped(
    "shares, wanted",
    [
        ([1e308, 1e308], [0.5, 0.5]),
        ([1.7e308, 5e-324], [1.0, 0.0]),
        ([5e-324, 5e-324], [0.5, 0.5]),
        ([1e-320, 3e-320], [0.25, 0.75]),
        ([1e-320, 1.0], [1e-320, 1.0]),
        ([3, 1], [0.75, 0.25]),
    ],
)
def test_shares_of_any_magnitude_are_normalised(shares: list[float], wanted: list[float]) -> None:
    """Shares near the ends of the range of numbers neither overflow nor vanish; only their ratio counts."""
    mixed = Tasks([ONE, TWO], LIMITS, candidates("joint", "visits")).weighted(shares)
    np.testing.assert_allclose(mixed.shares, wanted, rtol=1e-3, atol=0)
    assert np.isfinite(mixed.tokens_per_step).all()


def test_weights_count_as_much_as_they_tell() -> None:
    """Weights of tokens are in the ratio of the shares, and add up to Kish's effective number of tokens."""
    fitter = Tasks([ONE, THREE], LIMITS, [MEDUSA]).weighted([1, 3]).fitter
    tokens = [ONE.positions, THREE.positions]
    one, other = np.unique(fitter.text_weights)
    assert 3 * one * tokens[0] == pytest.approx(other * tokens[1])
    per_token = [0.25 / tokens[0], 0.75 / tokens[1]]
    effective = 1.0 / sum(weight**2 * count for weight, count in zip(per_token, tokens, strict=True))
    assert one * tokens[0] + other * tokens[1] == pytest.approx(effective)
    assert effective < sum(tokens)


@looped("share", [0.0, -1.0, np.nan, np.inf])
def test_shares_that_are_no_positive_numbers_are_refused(share: float) -> None:
    """Nothing else can be a share."""
    with pytest.raises(ValueError, match="positive"):
        Tasks([ONE, TWO], LIMITS, candidates("independent", "uniform")).weighted([1.0, share])


def test_same_prompts_in_two_tasks_are_two_texts() -> None:
    """Tasks are told apart by their place, so prompts with the same ids, even the same file, may come twice."""
    tasks = Tasks([ONE, TWO, ONE], LIMITS, candidates("independent", "uniform"))
    assert tasks.joined.sequences == 3 * 24
    assert tasks.task.tolist() == [0] * 24 + [1] * 24 + [2] * 24
    assert len(set(tasks.joined.prompt_ids)) == 3 * 24
    assert np.array_equal(tasks.joined.ranks[: ONE.positions], ONE.ranks)
    mixed = tasks.weighted([1, 1, 1])
    assert mixed.tokens_per_step[0] == mixed.tokens_per_step[2]


def test_many_tasks_keep_their_order() -> None:
    """A dozen tasks: ids stay ascending, as the record demands."""
    tasks = Tasks([THREE] * 12, LIMITS, candidates("independent", "uniform"))
    assert tasks.joined.sequences == 96
