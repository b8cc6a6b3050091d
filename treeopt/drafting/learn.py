"""Learn: all that a corrected drafter needs, from the base model and any prompts.

The base model writes: its greedy answers, and answers drawn at a low temperature, which lie close to them. Every token
of these texts is a context, and what the model would write after it greedily (not what was drawn) is the successor that
counts. So a token of text is worth more than in a corpus, and the table learns what a greedy decoder will ask.

Whoever counts the very text that he then scores flatters himself. So prompts fall into folds, and whatever is fitted or
traced on the texts of one fold rests on tables of the others; the drafter that is kept has them all.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from treeopt.drafter import LEARN_TOKENS, Drafter, Level, NgramTable
from treeopt.drafting.fit_weights import Evidence, evidence, fit_level
from treeopt.drafting.interface import Proposer
from treeopt.drafting.ngram_counts import NgramCounts
from treeopt.drafting.plans import proposer_for
from treeopt.drafting.trace import positions_of
from treeopt.models.base import Base
from treeopt.models.heads import MedusaHeads
from treeopt.progress import Progress, silent
from treeopt.sampling import check_seed, check_temperature
from treeopt.texts.encode import Text
from treeopt.texts.hidden_states import LOGITS_BYTES, hidden_states
from treeopt.texts.samples import Drawing, draw

FOLDS = 4
TOP = 16  # candidates that a level takes from its head
WINDOW = 512  # tokens that are searched for matches
EXTRA_DEPTH = 3  # beyond the heads
_FIT_POSITIONS = 8000  # of each level's fit


@dataclass(frozen=True)
class Learning:
    """How a drafter is learned.

    Args:
        tokens: drawn beyond the answers, as `draw` says; 0 draws none.
        temperature: of the drawing.
        seed: of the drawing, and of the positions that are fitted to.
        ngram: whether transitions and matches are used at all; else only the heads' probabilities are calibrated.
        extra_depth: beyond the heads, drafted by transitions and matches alone.
        top: candidates that a level takes from its head.
        window: tokens that are searched for matches.

    Raises:
        ValueError: where the seed is negative or beyond 63 bits.
    """

    tokens: int = LEARN_TOKENS
    temperature: float = 0.7
    seed: int = 0
    ngram: bool = True
    extra_depth: int = EXTRA_DEPTH
    top: int = TOP
    window: int = WINDOW

    def __post_init__(self) -> None:
        check_seed(self.seed)
        check_temperature(self.temperature)


@dataclass(frozen=True, eq=False)
class Learned:
    """A drafter, and those that traced its own calibration.

    Args:
        drafter: from all texts.
        folds: the same numbers over tables without the texts of one fold each.
        fold_of: the fold of each prompt id.
        tokens: counted, of answers and drawn texts.
        seconds: of each part of the work.
    """

    drafter: Drafter
    folds: tuple[Drafter, ...]
    fold_of: dict[str, int]
    tokens: int
    seconds: dict[str, float] = field(default_factory=dict)

    def proposers(self, base: Base, heads: MedusaHeads, texts: Sequence[Text]) -> list[Proposer]:
        """For each text the drafter that has not counted it."""
        folds = [proposer_for(base, heads, drafter) for drafter in self.folds]
        return [folds[self.fold_of[text.prompt_id]] for text in texts]


def learn(
    base: Base,
    heads: MedusaHeads,
    texts: Sequence[Text],
    learning: Learning,
    *,
    max_new_tokens: int,
    batch_size: int = 16,
    source: dict[str, Any] | None = None,
    progress: Progress = silent,
) -> Learned:
    """Learn a drafter.

    Args:
        base: the base model.
        heads: its heads, on the base's device and in its dtype.
        texts: prompts with the base's own answers.
        learning: how.
        max_new_tokens: budget of each drawn answer.
        batch_size: prompts run together.
        source: what the record says of its origin.
        progress: told after each batch of drawn texts, and of counted ones.
    """
    clock = _Clock()
    fold_of = _folds(texts)
    folds = range(max(fold_of.values()) + 1)
    tables: list[NgramTable | None] = [None for _ in folds]
    whole: NgramTable | None = None
    seen = 0
    if learning.ngram:
        drawing = Drawing(learning.tokens, learning.temperature, learning.seed, max_new_tokens, batch_size)
        drawn = list(draw(base, texts, drawing, progress=progress))
        clock.lap("drawing")
        counts = _counts(base, [*texts, *drawn], len(texts), fold_of, len(folds), batch_size, progress)
        none = NgramCounts(base.vocab_size)
        tables = [none.merged([one for f, one in enumerate(counts) if f != fold]).table() for fold in folds]
        whole = none.merged(counts).table()
        seen = whole.num_tokens
        clock.lap("counting")
    levels = heads.num_heads + (learning.extra_depth if learning.ngram else 0)
    window = learning.window if learning.ngram else 0

    def drafter(numbers: Sequence[Level], table: NgramTable | None) -> Drafter:
        return Drafter(tuple(numbers), heads.num_heads, min(learning.top, base.vocab_size), window, table, source or {})

    plain = [drafter([Level()] * levels, table) for table in tables]
    numbers = _fitted(base, texts, [proposer_for(base, heads, one) for one in plain], fold_of, learning.seed)
    clock.lap("fitting")
    return Learned(
        drafter=drafter(numbers, whole),
        folds=tuple(drafter(numbers, table) for table in tables),
        fold_of=fold_of,
        tokens=seen,
        seconds=clock.laps,
    )


class _Clock:
    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name], self._last = now - self._last, now


def _folds(texts: Sequence[Text]) -> dict[str, int]:
    """A fold for each prompt id: one for all turns of a dialogue, and for prompts that are the same."""
    first: dict[str, tuple[int, ...]] = {}
    for text in sorted(texts, key=lambda one: one.turn):
        first.setdefault(_row(text), tuple(text.prompt))
    number = {prompt: i for i, prompt in enumerate(dict.fromkeys(first.values()))}
    return {text.prompt_id: number[first[_row(text)]] % FOLDS for text in texts}


def _row(text: Text) -> str:
    """What the ids of all turns of a dialogue have in common."""
    return text.prompt_id.partition(".")[0]


def _counts(
    base: Base,
    texts: Sequence[Text],
    known: int,
    fold_of: dict[str, int],
    folds: int,
    batch_size: int,
    progress: Progress,
) -> list[NgramCounts]:
    """The counts of each fold; prompts are counted with the first `known` texts only."""
    counts = [NgramCounts(base.vocab_size) for _ in range(folds)]
    for start in range(0, len(texts), batch_size):
        batch = texts[start : start + batch_size]
        for row, (text, choices) in enumerate(zip(batch, _choices(base, batch), strict=True)):
            first = 0 if start + row < known else len(text.prompt) - 1
            counts[fold_of[text.prompt_id]].add([*text.prompt, *text.answer][: len(choices)], choices, first=first)
        progress(start + len(batch), len(texts), "texts counted")
    return counts


@torch.inference_mode()
def _choices(base: Base, texts: Sequence[Text]) -> list[list[int]]:
    """For each token of each text but the last, what the model would write after it."""
    whole = [Text(text.prompt_id, text.prompt[:1], [*text.prompt[1:], *text.answer]) for text in texts]
    size = max(1, LOGITS_BYTES // (base.vocab_size * 4))
    found = []
    for hidden in hidden_states(base, whole):
        parts = [base.lm_head(part).argmax(-1) for part in torch.split(hidden, size)]
        found.append(torch.cat(parts).tolist())
    return found


def _fitted(
    base: Base, texts: Sequence[Text], proposers: Sequence[Proposer], fold_of: dict[str, int], seed: int
) -> list[Level]:
    """The numbers of every level, fitted on a sample of the answers' positions; `proposers` are those of the folds."""
    share = min(1.0, _FIT_POSITIONS / max(1, sum(len(text.answer) for text in texts)))
    rng = np.random.default_rng(seed)
    parts: list[list[Evidence]] = [[] for _ in range(proposers[0].depth)]
    for text in texts:
        chosen = rng.random(len(text.answer)) < share
        if not chosen.any():
            continue
        proposer = proposers[fold_of[text.prompt_id]]
        for positions in positions_of(proposer, [text], hidden_states(base, [text]), chosen):
            nodes, each = positions.root, np.arange(len(positions.true))
            for level, found in enumerate(parts):
                true = positions.true[:, level]
                found.append(evidence(positions.session.features(nodes), true).only(true >= 0))
                nodes = positions.session.follow(nodes, each, np.maximum(true, 0))
    return [fit_level(found) for found in parts]
