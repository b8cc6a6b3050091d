"""The fit: known weights come back, evidence equals a naive loop, and calibration maps are valid for all inputs."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_scorer import Scorer
from looped import looped
from naive_draft import SOURCES, naive_mapped, random_case
from numpy.typing import NDArray

from treeopt.drafter import CACHE_LENGTHS, MAX_MATCH, Drafter, Level
from treeopt.drafting.fit import Evidence, evidence, fit_calibration_map, fit_level
from treeopt.drafting.interface import Features
from treeopt.drafting.kernel.data import CACHE, HEAD, NGRAM, PRIOR

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


def random_candidates(seed: int, positions: int, *, slots: int = 6, longest: int = 3) -> Features:
    """Features as a text might give them; now and then one is repeated, and often one is prompt_lookup."""
    rng = np.random.default_rng(seed)
    tokens = np.argsort(rng.random((positions, 30)), axis=1)[:, :slots]
    repeated = np.zeros(tokens.shape, np.bool_)
    repeated[:, -1] = rng.random(positions) < 0.3
    length = rng.integers(0, longest + 1, positions)
    found = np.minimum(rng.integers(0, len(CACHE_LENGTHS) + 1, positions), 3)  # longer ones do not occur
    tokens[repeated[:, -1], -1] = tokens[repeated[:, -1], 0]
    shape = (4, *tokens.shape)
    terms = rng.normal(
        np.array([-2.0, -4.0, 0.0, 0.0])[:, None, None], np.array([1.5, 1, 1.5, 1.5])[:, None, None], shape
    )
    terms[CACHE] *= found[:, None] > 0
    looked_up = (tokens == tokens[:, -1:]).argmax(1)
    return Features(tokens, terms.astype(np.float32), slots - repeated[:, -1], looked_up, length, found)


def repeated(found: Features) -> Bools:
    """Which are no candidates."""
    return np.arange(found.tokens.shape[1]) >= found.width[:, None]


def looked_up(found: Features) -> Bools:
    """Which followed the latest longest match, if there is one."""
    return np.arange(found.tokens.shape[1]) == found.looked_up[:, None]


def scores_of(found: Features, level: Level) -> Floats:
    """Each candidate's score, -inf for repeated ones, with other_logit in a last column."""
    weight = np.array([0.0, *level.prompt_lookup])[np.minimum(found.length, MAX_MATCH)]
    scores = level.head * found.terms[HEAD] + level.prior * found.terms[PRIOR] + level.ngram * found.terms[NGRAM]
    scores = scores + np.array([0.0, *level.cache])[found.found][:, None] * found.terms[CACHE]
    scores = np.where(repeated(found), -np.inf, scores + weight[:, None] * looked_up(found))
    return np.concatenate([scores, np.full((len(scores), 1), level.other_logit)], axis=1)


def drawn(seed: int, found: Features, level: Level) -> Ints:
    """True tokens drawn by the level's probabilities; a token that is no candidate for the other outcome."""
    scores = scores_of(found, level)
    noise = np.random.default_rng(seed).gumbel(size=scores.shape)
    tokens = np.concatenate([found.tokens, np.full((len(scores), 1), 99)], axis=1)
    return np.take_along_axis(tokens, (scores + noise).argmax(1)[:, None], 1)[:, 0]


KNOWN = Level(0.8, 0.3, 0.5, (1.0, 2.0, 3.0) + (0.0,) * (MAX_MATCH - 3), -2.5, (), (0.2, 0.9, 0.6, 0.0, 0.0, 0.0))


def test_known_numbers_come_back() -> None:
    """Of 40,000 drafts that the model itself would write, each number is found to within a few standard errors."""
    parts = []
    for seed in range(4):
        found = random_candidates(seed, 10_000)
        parts.append(evidence(found, drawn(seed + 100, found, KNOWN)))
    fit = fit_level(Evidence.joined(parts))
    level = fit.level
    assert (level.head, level.prior, level.ngram) == pytest.approx((0.8, 0.3, 0.5), abs=0.03)
    assert level.prompt_lookup[:3] == pytest.approx((1.0, 2.0, 3.0), abs=0.1)
    assert level.prompt_lookup[3:] == (0.0,) * (MAX_MATCH - 3)
    assert level.cache == (*(pytest.approx(weight, abs=0.05) for weight in KNOWN.cache[:3]), 0.0, 0.0, 0.0)
    assert level.other_logit == pytest.approx(-2.5, abs=0.12)
    likely = [pair for pair in level.calibration_map if pair[0] > -6]  # rarer ones were hit a few times only
    assert len(likely) > 20
    for estimated, observed in likely:
        assert observed == pytest.approx(estimated, abs=0.5)


