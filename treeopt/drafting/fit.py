"""Fit of a drafter: the weights of its levels, the prior of its cache, and how many levels it keeps.

All are fitted to a sample of the answers' positions. Each text is seen by the drafter of its fold, whose n-gram table
was counted without it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treeopt.drafter import CACHE_LENGTHS, MAX_MATCH, Drafter, Level
from treeopt.drafting.interface import Features
from treeopt.drafting.plans import proposer_for
from treeopt.drafting.trace import Positions, positions_of
from treeopt.models.base import Base
from treeopt.models.heads import MedusaHeads
from treeopt.optimize.values import isotonic
from treeopt.texts.encode import Text
from treeopt.texts.hidden_states import hidden_states

Floats = NDArray[np.float64]

CACHE_PRIORS = (1.0, 2.0, 4.0, 8.0)  # of which one is chosen; tokens per step differ by 1 % between 1 and 4
_POSITIONS = 8000  # that a level is fitted to, on average
_PRIOR_POSITIONS, _PRIOR_LEVELS = 2000, 3  # that the prior of the cache is chosen by
_LEAST_REACH = 0.01  # of a level below the heads: share of positions where all top-1 candidates down to it are right


@dataclass(frozen=True, eq=False)
class FitSample:
    """Texts whose positions a drafter is fitted to.

    Args:
        base: the base model.
        heads: its heads; None where there are none.
        texts: prompts with the base's answers.
        fold_of: the fold of each prompt id.
        seed: of the choice of positions.
        without: terms of the score to leave out, by their names in `TERMS`.
        draft: the draft model; None where there is none.
    """

    base: Base
    heads: MedusaHeads | None
    texts: Sequence[Text]
    fold_of: dict[str, int]
    seed: int
    without: Collection[str] = ()
    draft: Base | None = None

    @functools.cached_property
    def positions(self) -> list[tuple[Text, Floats, Tensor]]:
        """The texts with chosen positions: each with its numbers (see `_share`), and its states at these positions."""
        share, rng = self._share(_POSITIONS), np.random.default_rng(self.seed)
        found = []
        for text in self.texts:
            number = rng.random(len(text.answer))
            if (number < share).any():
                [states] = hidden_states(self.base, [text])
                chosen = torch.from_numpy(number < share).to(states.device)
                found.append((text, number, states[chosen]))
        return found

    def _share(self, positions: int) -> float:
        """The share of the answers' positions that gives this many; those with a number below it are chosen."""
        return min(1.0, positions / max(1, sum(len(text.answer) for text in self.texts)))

    def fits(self, folds: Sequence[Drafter], positions: int, levels: int) -> list[tuple[LevelFit, NDArray[np.bool_]]]:
        """The fits of the first levels, each with bool [n]: the positions of the sample that have a token there.

        Args:
            folds: the drafters of the folds; their weights are not used.
            positions: number of positions, on average; at most `_POSITIONS`.
            levels: at most those of the drafters.
        """
        proposers = [proposer_for(self.base, self.heads, drafter, self.draft) for drafter in folds]
        most, share = self._share(_POSITIONS), self._share(positions)
        parts: list[list[Evidence]] = [[] for _ in range(levels)]
        known: list[NDArray[np.bool_]] = []
        for text, number, states in self.positions:
            chosen = number < share
            if not chosen.any():
                continue
            states = states[torch.from_numpy(chosen[number < most]).to(states.device)]
            for found in positions_of(proposers[self.fold_of[text.prompt_id]], [text], [states], chosen):
                known.append(found.true[:, :levels] >= 0)
                self._add(found, parts)
        if not known:
            return [(fit_level(None), np.zeros(0, np.bool_))] * levels
        fits = [fit_level(Evidence.joined(part)) for part in parts]
        return list(zip(fits, np.concatenate(known).T, strict=True))

    @torch.inference_mode()
    def _add(self, found: Positions, parts: Sequence[list[Evidence]]) -> None:
        """Add the evidence at these positions to that of each level."""
        for level, part in enumerate(parts):
            true = found.true[:, level]
            features = found.session.features(found.true[:, :level])
            part.append(evidence(features, true).only(true >= 0).without(self.without))


def fit_drafter(sample: FitSample, folds: Sequence[Drafter]) -> list[Drafter]:
    """The drafters of the folds with fitted numbers, which are the same for all.

    Args:
        sample: what they are fitted to.
        folds: the drafters of the folds with any weights, as deep as the result may be.
    """
    first = folds[0]
    if first.window and "cache" not in sample.without:
        folds = _with_prior(sample, folds)
    fits = sample.fits(folds, _POSITIONS, first.depth)
    kept = max(1, first.num_heads, _reached(fits))
    levels = tuple(fit.level for fit, _ in fits[:kept])
    lm_head_levels = min(first.lm_head_levels, kept)
    return [dataclasses.replace(fold, levels=levels, lm_head_levels=lm_head_levels) for fold in folds]


