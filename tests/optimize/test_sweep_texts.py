"""How many prompts a calibration needs: hand-made splits, naive replay, and the sentences of the command."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from naive_steps import naive_medusa, naive_sums, tau, uneven

from treeopt.calibration import Calibration
from treeopt.errors import Code, TreeoptError
from treeopt.optimize import sweep_texts as module
from treeopt.optimize.intervals import Interval, ratio_interval
from treeopt.optimize.methods import MEDUSA, Method
from treeopt.optimize.select_method import Fitter
from treeopt.optimize.sweep_texts import TextsPoint, TextsSweep, judged_and_fitted, sweep_texts, text_counts
from treeopt.optimize.tree_builder import tree_limits

TOP_K, NODES = 3, 8


def texts_of(seed: int = 1, sequences: int = 28) -> Calibration:
    """Different texts with three levels."""
    return uneven(seed, sequences)


def hand_made(order: list[int], count: int) -> list[tuple[list[int], list[int]]]:
    """Judged and fitted texts of each fifth: every fifth text of the order, and the first `count` of the others."""
    return [
        (sorted(order[part::5]), sorted([s for i, s in enumerate(order) if i % 5 != part][:count])) for part in range(5)
    ]


@pytest.mark.parametrize(
    ("largest", "counts"),
    [
        (10, [10]),
        (12, [10, 12]),
        (24, [10, 24]),
        (25, [10, 20, 25]),
        (204, [10, 20, 50, 100, 204]),
        (250, [10, 20, 50, 100, 200, 250]),
        (1500, [10, 20, 50, 100, 200, 500, 1000, 1500]),
    ],
)
def test_text_counts_end_with_all(largest: int, counts: list[int]) -> None:
    """10, 20, 50 and so on up to all; numbers above 80 % of all are left out."""
    assert text_counts(largest) == counts


def test_judged_and_fitted_are_disjoint() -> None:
    """Typed by hand: seven texts in this order, two of which are fitted for each fifth."""
    found = judged_and_fitted(np.array([4, 2, 0, 1, 3, 5, 6]), 2)
    texts = [(np.flatnonzero(judged).tolist(), np.flatnonzero(fitted).tolist()) for judged, fitted in found]
    assert texts == [([4, 5], [0, 2]), ([2, 6], [0, 4]), ([0], [2, 4]), ([1], [2, 4]), ([3], [2, 4])]


@pytest.mark.parametrize("seed", [0, 3])
def test_medusa_curve_is_a_hand_made_split(seed: int) -> None:
    """Trees by brute force from n prompts, replayed by a naive loop on the texts left out, in every draw."""
    calibration = texts_of()
    found = sweep_texts(calibration, nodes=NODES, draws=2, top_k=TOP_K, seed=seed)
    points = [point for point in found.points if point.method == str(MEDUSA)]
    assert [point.texts for point in points] == [10, 22]
    assert (found.texts, found.fitted, found.draws, found.nodes) == (28, 22, 2, NODES)
    rng = np.random.default_rng(seed)
    orders = [rng.permutation(28).tolist() for _ in range(2)]
    steps: dict[int, list[list[int]]] = {10: [], 22: []}
    for count, order in ((count, order) for count in steps for order in orders):
        of_text = [0] * 28
        for judged, fitted in hand_made(order, count):
            paths = naive_medusa(calibration, fitted, NODES, top_k=TOP_K)
            for s, (_, taken) in zip(judged, naive_sums(paths, calibration, judged), strict=True):
                of_text[s] = taken
        steps[count].append(of_text)
    lengths = np.diff(calibration.offsets)
    whole = 2 * lengths.sum() / np.sum(steps[22])
    for point in points:
        mine = 2 * lengths.sum() / np.sum(steps[point.texts])
        assert point.tokens_per_step == pytest.approx(mine, rel=1e-12)
        assert point.lost == pytest.approx(1 - mine / whole, abs=1e-12)
        losses = [1 - sum(all_) / sum(one) for one, all_ in zip(steps[point.texts], steps[22], strict=True)]
        assert point.worst == pytest.approx(max(losses), abs=1e-12)
        both = np.stack([lengths, lengths])
        ratio = ratio_interval(both, np.array(steps[point.texts]), both, np.array(steps[22]))
        assert (point.interval.low, point.interval.high) == (1 - ratio.high, 1 - ratio.low)
    assert (points[1].lost, points[1].worst) == (0.0, 0.0)
    assert points[0].lost > 0


def test_joint_trees_are_those_of_a_smaller_calibration(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tree from n prompts is exactly what a calibration of these n prompts alone gives."""
    joint = Method("joint", "visits", 64.0)
    monkeypatch.setattr(module, "candidates", lambda *_, **__: [joint])
    calibration = texts_of(2, 15)
    found = sweep_texts(calibration, nodes=NODES, draws=1, top_k=TOP_K, seed=4)
    limits = tree_limits(calibration, NODES, top_k=TOP_K)
    for point in (one for one in found.points if one.method == str(joint)):
        sums = []
        for judged, fitted in hand_made(np.random.default_rng(4).permutation(15).tolist(), point.texts):
            [(_, tree)] = Fitter(calibration.select(fitted), limits).build([joint])
            sums += naive_sums(tree.paths, calibration, judged)
        assert point.tokens_per_step == tau(sums)


