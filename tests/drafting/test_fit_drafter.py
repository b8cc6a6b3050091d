"""The fit of a drafter: which levels are kept, which cache prior is chosen, and by which tables texts are seen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
from drafters import answered, learned, planted, prompts_of
from looped import looped
from numpy.typing import NDArray
from tiny import tiny_base, walk

from treeopt.drafter import Drafter, Level
from treeopt.drafting import fit as module
from treeopt.drafting.count import NgramCounts
from treeopt.drafting.fit import CACHE_PRIORS, FitSample, LevelFit, _reached, fit_drafter
from treeopt.drafting.learn import Learned
from treeopt.drafting.plans import proposer_for
from treeopt.drafting.trace import positions_of, trace_texts
from treeopt.models.base import Base
from treeopt.ngram_table import CONTEXT, context_keys
from treeopt.texts.encode import Text

Bools = NDArray[np.bool_]


def fit_of(right: Sequence[bool], known: Sequence[bool]) -> tuple[LevelFit, Bools]:
    """The fit of one level with these top-1 guesses, at the positions that are known."""
    there = np.array(known, np.bool_)
    return LevelFit(Level(), 1.0, np.array(right, np.bool_)[there]), there


def naive_reached(fits: Sequence[tuple[LevelFit, Bools]]) -> int:
    """The same, position by position: a chain of top-1 guesses must get there from one position of a hundred."""
    depths = []
    for position in range(len(fits[0][1])):
        depth = 0
        for fit, known in fits:
            if not known[position] or not fit.correct[known[:position].sum()]:
                break
            depth += 1
        depths.append(depth)
    kept = 0
    for level, (_, known) in enumerate(fits, start=1):
        if sum(depth >= level for depth in depths) < 0.01 * max(1, known.sum()):
            break
        kept = level
    return kept


@looped("seed", range(20))
def test_levels_that_a_chain_reaches(seed: int) -> None:
    """Random guesses at random positions, against a count position by position."""
    rng = np.random.default_rng(seed)
    known = np.arange(400)[:, None] % rng.integers(8, 30) < np.arange(rng.integers(8, 20), 0, -1)[None, :5]
    fits = [fit_of((rng.random(400) < rng.uniform(0.05, 0.6)).tolist(), known[:, level].tolist()) for level in range(5)]
    assert _reached(fits) == naive_reached(fits)


REACHED: dict[str, tuple[list[list[int]], int]] = {  # of each level the range of 200 positions where it is right
    "all": ([[200], [200]], 2),
    "two of 200 are one percent": ([[200], [2]], 2),
    "one of 200 is not": ([[200], [1], [200]], 1),
    "none at all": ([[0], [200]], 0),
    "right where the level above is wrong": ([[100], [100, 200]], 1),
}


@looped("case", REACHED)
def test_levels_by_hand(case: str) -> None:
    """A level counts where all guesses down to it are right."""
    levels, wanted = REACHED[case]
    fits = [fit_of([i in range(*bounds) for i in range(200)], [True] * 200) for bounds in levels]
    assert _reached(fits) == naive_reached(fits) == wanted


def unfitted(base: Base, *, levels: int = 4, heads: int = 0, window: int = 64) -> Drafter:
    """A drafter with an empty table."""
    table = NgramCounts(base.vocab_size).table()
    return Drafter((Level(),) * levels, heads, 4, window, table, voted=4, lm_head_levels=0 if heads else 2)


def sample_of(base: Base, texts: Sequence[Text]) -> FitSample:
    """All texts in one fold."""
    return FitSample(base, None, texts, {text.prompt_id: 0 for text in texts}, 0)


def periodic(count: int, period: int, length: int = 80) -> list[Text]:
    """Texts that repeat a random period exactly; the drafter need not be right about the model."""
    rng = np.random.default_rng(period)
    whole = [np.resize(rng.permutation(61)[:period], length).tolist() for _ in range(count)]
    return [Text(f"set:{i}", text[:4], text[4:]) for i, text in enumerate(whole)]


def noisy(count: int, length: int = 80) -> list[Text]:
    """Texts of random tokens out of four, where no context tells what follows; more of the first."""
    rng = np.random.default_rng(0)
    whole = [rng.choice(4, size=length, p=[0.7, 0.1, 0.1, 0.1]).tolist() for _ in range(count)]
    return [Text(f"set:{i}", text[:4], text[4:]) for i, text in enumerate(whole)]


def test_levels_below_what_is_reached_are_dropped() -> None:
    """Texts of one period keep all levels, texts of different random tokens the first; those of heads are kept."""
    base, heads = planted()
    assert fit_drafter(sample_of(base, periodic(4, 5)), [unfitted(base)])[0].depth == 4
    rng = np.random.default_rng(0)
    alien = [Text(f"set:{i}", [1], rng.permutation(61)[:50].tolist()) for i in range(4)]
    [short] = fit_drafter(sample_of(base, alien), [unfitted(base)])
    assert (short.depth, short.lm_head_levels) == (1, 1)
    with_heads = replace(sample_of(base, alien), heads=heads)
    assert fit_drafter(with_heads, [unfitted(base, heads=3, levels=5)])[0].depth == 3


def losses(base: Base, texts: Sequence[Text], priors: Sequence[float]) -> list[float]:
    """The loss by each prior, of all positions."""
    return [
        sum(fit.loss for fit, _ in sample_of(base, texts).fits([replace(unfitted(base), cache_prior=prior)], 2000, 3))
        for prior in priors
    ]


@pytest.mark.usefixtures("whole_fit")  # the losses are near to each other
@looped(("kind", "priors"), [("periodic", (300.0, 0.01, 1.0)), ("noisy", CACHE_PRIORS)])
def test_the_prior_with_the_least_loss_is_chosen(
    kind: str, priors: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is in the drafter of every fold; where a place always tells what follows, votes count for most."""
    base = tiny_base("llama", 1)
    texts = periodic(3, 7, 60) if kind == "periodic" else noisy(3, 60)
    monkeypatch.setattr(module, "CACHE_PRIORS", priors)
    found = fit_drafter(sample_of(base, texts), [unfitted(base)] * 2)
    by_prior = losses(base, texts, priors)
    best = priors[by_prior.index(min(by_prior))]
    assert [drafter.cache_prior for drafter in found] == [best, best]
    assert kind == "noisy" or best == min(priors)