def _with_prior(sample: FitSample, folds: Sequence[Drafter]) -> list[Drafter]:
    """The drafters with the prior of the cache that makes the sampled texts likeliest."""
    levels = min(_PRIOR_LEVELS, folds[0].depth)

    def with_prior(prior: float) -> list[Drafter]:
        return [dataclasses.replace(fold, cache_prior=prior) for fold in folds]

    def loss(prior: float) -> float:
        return sum(fit.loss for fit, _ in sample.fits(with_prior(prior), _PRIOR_POSITIONS, levels))

    return with_prior(min(CACHE_PRIORS, key=loss))


def _reached(fits: Sequence[tuple[LevelFit, NDArray[np.bool_]]]) -> int:
    """The number of levels down to which all top-1 candidates are right at enough positions."""
    right = np.ones(len(fits[0][1]), np.bool_)
    for level, (fit, known) in enumerate(fits):
        correct = np.zeros(len(known), np.bool_)
        correct[known] = fit.correct
        right &= correct
        if right.sum() < _LEAST_REACH * max(1, known.sum()):
            return level
    return len(fits)


RIDGE = 1e-4  # keeps weights without evidence at their start values
_STEPS = 60
_JUDGED = 8  # candidates of a node for the calibration map; trees rarely use others
_UNLIKELY = math.log(1e-4)  # less likely candidates are not used by trees
_GROUPS, _GROUP = 64, 50  # maximum number of groups of similar estimates, minimum number of candidates of a group
_AS_GOOD = 1 - 1e-9  # rates with a ratio above this are equal up to rounding
_CACHE = 3 + MAX_MATCH
_OTHER = _CACHE + len(CACHE_LENGTHS)  # column of the constant, the score of all other tokens
# Columns of the terms of a score.
TERMS = {
    "head": slice(0, 1),
    "prior": slice(1, 2),
    "ngram": slice(2, 3),
    "prompt_lookup": slice(3, _CACHE),
    "cache": slice(_CACHE, _OTHER),
}
_ARRAYS = ("features", "excluded", "targets")


@dataclass(frozen=True, eq=False)
class Evidence:
    """Features of the candidates at n positions; candidate C is all other tokens together.

    Args:
        features: float32 [n, C + 1, columns].
        excluded: bool [n, C + 1], repeated candidates.
        targets: int64 [n], the candidate that is the true token.
    """

    features: NDArray[np.float32]
    excluded: NDArray[np.bool_]
    targets: NDArray[np.int64]

    def only(self, chosen: NDArray[np.bool_]) -> Evidence:
        """The evidence at some of the positions."""
        return Evidence(self.features[chosen], self.excluded[chosen], self.targets[chosen])

    def without(self, terms: Collection[str]) -> Evidence:
        """The evidence without some terms of the score, by the names in `TERMS`."""
        features = self.features.copy()
        for term in terms:
            features[:, :, TERMS[term]] = 0
        return dataclasses.replace(self, features=features)

    @classmethod
    def joined(cls, parts: Sequence[Evidence]) -> Evidence:
        """The evidence of all parts, at least one."""
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in _ARRAYS))


@dataclass(frozen=True, eq=False)
class LevelFit:
    """The result of `fit_level`.

    Args:
        level: weights and calibration map.
        loss: mean negative log-likelihood, in nats.
        correct: bool [n], whether the likeliest candidate is the true token.
    """

    level: Level
    loss: float
    correct: NDArray[np.bool_]


def evidence(found: Features, true: NDArray[np.int64]) -> Evidence:
    """The evidence of one level.

    Args:
        found: candidates [n, C].
        true: int64 [n], the true tokens.
    """
    rows, slots = found.tokens.shape
    features = np.zeros((rows, slots + 1, _OTHER + 1), np.float32)
    features[:, :slots, :3] = np.stack([found.head, found.prior, found.ratios], axis=-1)
    lengths = np.minimum(found.length, MAX_MATCH)
    matched = np.flatnonzero(lengths)
    features[matched, :slots, 2 + lengths[matched]] = found.prompt_lookup[matched]
    voted = np.flatnonzero(found.found)
    features[voted, :slots, _CACHE - 1 + found.found[voted]] = found.cache[voted]
    features[:, slots, _OTHER] = 1.0
    excluded = np.concatenate([found.repeated, np.zeros((rows, 1), np.bool_)], axis=1)
    hit = (found.tokens == true[:, None]) & ~found.repeated
    return Evidence(features, excluded, np.where(hit.any(1), hit.argmax(1), slots))


