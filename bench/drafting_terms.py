"""Ablation of the drafters heads+ngram and ngram: tokens per step without parts of the score."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from drafting_halves import TOP_K, Pair, others, traces
from numpy.typing import NDArray

from treeopt.calibrate.pipeline import as_calibration
from treeopt.calibrate.results import CalibrationRun
from treeopt.calibration import Calibration
from treeopt.drafter import CACHE_LENGTHS, MAX_MATCH, Drafter, Level
from treeopt.drafting.count import NgramCounts
from treeopt.drafting.fit import Evidence, FitSample, fit_drafter
from treeopt.drafting.interface import Proposer
from treeopt.drafting.learn import VOTED, Learning
from treeopt.drafting.plans import proposer_for
from treeopt.drafting.trace import trace_texts
from treeopt.models.compatibility import heads_like
from treeopt.ngram_table import NgramTable
from treeopt.optimize.replay import replay
from treeopt.optimize.tree_builder import build_tree
from treeopt.texts.answers import AnswerOptions, answer_all
from treeopt.texts.encode import Text, encode_prompts
from treeopt.texts.prompts import PromptSet

BATCH = 64
NGRAM = 4  # tokens; a text is repetitive by the share of its n-grams that occurred in it before


@dataclass(frozen=True)
class Variant:
    """A drafter without some parts.

    Args:
        without: terms of the score that are left out.
        levels: None for all.
        table: False for an empty n-gram table.
        lookback: False without cache and prompt lookup.
    """

    without: tuple[str, ...] = ()
    levels: int | None = None
    table: bool = True
    lookback: bool = True


CACHE = 3 + MAX_MATCH
TERMS = {  # of a score: their columns in `Evidence.features`
    "head": slice(0, 1),
    "prior": slice(1, 2),
    "ngram": slice(2, 3),
    "prompt_lookup": slice(3, CACHE),
    "cache": slice(CACHE, CACHE + len(CACHE_LENGTHS)),
}


@dataclass(frozen=True, eq=False)
class AblatedSample(FitSample):
    """A sample in which the terms `without` of the score are 0."""

    without: tuple[str, ...] = ()

    def evidence(
        self, folds: Sequence[Drafter], positions: int, levels: int
    ) -> tuple[list[list[Evidence]], NDArray[np.bool_]]:
        parts, known = super().evidence(folds, positions, levels)
        for part in itertools.chain(*parts):
            for term in self.without:
                part.features[:, :, TERMS[term]] = 0
        return parts, known


COMMON = {
    "all": Variant(),
    "no cache": Variant(("cache",)),
    "no prompt lookup": Variant(("prompt_lookup",)),
    "neither": Variant(lookback=False),
    "no unigram": Variant(("prior",)),
    "empty n-gram table": Variant(table=False),
    "empty table, no cache": Variant(("cache",), table=False),
    "5 levels": Variant(levels=5),
    "12 levels": Variant(levels=12),
}
NO_HEADS = {**COMMON, "no LM head": Variant(("head",)), "empty table, no LM head": Variant(("head",), table=False)}


@dataclass(frozen=True)
class Texts:
    """The answered texts of both halves, and which of the second are repetitive: at least as the median text."""

    first: list[Text]
    second: list[Text]
    repetitive: frozenset[str]


def terms(pair: Pair, sizes: Sequence[int], learning: Learning, *, tiny: bool = False) -> None:
    """Print tokens per step of static trees, and at 16 nodes those on repetitive and on other texts."""
    second = _answered(pair, pair.second_half)
    texts = Texts(_answered(pair, pair.first_half), second, _repetitive(second))
    plain = traces(pair, evaluated=False).calibration
    later = traces(pair, evaluated=True).calibration
    later = later.select(others(plain, later))
    trees = [build_tree(plain, nodes, top_k=TOP_K, values="independent", weights="uniform") for nodes in sizes]
    medusa = [replay(tree, later).tokens_per_step for tree in trees]
    print(
        "ratios to the Medusa tree at",
        *sizes,
        "nodes | tokens per step on repetitive texts, on others, at",
        sizes[-3:][0],
    )
    run = traces(pair, evaluated=False, learning=learning)
    for heads, variants in ((True, COMMON), (False, NO_HEADS)):
        for name, variant in list(variants.items())[: 2 if tiny else None]:
            fitted, evaluated = _variant(pair, run, texts, variant, heads=heads)
            label = f"{'heads+ngram' if heads else 'ngram'}: {name}"
            say(label, fitted, evaluated, sizes, medusa, texts.repetitive)


def say(
    label: str,
    fitted: Calibration,
    evaluated: Calibration,
    sizes: Sequence[int],
    medusa: Sequence[float],
    repetitive: frozenset[str],
) -> None:
    """Print one line."""
    built = [build_tree(fitted, nodes, top_k=TOP_K) for nodes in sizes]
    ratios = [replay(tree, evaluated).tokens_per_step / one for tree, one in zip(built, medusa, strict=True)]
    parts: list[list[int]] = [[], []]
    for text, prompt in enumerate(evaluated.prompt_ids):
        parts[prompt not in repetitive].append(text)
    tree = built[min(1, len(built) - 1)]
    apart = [f"{replay(tree, evaluated.select(part)).tokens_per_step:.3f}" if part else "-" for part in parts]
    print(f"{label:40}", *(f"{ratio:.3f}" for ratio in ratios), "|", *apart, flush=True)


def _answered(pair: Pair, prompts: PromptSet) -> list[Text]:
    encoded = encode_prompts(pair.base, prompts, pair.new_tokens)
    return answer_all(pair.base, encoded.texts, AnswerOptions(pair.new_tokens, BATCH))[0]


def _repetitive(texts: Sequence[Text]) -> frozenset[str]:
    """The prompt ids of the texts with at least the median share of repeated n-grams in their answers."""
    shares = {text.prompt_id: _repeated(text) for text in texts}
    median = np.median(list(shares.values()))
    return frozenset(prompt for prompt, share in shares.items() if share >= median)


def _repeated(text: Text) -> float:
    """The share of an answer's n-grams that occurred before in the text."""
    tokens = [*text.prompt, *text.answer]
    known: set[tuple[int, ...]] = set()
    repeated = 0
    for end in range(NGRAM, len(tokens) + 1):
        ngram = tuple(tokens[end - NGRAM : end])
        repeated += ngram in known and end > len(text.prompt)
        known.add(ngram)
    return repeated / len(text.answer)


