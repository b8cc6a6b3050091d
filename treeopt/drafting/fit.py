"""Fit of a drafter: the weights of its levels, the prior of its cache, and how many levels it keeps.

Each level is a conditional logit model: the probability of a candidate is the softmax of its score. Maximum likelihood
is a convex problem in 22 weights, so it has one solution and takes seconds. Outputs of base and heads are constants.
All are fitted to a sample of positions, each seen by the drafter of its fold, whose table was counted without its text.
Frequency, table and prompt lookup are left out where they bring less than one nat for each weight (Akaike 1974).
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treeopt.drafter import CACHE_LENGTHS, MAX_MATCH, Drafter, Level
from treeopt.drafting.block import ConditionalSession
from treeopt.drafting.interface import Bools, Features, Ints
from treeopt.drafting.kernel.data import CACHE
from treeopt.drafting.plans import proposer_for
from treeopt.drafting.trace import positions_of, states_at, states_for
from treeopt.models.base import Base
from treeopt.models.block_module import BlockModule
from treeopt.models.draft_module import draft_reads
from treeopt.models.heads import MedusaHeads
from treeopt.optimize.values import isotonic
from treeopt.texts.encode import Text
from treeopt.traces import ArrayRows

Floats = NDArray[np.float64]
Pairs = tuple[tuple[float, float], ...]

CACHE_PRIORS = (1.0, 2.0, 4.0, 8.0)  # of which one is chosen; tokens per step differ by 1 % between 1 and 4
RIDGE = 1e-4  # keeps weights without evidence at their start values
_POSITIONS = 8000  # that a level is fitted to, on average
_FEWEST = 500  # positions by which a term may be found to bring nothing
_PRIOR_POSITIONS, _PRIOR_LEVELS = 2000, 3  # that the prior of the cache is chosen by
_LEAST_REACH = 0.01  # of a level below the heads: share of positions where all top-1 candidates down to it are right
_STEPS = 60
_JUDGED = 8  # candidates of a node for the calibration map; trees rarely use others
_UNLIKELY = math.log(1e-4)  # less likely candidates are not used by trees
_GROUPS, _GROUP = 64, 50  # maximum number of groups of similar estimates, minimum number of candidates of a group
_AS_GOOD = 1 - 1e-9  # rates with a ratio above this are equal up to rounding
# Columns of the terms of a score: head, prior, n-gram, then those of prompt lookup by the length of the match.
_LOOKUP = 3
_CACHE = _LOOKUP + MAX_MATCH
_OTHER = _CACHE + len(CACHE_LENGTHS)  # the constant, the score of all other tokens
_TERMS = ([1], [2], [*range(_LOOKUP, _CACHE)])  # that a level may do without; a memory is searched by the others


@dataclass(frozen=True, eq=False)
class Evidence(ArrayRows):
    """Features of the candidates at n positions; candidate C is all other tokens together."""

    features: NDArray[np.float32]  # [n, C + 1, columns]
    excluded: Bools  # [n, C + 1], which are no candidates
    targets: Ints  # [n], the candidate that is the true token


@dataclass(frozen=True, eq=False)
class LevelFit:
    """The result of `fit_level`."""

    level: Level
    loss: float  # mean negative log-likelihood, in nats
    correct: Bools  # [n], whether the likeliest candidate is the true token


@dataclass(frozen=True, eq=False)
class FitSample:
    """Texts whose positions a drafter is fitted to."""

    base: Base
    heads: MedusaHeads | None
    texts: Sequence[Text]
    fold_of: dict[str, int]  # by prompt id
    seed: int  # of the choice of positions
    draft: Base | None = None

    @functools.cached_property
    def positions(self) -> list[tuple[Text, Floats, Tensor | None]]:
        """The texts with chosen positions: each with its numbers (see `_share`), and its states at these positions."""
        share, rng = self._share(_POSITIONS), np.random.default_rng(self.seed)
        found = []
        for text in self.texts:
            number = rng.random(len(text.answer))
            if (number < share).any():
                # Whole texts side by side take much memory, so they are run again for each fit.
                states = None if self._reads else states_at(self._states(text), (), number < share)
                found.append((text, number, states))
        return found

    def _states(self, text: Text) -> Tensor:
        [states] = states_for(self.base, self._reads, [text])
        return states

    @property
    def _reads(self) -> tuple[int, ...]:
        return () if self.draft is None else draft_reads(self.draft.model)

    def _share(self, positions: int) -> float:
        """The share of the answers' positions that gives this many; those with a number below it are chosen."""
        return min(1.0, positions / max(1, sum(len(text.answer) for text in self.texts)))

    @torch.inference_mode()
    def evidence(self, folds: Sequence[Drafter], positions: int, levels: int) -> tuple[list[list[Evidence]], Bools]:
        """For each level the evidence at the sampled positions, and bool [n, levels]: whether there is a token."""
        proposers = [proposer_for(self.base, self.heads, drafter, self.draft) for drafter in folds]
        most, share = self._share(_POSITIONS), self._share(positions)
        parts: list[list[Evidence]] = [[] for _ in range(levels)]
        known: list[Bools] = [np.zeros((0, levels), np.bool_)]
        for text, number, states in self.positions:
            chosen = number < share
            if not chosen.any():
                continue
            states = self._states(text) if states is None else states_at(states, (), chosen[number < most])
            for session, true in positions_of(proposers[self.fold_of[text.prompt_id]], [text], [states], chosen):
                known.append(true[:, :levels] >= 0)
                for level, part in enumerate(parts):
                    found = evidence(session.features(true[:, :level]), true[:, level])
                    part.append(found.rows(true[:, level] >= 0))
        return parts, np.concatenate(known)

    @torch.inference_mode()
    def odds(self, folds: Sequence[Drafter]) -> tuple[Floats, Floats, Bools, Bools]:
        """Of a drafter with a confidence head `ConditionalSession.odds` at the sampled positions, whether the likeliest
        token is right, and whether there is a true one: [n, levels] each.
        """
        proposer, share, parts = proposer_for(self.base, None, folds[0], self.draft), self._share(_POSITIONS), []
        for text, number, _ in self.positions:
            for session, true in positions_of(proposer, [text], [self._states(text)], number < share):
                assert isinstance(session, ConditionalSession)
                parts.append((*session.odds(true), session.trace(true)[0] == 0, true >= 0))
        own, sure, right, known = (np.concatenate(one) for one in zip(*parts, strict=True))
        return own, sure, right, known

    def fits(
        self, folds: Sequence[Drafter], positions: int, levels: int, *, whole: bool = False
    ) -> list[tuple[LevelFit, Bools]]:
        """The fits of the first levels, each with bool [n]; these as of `evidence`, `whole` as of `fit_level`."""
        parts, known = self.evidence(folds, positions, levels)
        fits = [fit_level(Evidence.joined(part) if part else None, whole=whole) for part in parts]
        return list(zip(fits, known.T, strict=True))