def fit_level(given: Evidence | None) -> LevelFit:
    """LevelFit the weights and the calibration map of one level.

    Args:
        given: evidence; where it is None or has no positions, the weights are the defaults.
    """
    if given is None or not len(given.targets):
        return LevelFit(Level(), 0.0, np.zeros(0, np.bool_))
    features = torch.from_numpy(given.features).double()
    excluded, targets = torch.from_numpy(given.excluded), torch.from_numpy(given.targets)
    weights = torch.zeros(features.shape[-1], dtype=torch.float64)
    weights[0] = float(features[:, :, 0].any())  # 1 where there is a head
    weights[_OTHER] = -5.0
    weights.requires_grad_()
    start = weights.detach().clone()
    optimiser = torch.optim.LBFGS([weights], max_iter=_STEPS, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimiser.zero_grad()
        scores = (features @ weights).masked_fill(excluded, -torch.inf)
        value = torch.nn.functional.cross_entropy(scores, targets) + RIDGE * (weights - start).square().sum()
        value.backward()  # type: ignore[no-untyped-call]  # torch has no types for it
        return value

    optimiser.step(loss)  # type: ignore[no-untyped-call]  # likewise
    with torch.no_grad():
        estimated = (features @ weights).masked_fill(excluded, -torch.inf).log_softmax(-1)
        likelihood = -torch.nn.functional.nll_loss(estimated, targets).item()
    estimated = estimated[:, :-1]
    hit = torch.nn.functional.one_hot(targets, features.shape[1])[:, :-1]
    likely, places = estimated.topk(min(_JUDGED, estimated.shape[1]), dim=1)
    calibration_map = fit_calibration_map(likely.numpy().ravel(), hit.gather(1, places).numpy().ravel())
    return LevelFit(_as_level(weights.tolist(), calibration_map), -likelihood, (places[:, 0] == targets).numpy())


def _as_level(weights: list[float], calibration_map: tuple[tuple[float, float], ...]) -> Level:
    head, prior, ngram = weights[:3]
    lookup, cache = tuple(weights[TERMS["prompt_lookup"]]), tuple(weights[TERMS["cache"]])
    return Level(head, prior, ngram, lookup, weights[_OTHER], calibration_map, cache)


def fit_calibration_map(estimated: NDArray[np.float64], hits: NDArray[np.int64]) -> tuple[tuple[float, float], ...]:
    """The accuracy of candidates as a non-decreasing function of their estimated probability, in log-odds.

    The candidates are divided into groups of similar estimates, and groups that violate the order are joined with their
    neighbours (isotonic regression).

    Args:
        estimated: float64 [n], log-probabilities.
        hits: int64 [n], 1 where the candidate was the true token.

    Returns:
        Pairs of log-odds, estimated and measured, as in `treeopt.drafter.Level`.
    """
    likely = estimated > _UNLIKELY
    estimated, hits = estimated[likely], hits[likely]
    if len(hits) < 2 * _GROUP:
        return ()
    _, value, times = np.unique(estimated, return_inverse=True, return_counts=True)
    rate = (np.bincount(value, hits) / times)[value]  # equal estimates have equal rates, even in two groups
    order = np.argsort(estimated, kind="stable")
    groups = np.array_split(order, min(_GROUPS, len(order) // _GROUP))
    # [groups, 3]: sum of estimates, hits, candidates
    sums = np.array([(np.exp(estimated[group]).sum(), rate[group].sum(), len(group)) for group in groups])
    fitted = isotonic(sums[:, 1] / sums[:, 2], sums[:, 2])
    starts = np.flatnonzero(np.append(True, fitted[:-1] < fitted[1:] * _AS_GOOD))
    pooled: list[tuple[float, float, float]] = [tuple(row) for row in np.add.reduceat(sums, starts).tolist()]
    pairs: list[tuple[float, float]] = []
    for total, correct, size in pooled:
        # Half a hit and half a miss are added, so that odds are finite. Pairs that then violate the order are dropped.
        pair = _log_odds(total / size), _log_odds((correct + 0.5) / (size + 1))
        if not pairs or (pair[0] > pairs[-1][0] and pair[1] >= pairs[-1][1]):
            pairs.append(pair)
    return tuple(pairs)


def _log_odds(probability: float) -> float:
    """The log-odds of a probability; finite where it is 1."""
    below_one = min(probability, 1 - 1e-9)
    return math.log(below_one) - math.log1p(-below_one)
