"""Fit of a drafter: the weights of its levels, the prior of its cache, and how many levels it keeps.

All are fitted to a sample of the answers' positions. Each text is seen by the drafter of its fold, whose n-gram table
was counted without it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treeopt.drafter import Drafter
from treeopt.drafting.fit_weights import Evidence, LevelFit, evidence, fit_level
from treeopt.drafting.plans import proposer_for
from treeopt.drafting.trace import Positions, positions_of
from treeopt.models.base import Base
from treeopt.models.heads import MedusaHeads
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