def fit_drafter(sample: FitSample, folds: Sequence[Drafter]) -> list[Drafter]:
    """The drafters of the folds, as deep as the result may be, with fitted numbers, which are the same for all."""
    first, module = folds[0], None if sample.draft is None else sample.draft.model
    if isinstance(module, BlockModule) and module.wiring.confidence:
        folds = _with_confidence(sample, folds)
    if first.window:
        folds = _with_prior(sample, folds)
    fits = sample.fits(folds, _POSITIONS, first.depth)
    kept = max(1, first.num_heads, _reached(fits))
    pairs = zip(fits[:kept], folds[0].levels, strict=False)
    levels = tuple(dataclasses.replace(fit.level, confidence=level.confidence) for (fit, _), level in pairs)
    lm_head_levels = min(first.lm_head_levels, kept)
    return [dataclasses.replace(fold, levels=levels, lm_head_levels=lm_head_levels) for fold in folds]


def _with_confidence(sample: FitSample, folds: Sequence[Drafter]) -> list[Drafter]:
    """The drafters whose likeliest tokens have the log-odds that make the sampled texts likeliest, by the head's."""
    own, sure, right, known = sample.odds(folds)
    levels = []
    for number, level in enumerate(folds[0].levels):
        chosen = known[:, number]
        features = np.stack([np.ones(len(own)), own[:, number], sure[:, number]], axis=1)[chosen]
        given, targets = torch.from_numpy(features), torch.from_numpy(right[chosen, number]).double()
        loss = functools.partial(_logistic_loss, given, targets)
        start = torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64)
        fitted = tuple(_minimum(start, loss).tolist()) if len(targets) >= _GROUP else ()
        levels.append(dataclasses.replace(level, confidence=fitted))
    return [dataclasses.replace(fold, levels=tuple(levels)) for fold in folds]