def _variant(
    pair: Pair, run: CalibrationRun, texts: Texts, variant: Variant, *, heads: bool
) -> tuple[Calibration, Calibration]:
    """Cross-fitted traces of the first half, and traces of the second."""
    learned = run.learned
    assert learned is not None
    used = heads_like(pair.base, pair.loaded.heads) if heads else None
    start = _unfitted(learned.drafter, variant, heads=heads)
    empty = NgramCounts(pair.base.vocab_size).table()

    def with_table(drafter: Drafter, table: NgramTable | None) -> Drafter:
        return dataclasses.replace(drafter, ngram_table=table if variant.table else empty)

    sample = AblatedSample(pair.base, used, texts.first, learned.fold_of, 0, without=variant.without)
    folds = fit_drafter(sample, [with_table(start, fold.ngram_table) for fold in learned.folds])
    by_fold = [proposer_for(pair.base, used, fold) for fold in folds]
    whole = proposer_for(pair.base, used, with_table(folds[0], learned.drafter.ngram_table))
    first = [by_fold[learned.fold_of[text.prompt_id]] for text in texts.first]
    fitted = _traced(pair, run, first, texts.first)
    evaluated = _traced(pair, run, [whole] * len(texts.second), texts.second)
    return fitted, evaluated.select(others(fitted, evaluated))


def _unfitted(drafter: Drafter, variant: Variant, *, heads: bool) -> Drafter:
    """The drafter without fitted numbers, as deep as the variant."""
    levels = (Level(),) * (variant.levels or drafter.depth)
    return dataclasses.replace(
        drafter,
        levels=levels,
        num_heads=drafter.num_heads if heads else 0,
        lm_head_levels=0 if heads else min(3, len(levels)),
        window=drafter.window if variant.lookback else 0,
        voted=0 if variant.table else VOTED,
    )


def _traced(pair: Pair, run: CalibrationRun, proposers: Sequence[Proposer], texts: Sequence[Text]) -> Calibration:
    traced = []
    for start in range(0, len(texts), BATCH):
        part = slice(start, start + BATCH)
        traced += trace_texts(pair.base, proposers[part], texts[part], TOP_K)
    return as_calibration(texts, traced, TOP_K, run.calibration.provenance)