def test_terms_that_bring_nothing_are_left_out() -> None:
    """Weights of terms that the true tokens do not follow are 0, not small; those of the others are found."""
    found = random_candidates(3, 10_000)
    followed = replace(KNOWN, ngram=0.0, prompt_lookup=(0.0,) * MAX_MATCH)
    level = fit_level(evidence(found, drawn(4, found, followed))).level
    assert (level.ngram, level.prompt_lookup) == (0.0, followed.prompt_lookup)
    assert (level.head, level.prior) == pytest.approx((0.8, 0.3), abs=0.05)
    assert level.cache[:3] == pytest.approx((0.2, 0.9, 0.6), abs=0.1)


def test_terms_that_say_the_same_are_not_left_out_together() -> None:
    """Each of two equal terms could go, and without both the true tokens were less likely; a third one goes."""
    found = random_candidates(1, 4000)
    true = drawn(2, found, replace(KNOWN, prompt_lookup=(0.0,) * MAX_MATCH))
    found.terms[NGRAM] = found.terms[PRIOR] = (found.terms[NGRAM] + found.terms[PRIOR]) / 2
    level = fit_level(evidence(found, true)).level
    assert level.ngram + level.prior > 0.5
    assert min(level.ngram, level.prior) == 0.0
    assert level.prompt_lookup == (0.0,) * MAX_MATCH


def test_loss_and_correct_are_those_of_the_level() -> None:
    """The mean negative log-likelihood of the true tokens by the fitted scores, and where the first guess is true."""
    found = random_candidates(1, 300)
    true = drawn(2, found, KNOWN)
    fit = fit_level(evidence(found, true))
    scores = scores_of(found, fit.level)
    chances = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    tokens = np.concatenate([found.tokens, np.full((300, 1), 99)], axis=1)
    hit = (tokens == true[:, None]) & (chances > 0)
    own = np.where(hit.any(1), chances[np.arange(300), hit.argmax(1)], chances[:, -1])
    assert fit.loss == pytest.approx(-np.log(own).mean(), rel=1e-4)
    assert fit.correct.tolist() == (tokens[np.arange(300), scores[:, :-1].argmax(1)] == true).tolist()
    assert 50 < fit.correct.sum() < 280


def test_fit_is_the_best_of_its_neighbours() -> None:
    """Each weight moved a little makes the sampled tokens less likely."""
    found = random_candidates(1, 2000)
    true = drawn(2, found, KNOWN)
    level = fit_level(evidence(found, true)).level

    def likelihood(level: Level) -> float:
        scores = scores_of(found, level)
        tokens = np.where(repeated(found), -1, found.tokens)
        hit = np.concatenate([tokens == true[:, None], np.ones((len(true), 1), np.bool_)], axis=1).argmax(1)
        return float((scores[np.arange(len(true)), hit] - np.log(np.exp(scores).sum(1))).mean())

    best = likelihood(level)
    moved = [replace(level, **{name: getattr(level, name) + by}) for name in ("head", "ngram") for by in (-0.1, 0.1)]
    moved += [replace(level, cache=(level.cache[0] + by, *level.cache[1:])) for by in (-0.1, 0.1)]
    assert all(likelihood(one) < best for one in moved)


def test_parts_are_alike() -> None:
    """Evidence that is cut into parts and joined is the same."""
    found = random_candidates(0, 500)
    true = drawn(1, found, KNOWN)
    whole = evidence(found, true)
    chosen = np.arange(500) < 200
    halves = Evidence.joined([whole.rows(chosen), whole.rows(~chosen)])
    assert fit_level(halves).level == fit_level(whole).level


def test_no_evidence_gives_the_default_level() -> None:
    """Neither no evidence at all nor evidence without a position says anything."""
    nothing = evidence(random_candidates(0, 0), np.zeros(0, np.int64))
    for silent in (None, nothing, Evidence.joined([nothing, nothing])):
        fit = fit_level(silent)
        assert (fit.level, fit.loss, fit.correct.tolist()) == (Level(), 0.0, [])


def test_what_the_text_is_silent_about_stays() -> None:
    """Beyond the heads their weight is 0, and so are those of lengths that no match had."""
    found = random_candidates(3, 2000)
    found.terms[HEAD] = 0.0
    level = fit_level(evidence(found, drawn(4, found, KNOWN))).level
    assert level.head == 0.0
    assert level.cache[3:] == (0.0,) * 3
    assert level.prompt_lookup[3:] == (0.0,) * 9
    assert level.ngram == pytest.approx(0.5, abs=0.1)


@looped("hits", ["all", "none"])
def test_one_sided_evidence_gives_a_level_that_drafters_accept(hits: str) -> None:
    """Where the first candidate is always right, or no candidate ever, weights are finite and maps ascend."""
    found = random_candidates(5, 400)
    true = found.tokens[:, 0] if hits == "all" else np.full(400, 99)
    level = fit_level(evidence(found, true)).level
    assert Drafter((level,), 1, 6).depth == 1