def _logistic_loss(features: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    return torch.nn.functional.binary_cross_entropy_with_logits(features @ weights, targets)


def _minimum(start: Tensor, loss_of: Callable[[Tensor], Tensor], near: Tensor | None = None) -> Tensor:
    """The weights of the least loss and distance from their start, times `RIDGE`; searched from `near` on."""
    weights = (start if near is None else near).clone().requires_grad_()
    optimiser = torch.optim.LBFGS([weights], max_iter=_STEPS, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimiser.zero_grad()
        value = loss_of(weights) + RIDGE * (weights - start).square().sum()
        value.backward()  # type: ignore[no-untyped-call]  # torch has no types for it
        return value

    optimiser.step(loss)  # type: ignore[no-untyped-call]  # likewise
    return weights.detach()


def _with_prior(sample: FitSample, folds: Sequence[Drafter]) -> list[Drafter]:
    """The drafters with the prior of the cache that makes the sampled texts likeliest."""
    levels = min(_PRIOR_LEVELS, folds[0].depth)

    def with_prior(prior: float) -> list[Drafter]:
        return [dataclasses.replace(fold, cache_prior=prior) for fold in folds]

    def loss(prior: float) -> float:
        return sum(fit.loss for fit, _ in sample.fits(with_prior(prior), _PRIOR_POSITIONS, levels, whole=True))

    return with_prior(min(CACHE_PRIORS, key=loss))


def _reached(fits: Sequence[tuple[LevelFit, Bools]]) -> int:
    """The number of levels down to which all top-1 candidates are right at enough positions."""
    right = np.ones(len(fits[0][1]), np.bool_)
    for level, (fit, known) in enumerate(fits):
        correct = np.zeros(len(known), np.bool_)
        correct[known] = fit.correct
        right &= correct
        if right.sum() < _LEAST_REACH * max(1, known.sum()):
            return level
    return len(fits)


def evidence(found: Features, true: Ints) -> Evidence:
    """The evidence of one level: candidates [n, C], and the true tokens [n]."""
    rows, slots = found.tokens.shape
    repeated = np.arange(slots) >= found.width[:, None]
    features = np.zeros((rows, slots + 1, _OTHER + 1), np.float32)
    features[:, :slots, :_LOOKUP] = np.moveaxis(found.terms[:_LOOKUP], 0, -1)
    lengths = np.minimum(found.length, MAX_MATCH)
    matched = np.flatnonzero(lengths)
    features[matched, found.looked_up[matched], _LOOKUP - 1 + lengths[matched]] = 1.0
    voted = np.flatnonzero(found.found)
    features[voted, :slots, _CACHE - 1 + found.found[voted]] = found.terms[CACHE, voted]
    features[:, slots, _OTHER] = 1.0
    excluded = np.concatenate([repeated, np.zeros((rows, 1), np.bool_)], axis=1)
    hit = (found.tokens == true[:, None]) & ~repeated
    return Evidence(features, excluded, np.where(hit.any(1), hit.argmax(1), slots))


def fit_level(given: Evidence | None, *, whole: bool = False) -> LevelFit:
    """Fit weights and calibration map of a level, with all terms if `whole`; without evidence they are the defaults."""
    if given is None or not len(given.targets):
        return LevelFit(Level(), 0.0, np.zeros(0, np.bool_))
    features = torch.from_numpy(given.features).double()
    excluded, targets = torch.from_numpy(given.excluded), torch.from_numpy(given.targets)
    start = torch.zeros(features.shape[-1], dtype=torch.float64)
    start[0] = float(features[:, :, 0].any())  # 1 where there is a head
    start[_OTHER] = -5.0

    def loss(features: Tensor, weights: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy((features @ weights).masked_fill(excluded, -torch.inf), targets)

    weights = _minimum(start, functools.partial(loss, features))
    whole = whole or len(targets) < _FEWEST
    while idle := [] if whole else _idle(weights, features, excluded):  # one by one: of equal terms one stays
        without = features.index_fill(-1, torch.tensor(idle), 0.0)
        near = weights.index_fill(0, torch.tensor(idle), 0.0)
        fewer = _minimum(start, functools.partial(loss, without), near)
        if loss(without, fewer) - loss(features, weights) >= len(idle) / len(targets):
            break
        features, weights = without, fewer
    estimated = (features @ weights).masked_fill(excluded, -torch.inf).log_softmax(-1)
    likelihood = -torch.nn.functional.nll_loss(estimated, targets).item()
    estimated = estimated[:, :-1]
    hit = torch.nn.functional.one_hot(targets, features.shape[1])[:, :-1]
    likely, places = estimated.topk(min(_JUDGED, estimated.shape[1]), dim=1)
    pairs = fit_calibration_map(likely.numpy().ravel(), hit.gather(1, places).numpy().ravel())
    fitted = weights.tolist()
    lookup, cache = tuple(fitted[_LOOKUP:_CACHE]), tuple(fitted[_CACHE:_OTHER])
    head, prior, ngram = fitted[:_LOOKUP]
    level = Level(head, prior, ngram, lookup, fitted[_OTHER], pairs, cache)
    return LevelFit(level, -likelihood, (places[:, 0] == targets).numpy())


def _idle(weights: Tensor, features: Tensor, excluded: Tensor) -> list[int]:
    """Columns of the term that brings least below its price, by the curvature of the loss; empty where none does."""
    count = len(features)
    likely = (features @ weights).masked_fill(excluded, -torch.inf).softmax(-1)
    mean = torch.einsum("nc,ncf->nf", likely, features)
    spread = torch.einsum("nc,ncf,ncg->fg", likely, features, features) - mean.T @ mean
    inverse = torch.linalg.inv(spread + 2 * RIDGE * count * torch.eye(len(weights), dtype=spread.dtype))
    least, found = 0.0, list[int]()
    for term in _TERMS:
        used = [column for column in term if spread[column, column] > 0]
        # Twice the log-likelihood that the term brings, where the others would be fitted again (Wald).
        brings = weights[used] @ torch.linalg.solve(inverse[used][:, used], weights[used])
        gain = float(brings) - 2 * len(used)
        least, found = (gain, used) if gain < least else (least, found)
    return found


def fit_calibration_map(estimated: Floats, hits: Ints) -> Pairs:
    """The accuracy of candidates as a non-decreasing function of their estimated probability, in log-odds.

    The candidates are divided into groups of similar estimates, and groups that violate the order are joined with their
    neighbours (isotonic regression). `estimated` [n] are log-probabilities, `hits` [n] 1 where the candidate was the
    true token; the result is `Level.calibration_map`.
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
    pairs: list[tuple[float, float]] = []
    for total, correct, size in np.add.reduceat(sums, starts).tolist():
        # Half a hit and half a miss are added, so that odds are finite. Pairs that then violate the order are dropped.
        pair = _log_odds(total / size), _log_odds((correct + 0.5) / (size + 1))
        if not pairs or (pair[0] > pairs[-1][0] and pair[1] >= pairs[-1][1]):
            pairs.append(pair)
    return tuple(pairs)


def _log_odds(probability: float) -> float:
    """The log-odds of a probability; finite where it is 1."""
    below_one = min(probability, 1 - 1e-9)
    return math.log(below_one) - math.log1p(-below_one)