def test_no_prior_is_chosen_without_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prior stays as it is."""
    base = tiny_base("llama", 1)
    monkeypatch.delattr(module, "CACHE_PRIORS")
    assert fit_drafter(sample_of(base, noisy(2)), [unfitted(base, window=0)])[0].cache_prior == 1.0


def pair_key(first: int, second: int) -> int:
    """The key of a context of two tokens."""
    context = np.full(CONTEXT, -1)
    context[:2] = second, first
    return int(context_keys(context)[1])


def leaks(found: Learned, texts: Sequence[Text]) -> list[str]:
    """The texts whose first two tokens, which no other has, are a context of their own fold's table."""
    tables = [drafter.ngram_table for drafter in found.folds]
    return [
        text.prompt_id
        for text in texts
        if (table := tables[found.fold_of[text.prompt_id]]) is not None and pair_key(*text.prompt[:2]) in table.keys
    ]


def test_a_fold_that_holds_its_own_texts_is_caught() -> None:
    """No fold's table has a context of its texts alone; with the table of all texts, every one has."""
    base, heads = planted()
    texts = answered(base, [Text(f"set:{i}", [i, 60 - i, *walk(i, 3)], []) for i in range(8)], 10)
    found = learned(base, heads, texts, tokens=1, new=10)
    assert leaks(found, texts) == []
    leaky = replace(found, folds=(found.drafter,) * len(found.folds))
    assert leaks(leaky, texts) == [text.prompt_id for text in texts]


def test_texts_are_fitted_and_traced_by_their_folds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table that sees a text, in the choice of the prior and in the fit, is that of its fold."""
    base, heads = planted()
    texts = answered(base, prompts_of(1, 9), 12)
    seen: list[tuple[str, bytes]] = []

    def noted(proposer: object, given: Sequence[Text], *more: object) -> Iterator[object]:
        table = proposer.drafter.ngram_table  # type: ignore[attr-defined]
        seen.extend((text.prompt_id, table.ratios.tobytes()) for text in given)
        return positions_of(proposer, given, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "positions_of", noted)
    found = learned(base, heads, texts, tokens=300, new=12)
    tables = [drafter.ngram_table for drafter in found.folds]
    own = {text.prompt_id: tables[found.fold_of[text.prompt_id]] for text in texts}
    assert len({table.ratios.tobytes() for table in tables if table is not None}) == len(tables)
    assert len(seen) == len(texts) * (1 + len(CACHE_PRIORS))
    for prompt_id, ratios in seen:
        table = own[prompt_id]
        assert table is not None
        assert ratios == table.ratios.tobytes()
    folds = [proposer_for(base, heads, fold) for fold in found.folds]
    proposers = [folds[found.fold_of[text.prompt_id]] for text in texts]
    ranks = [one.ranks for one in trace_texts(base, proposers, texts, 253)]
    assert [len(one) for one in ranks] == [len(text.answer) for text in texts]


def test_positions_are_a_share_of_long_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 608 positions about as many are chosen as are to be; all of them where there are fewer."""
    sample = sample_of(tiny_base("llama"), noisy(8))
    monkeypatch.setattr("treeopt.drafting.fit._POSITIONS", 60)
    assert 30 < sum(len(states) for _, _, states in sample.positions) < 100
    monkeypatch.setattr("treeopt.drafting.fit._POSITIONS", 10_000)
    assert sum(len(states) for _, _, states in sample_of(tiny_base("llama"), noisy(8)).positions) == 608


@looped(("depth", "levels"), [(2, 2), (5, 3)])
def test_the_prior_is_chosen_by_three_levels_at_most(depth: int, levels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By all levels of a drafter that has fewer; and by all terms, so that losses are of the same ones."""
    base, fits = tiny_base("llama", 1), FitSample.fits
    asked: list[tuple[int, bool]] = []

    def noted(
        self: FitSample, folds: Sequence[Drafter], positions: int, levels: int, *, whole: bool = False
    ) -> list[tuple[LevelFit, NDArray[np.bool_]]]:
        asked.append((levels, whole))
        return fits(self, folds, positions, levels, whole=whole)

    monkeypatch.setattr(FitSample, "fits", noted)
    fit_drafter(sample_of(base, noisy(2)), [unfitted(base, levels=depth)])
    assert asked == [(levels, True)] * len(CACHE_PRIORS) + [(depth, False)]