def naive_evidence(found: Features, true: Ints) -> tuple[list[list[list[float]]], list[list[bool]], list[int]]:
    """The same, candidate by candidate."""
    numbers, shut, hits = [], [], []
    for at in range(len(true)):
        rows = []
        for slot in range(found.tokens.shape[1]):
            prompt_lookup = [0.0] * MAX_MATCH
            if looked_up(found)[at, slot] and found.length[at]:
                prompt_lookup[min(int(found.length[at]), MAX_MATCH) - 1] = 1.0
            first = [float(part[at, slot]) for part in (found.terms[HEAD], found.terms[PRIOR], found.terms[NGRAM])]
            cache = [0.0] * len(CACHE_LENGTHS)
            if found.found[at]:
                cache[found.found[at] - 1] = float(found.terms[CACHE][at, slot])
            rows.append([*first, *prompt_lookup, *cache, 0.0])
        numbers.append([*rows, [0.0] * (3 + MAX_MATCH + len(CACHE_LENGTHS)) + [1.0]])
        shut.append([*repeated(found)[at].tolist(), False])
        slots = [s for s, t in enumerate(found.tokens[at].tolist()) if t == true[at] and not repeated(found)[at, s]]
        hits.append(slots[0] if slots else found.tokens.shape[1])
    return numbers, shut, hits


@looped("seed", range(3))
def test_evidence_equals_a_naive_loop(seed: int) -> None:
    """Matches of no, some and more than `MAX_MATCH` tokens, repeated candidates, and tokens that are not candidates."""
    found = random_candidates(seed, 60, longest=15)
    true = np.where(np.arange(60) % 3 == 0, 99, found.tokens[np.arange(60), np.arange(60) % 6])
    numbers, shut, hits = naive_evidence(found, true)
    made = evidence(found, true)
    assert made.features.tolist() == numbers
    assert made.excluded.tolist() == shut
    assert made.targets.tolist() == hits


@looped("source", SOURCES)
@looped("seed", range(5))
def test_numbers_weigh_as_drafting_does(seed: int, source: str) -> None:
    """A drafter's scores are its numbers times the evidence: what is fitted is what is drafted by."""
    case = random_case(seed, source=source)
    model = Scorer(case.drafter)
    start = model.begin(torch.from_numpy(case.logits), case.recent, case.drafter.depth)
    children = model.candidates(start, start.root)
    made = evidence(model.features(start, start.root), np.zeros(3, np.int64))
    level = case.drafter.levels[0]
    weights = np.array([level.head, level.prior, level.ngram, *level.prompt_lookup, *level.cache, level.other_logit])
    scores = np.where(made.excluded, -np.inf, made.features @ weights)
    assert np.sort(scores[:, :-1]).tolist() == [
        pytest.approx(row, abs=1e-5) for row in np.sort(children.scores).tolist()
    ]
    assert scores[:, -1].tolist() == [pytest.approx(level.other_logit)] * 3


def accepted(calibration_map: tuple[tuple[float, float], ...]) -> bool:
    """Whether a drafter takes this calibration map."""
    return Drafter((Level(calibration_map=calibration_map),), 1, 1).depth == 1


def log_odds(chance: float) -> float:
    """Log of hits over misses."""
    return math.log(chance / (1 - chance))


@looped("slope", [0.5, 1.0, 1.6])
def test_odds_of_a_known_curve_come_back(slope: float) -> None:
    """Where true log-odds are a multiple of the estimated ones, the map gives the true chances."""
    rng = np.random.default_rng(int(10 * slope))
    estimated = rng.uniform(0.01, 0.9, 60_000)
    true = 1 / (1 + (1 / estimated - 1) ** slope)
    mapped = fit_calibration_map(np.log(estimated), (rng.random(60_000) < true).astype(np.int64))
    assert accepted(mapped)
    for chance in (0.03, 0.1, 0.3, 0.5, 0.7, 0.85):
        wanted = 1 / (1 + (1 / chance - 1) ** slope)
        assert math.exp(naive_mapped(chance, mapped)) == pytest.approx(wanted, abs=0.035)


def test_odds_are_calibrated_group_by_group() -> None:
    """Two different estimates, of accuracy three quarters and a tenth: half a hit and half a miss are added."""
    estimated = np.log(np.repeat([0.2, 0.6], 200))
    hits = np.concatenate([np.arange(200) < 20, np.arange(200) < 150]).astype(np.int64)
    odds = fit_calibration_map(estimated, hits)
    first, last = odds[0], odds[-1]
    assert len(odds) == 2
    assert first == pytest.approx((log_odds(0.2), log_odds(20.5 / 201)))
    assert last == pytest.approx((log_odds(0.6), log_odds(150.5 / 201)))