def test_equal_texts_count_once() -> None:
    """Copies of a text are neither judged nor fitted twice."""
    calibration = texts_of(1, 15)
    names = (*calibration.token_hashes, *calibration.token_hashes[:5])
    doubled = dataclasses.replace(
        calibration,
        ranks=np.concatenate([calibration.ranks, calibration.ranks[: calibration.offsets[5]]]),
        offsets=np.concatenate([calibration.offsets, calibration.offsets[-1] + calibration.offsets[1:6]]),
        prompt_ids=tuple(f"set:{s:08}" for s in range(20)),
        token_hashes=names,
    )
    options = {"nodes": NODES, "draws": 2, "top_k": TOP_K}
    assert sweep_texts(doubled, **options).points == sweep_texts(calibration, **options).points


def test_same_seed_gives_the_same_draws() -> None:
    """Equal seeds give equal points, another seed other ones."""
    seen: list[tuple[int, int]] = []
    report = {"progress": lambda done, total, _note: seen.append((done, total))}
    options = {"nodes": NODES, "draws": 1, "top_k": TOP_K, **report}
    first, again, other = (sweep_texts(texts_of(), seed=seed, **options).points for seed in (1, 1, 2))
    assert first == again != other
    assert seen == [(1, 2), (2, 2)] * 3  # trees from 10 and 22 of 28 texts


def point_of(texts: int, high: float | None) -> TextsPoint:
    """A point whose interval ends here."""
    return TextsPoint("m", texts, 2.0, 0.0, None if high is None else Interval(-1.0, high), 0.0)


@pytest.mark.parametrize(
    ("highs", "enough"),
    [
        ({10: 0.02, 20: 0.009, 50: 0.001, 99: 0.0}, 20),
        ({10: 0.009, 20: 0.02, 50: 0.001, 99: 0.0}, 50),
        ({10: 0.02, 20: 0.02, 50: 0.01, 99: 0.0}, None),
        ({10: 0.001, 20: 0.001, 50: 0.001, 99: 0.0}, 10),
        ({10: None, 20: None, 50: None, 99: None}, None),
    ],
)
def test_enough_is_sure_from_there_on(highs: dict[int, float | None], enough: int | None) -> None:
    """The interval ends below 1 % there and at every greater number; all texts are no answer."""
    points = tuple(point_of(texts, high) for texts, high in highs.items())
    found = TextsSweep(points, 8, 120, 99, 5).enough("m")
    assert (None if found is None else found.texts) == enough


def test_fewer_than_ten_prompts_are_one_error() -> None:
    """Of twelve texts nine would be left to fit: E303; thirteen are enough."""
    with pytest.raises(TreeoptError, match="12 different texts") as caught:
        sweep_texts(texts_of(1, 12), nodes=NODES, top_k=TOP_K)
    assert caught.value.code is Code.PROMPTS_EMPTY
    assert sweep_texts(texts_of(1, 13), nodes=NODES, draws=1, top_k=TOP_K).fitted == 10
    with pytest.raises(TreeoptError) as caught:
        sweep_texts(texts_of(), nodes=60, top_k=TOP_K)
    assert caught.value.code is Code.RANK_TOO_LARGE


@pytest.mark.parametrize("wrong", [{"nodes": 0}, {"draws": 0}, {"seed": -1}])
def test_numbers_out_of_range_are_refused(wrong: dict[str, int]) -> None:
    """Before any tree is grown."""
    with pytest.raises(ValueError, match=next(iter(wrong))):
        sweep_texts(texts_of(), **{"nodes": NODES, "top_k": TOP_K, **wrong})
