"""Learn a drafter from text that the base model writes.

The text consists of the model's greedy answers to prompts, and of answers sampled at a low temperature, which are
similar. The successor that is counted after each token is the model's greedy choice there, not the sampled token. So
the n-gram table predicts the text of a greedy decoder.

Scores on texts that were counted are too high. So prompts are divided into folds, and what is fitted or traced on the
texts of one fold uses an n-gram table of the other folds. The resulting drafter uses the table of all texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from treeopt.drafter import LEARN_TOKENS, LEVELS, Drafter, Level, NgramTable
from treeopt.drafting.fit_weights import Evidence, evidence, fit_level
from treeopt.drafting.interface import Proposer
from treeopt.drafting.ngram_counts import NgramCounts
from treeopt.drafting.plans import proposer_for
from treeopt.drafting.trace import positions_of
from treeopt.models.base import Base
from treeopt.models.clock import Stopwatch
from treeopt.models.heads import MedusaHeads
from treeopt.progress import Progress, silent
from treeopt.sampling import check_seed, check_temperature
from treeopt.texts.encode import Text
from treeopt.texts.hidden_states import LOGITS_BYTES, hidden_states
from treeopt.texts.samples import Drawing, draw

FOLDS = 4
TOP = 16  # candidates of a level from its head
WINDOW = 512  # most recent tokens that prompt lookup searches
_FIT_POSITIONS = 8000  # positions that a level is fitted to, on average


@dataclass(frozen=True)
class Learning:
    """How a drafter is learned.

    Args:
        tokens: sampled tokens beyond the greedy answers, as for `draw`; 0 samples none.
        temperature: of the sampling.
        seed: of the sampling, and of the choice of positions for the fit.
        ngram: use n-gram table and prompt lookup (drafter `heads+ngram`); else only calibrate the heads' probabilities.
        levels: of the drafter, at least H; those below the heads are drafted by n-gram table and text so far alone.
            Without n-gram table there are H.
        top: candidates of a level from its head.
        window: most recent tokens that prompt lookup searches.

    Raises:
        ValueError: where the seed or the temperature is out of range.
    """

    tokens: int = LEARN_TOKENS
    temperature: float = 0.7
    seed: int = 0
    ngram: bool = True
    levels: int = LEVELS
    top: int = TOP
    window: int = WINDOW

    def __post_init__(self) -> None:
        check_seed(self.seed)
        check_temperature(self.temperature)


@dataclass(frozen=True, eq=False)
class Learned:
    """A drafter, and the drafters of the folds, which trace the texts that it was learned from.

    Args:
        drafter: with the n-gram table of all texts.
        folds: the same levels with tables that leave out the texts of one fold each.
        fold_of: the fold of each prompt id.
        tokens: counted tokens, of greedy and sampled answers.
        seconds: of each part of the work.
    """

    drafter: Drafter
    folds: tuple[Drafter, ...]
    fold_of: dict[str, int]
    tokens: int
    seconds: dict[str, float] = field(default_factory=dict)

    def proposers(self, base: Base, heads: MedusaHeads | None, texts: Sequence[Text]) -> list[Proposer]:
        """For each text, the `Proposer` of the drafter whose table leaves it out."""
        folds = [proposer_for(base, heads, drafter) for drafter in self.folds]
        return [folds[self.fold_of[text.prompt_id]] for text in texts]


def learn(
    base: Base,
    heads: MedusaHeads | None,
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
        heads: its heads, on the base's device and in its dtype; None for a drafter without heads.
        texts: prompts with the base's answers.
        learning: how the drafter is learned.
        max_new_tokens: most tokens of each sampled answer.
        batch_size: prompts in one forward.
        source: origin of the drafter, stored in it.
        progress: called after each batch of sampled texts, and of counted texts.
    """
    num_heads = 0 if heads is None else heads.num_heads
    if not num_heads and not learning.ngram:
        raise ValueError("ngram is off and there are no heads, so nothing drafts")
    watch = Stopwatch(base)
    fold_of = _folds(texts)
    num_folds = max(fold_of.values()) + 1
    whole: NgramTable | None = None
    tables: list[NgramTable | None] = [None] * num_folds
    if learning.ngram:
        drawing = Drawing(learning.tokens, learning.temperature, learning.seed, max_new_tokens, batch_size)
        drawn = list(draw(base, texts, drawing, progress=progress))
        watch.lap("drawing")
        counts = _counts(base, [*texts, *drawn], len(texts), fold_of, batch_size, progress)
        none = NgramCounts(base.vocab_size)
        tables = [none.merged([*counts[:fold], *counts[fold + 1 :]]).table() for fold in range(num_folds)]
        whole = none.merged(counts).table()
        watch.lap("counting")

    def drafter(levels: Sequence[Level], table: NgramTable | None) -> Drafter:
        window = learning.window if learning.ngram else 0
        top = min(learning.top, base.vocab_size) if num_heads else 0
        return Drafter(tuple(levels), num_heads, top, window, table, source or {})

    depth = max(num_heads, learning.levels if learning.ngram else 0)
    unfitted = [drafter([Level()] * depth, table) for table in tables]
    levels = _fitted(base, texts, [proposer_for(base, heads, one) for one in unfitted], fold_of, learning.seed)
    watch.lap("fitting")
    return Learned(
        drafter=drafter(levels, whole),
        folds=tuple(drafter(levels, table) for table in tables),
        fold_of=fold_of,
        tokens=0 if whole is None else whole.num_tokens,
        seconds=watch.seconds,
    )


def _folds(texts: Sequence[Text]) -> dict[str, int]:
    """The fold of each prompt id; all turns of a dialogue share one, and so do equal prompts."""
    first: dict[str, tuple[int, ...]] = {}
    for text in sorted(texts, key=lambda one: one.turn):
        first.setdefault(_row(text), tuple(text.prompt))
    number = {prompt: i for i, prompt in enumerate(dict.fromkeys(first.values()))}
    return {text.prompt_id: number[first[_row(text)]] % FOLDS for text in texts}


def _row(text: Text) -> str:
    """The part of the prompt id that is the same for all turns of a dialogue."""
    return text.prompt_id.partition(".")[0]


def _counts(
    base: Base,
    texts: Sequence[Text],
    greedy: int,
    fold_of: dict[str, int],
    batch_size: int,
    progress: Progress,
) -> list[NgramCounts]:
    """The counts of each fold; the prompts of the first `greedy` texts are counted too."""
    counts = [NgramCounts(base.vocab_size) for _ in range(max(fold_of.values()) + 1)]
    for start in range(0, len(texts), batch_size):
        batch = texts[start : start + batch_size]
        for row, (text, choices) in enumerate(zip(batch, _choices(base, batch), strict=True)):
            first = 0 if start + row < greedy else len(text.prompt) - 1
            counts[fold_of[text.prompt_id]].add([*text.prompt, *text.answer][: len(choices)], choices, first=first)
        progress(start + len(batch), len(texts), "texts counted")
    return counts


@torch.inference_mode()
def _choices(base: Base, texts: Sequence[Text]) -> list[list[int]]:
    """The model's greedy choice after each token of each text, except the last token."""
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