def test_groups_that_are_equal_after_smoothing_stay_apart() -> None:
    """121 of 152, then 40 of 50, become 121.5 / 153 = 40.5 / 51, which does not fall: all pairs stay."""
    estimated = np.log(np.repeat([0.2, 0.6, 0.9], [152, 50, 50]))
    hits = np.concatenate([np.arange(152) < 121, np.arange(50) < 40, np.ones(50, np.bool_)]).astype(np.int64)
    wanted = [(0.2, 121.5 / 153), (0.6, 40.5 / 51), (0.9, 50.5 / 51)]
    odds = fit_calibration_map(estimated, hits)
    assert [one for pair in odds for one in pair] == pytest.approx([log_odds(one) for pair in wanted for one in pair])


def test_falling_groups_are_pooled() -> None:
    """Where likelier candidates are right less often, both get their joint accuracy."""
    estimated = np.log(np.repeat([0.2, 0.6], 50))
    hits = np.concatenate([np.arange(50) < 30, np.arange(50) < 10]).astype(np.int64)
    odds = fit_calibration_map(estimated, hits)
    assert len(odds) == 1
    assert odds[0] == pytest.approx((log_odds(0.4), log_odds(40.5 / 101)))


def test_certain_estimates_count_as_one() -> None:
    """Estimates too near 1 for different odds give one pair, though the nearer one is right more often."""
    estimated = np.log(np.repeat([1 - 1e-12, 1.0], 100))
    hits = np.concatenate([np.arange(100) < 50, np.ones(100)]).astype(np.int64)
    odds = fit_calibration_map(estimated, hits)
    assert len(odds) == 1
    assert accepted(odds)


@looped("seed", range(5))
def test_order_of_equal_estimates_does_not_matter(seed: int) -> None:
    """Candidates with the same estimate share their hits, in any order."""
    rng = np.random.default_rng(seed)
    estimated = np.log(rng.choice([0.01, 0.1, 0.3, 0.8], 1000))
    hits = (rng.random(1000) < 0.3).astype(np.int64)
    by_hits = np.argsort(hits, kind="stable")
    odds, other = fit_calibration_map(estimated, hits), fit_calibration_map(estimated[by_hits], hits[by_hits])
    for chance in (0.005, 0.05, 0.2, 0.5, 0.9):
        assert naive_mapped(chance, odds) == pytest.approx(naive_mapped(chance, other), abs=1e-6)
    same = fit_calibration_map(np.full(1000, math.log(0.3)), hits[by_hits])
    assert math.exp(naive_mapped(0.3, same)) == pytest.approx(hits.mean(), abs=0.001)


def test_few_candidates_leave_estimates_alone() -> None:
    """Fewer than two groups of 50 show nothing; what has no chance to be in a tree does not count."""
    rng = np.random.default_rng(0)
    assert fit_calibration_map(np.zeros(0), np.zeros(0, np.int64)) == ()
    assert fit_calibration_map(np.log(rng.uniform(0.1, 0.9, 99)), rng.integers(0, 2, 99)) == ()
    assert fit_calibration_map(np.log(rng.uniform(0.1, 0.9, 100)), rng.integers(0, 2, 100)) != ()
    unlikely = np.concatenate([np.log(rng.uniform(0.1, 0.9, 99)), np.full(500, -10.0), np.full(500, -np.inf)])
    assert fit_calibration_map(unlikely, rng.integers(0, 2, 1099)) == ()


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 10_000),
    st.integers(100, 700),
    st.sampled_from(["all", "none", "one", "random", "falling"]),
    st.sampled_from([1, 2, 5, 10_000]),
)
def test_odds_always_keep_the_rules(seed: int, size: int, hits: str, values: int) -> None:
    """All hits, none, equal estimates, certain ones: a drafter accepts them, and estimates lie within the hits."""
    rng = np.random.default_rng(seed)
    estimated = np.log(rng.choice(rng.choice([1.0, 1e-3, 0.5, 1 - 1e-12, *rng.random(50)], values), size))
    hits = {
        "all": np.ones(size, np.int64),
        "none": np.zeros(size, np.int64),
        "one": (np.arange(size) == 0).astype(np.int64),
        "random": rng.integers(0, 2, size),
        "falling": (estimated < np.median(estimated)).astype(np.int64),
    }[hits]
    odds = fit_calibration_map(estimated, hits)
    assert accepted(odds)
    assert all(abs(found) <= log_odds((size + 0.5) / (size + 1)) + 1e-9 for _, found in odds)
    assert len(odds) <= 64


def test_candidates_that_are_never_right_are_one_group() -> None:
    """Groups of equal rates are pooled, those without hits too: one pair, whatever was estimated."""
    estimated = np.log(np.linspace(0.01, 0.5, 400))
    assert len(fit_calibration_map(estimated, np.zeros(400, np.int64))) == 1
