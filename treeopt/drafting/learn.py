"""Learn a drafter from text that the base model writes: greedy answers, and answers sampled at a low temperature.

After each token the model's greedy choice is counted, not the sampled token. Scores on texts that were counted are too
high, so prompts are divided into folds, and what is fitted or traced on the texts of one fold uses an n-gram table of
the other folds. The resulting drafter uses the table of all texts.

Where no number of tokens is given, text is sampled in stages, until a stage raises the tokens per step by too little.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from treeopt.defaults import LEARN_TOKENS, LEVELS, MAX_DEPTH, MODEL
from treeopt.drafter import LM_HEAD_LEVELS, MAX_WINDOW, TOP_LOGPROBS, WINDOW, Drafter, Level
from treeopt.drafting.count import NgramCounts, count_drawn, count_texts
from treeopt.drafting.fit import FitSample, fit_drafter
from treeopt.drafting.interface import Ints
from treeopt.drafting.plans import proposer_for
from treeopt.drafting.trace import trace_texts
from treeopt.errors import check_counts, counted
from treeopt.facts import picked
from treeopt.models.base import Base, Stopwatch
from treeopt.models.draft_module import kind_of, most_levels
from treeopt.models.heads import MedusaHeads
from treeopt.ngram_table import CONTEXT, NgramTable
from treeopt.optimize.intervals import by_text
from treeopt.optimize.replay import standard_error
from treeopt.progress import Progress, silent
from treeopt.runs.work import ALONE, BatchRun, Chunk
from treeopt.sampling import check_seed, check_temperature
from treeopt.texts.answers import AnswerOptions
from treeopt.texts.encode import Text
from treeopt.texts.prompts import PromptSet
from treeopt.texts.samples import draw

FOLDS = 4
TOP = 16  # candidates of a level from its head
VOTED = 16  # candidates of a level from the cache, where the n-gram table is empty
STAGES = (10_000, 50_000, 200_000, LEARN_TOKENS)  # sampled tokens after which the gain of the last ones is judged
PAYS = 0.02  # least gain of a stage in tokens per step, beyond its error; with less, no more text is sampled
_JUDGED = 64  # texts that a stage is judged on
_APART = 1_000_000  # between the numbers of the first batches of two stages, which seed them
_FEW = 1000  # positions; fewer are too few for the weights and the calibration map of a level


@dataclass(frozen=True)
class Learning:
    """How a drafter is learned.

    Args:
        tokens: sampled tokens beyond the greedy answers, as for `draw`. With 0 nothing is counted either: the n-gram
            table is empty, and the text so far gives the candidates. None: in `STAGES`, until one raises the tokens per
            step by less than `PAYS` or than the gain's standard error, or no text is new; with fewer than `FOLDS`
            different prompts the first stage alone.
        temperature: of the sampling.
        seed: of the sampling, and of the choice of positions for the fit.
        ngram: use n-gram table, cache and prompt lookup; else only calibrate the probabilities of heads or draft model.
        levels: most levels, at least H. Levels below the heads are kept where they pay: where all top-1 guesses down to
            them are right at 1 % of the positions or more. Without `ngram` and without a draft model there are H.
        top: candidates of a level from its head, or from the draft model.
        window: most recent tokens that cache and prompt lookup search.

    Raises:
        ValueError: where a number is out of range.
    """

    tokens: int | None = None
    temperature: float = 0.7
    seed: int = 0
    ngram: bool = True
    levels: int = LEVELS
    top: int = TOP
    window: int = WINDOW

    def __post_init__(self) -> None:
        check_seed(self.seed)
        check_temperature(self.temperature)
        check_counts(levels=self.levels, top=self.top)
        check_counts(0, tokens=0 if self.tokens is None else self.tokens)
        if self.levels > MAX_DEPTH:
            raise ValueError(f"levels {self.levels}: at most {MAX_DEPTH}")
        if self.window != 0 and not CONTEXT <= self.window <= MAX_WINDOW:
            raise ValueError(f"window is {self.window}: 0, or from {CONTEXT} to {MAX_WINDOW}")

    @property
    def stages(self) -> tuple[int, ...]:
        """Sampled tokens at the end of each stage; none where nothing is counted."""
        given = (self.tokens,) if self.tokens else ()
        return (STAGES if self.tokens is None else given) if self.ngram else ()

    def announcement(self, prompts: PromptSet, max_new_tokens: int, *, given: bool = False) -> str:
        """The parts of the work before it begins, with the numbers of answers and of tokens to sample."""
        # Of given answers only those to first turns are read.
        count = sum(1 if given else 1 + len(prompt.later) for prompt in prompts.prompts)
        verb = "reads" if given else "generates"
        parts = [f"{verb} {count:,} answers of up to {max_new_tokens:,} tokens to {len(prompts.prompts):,} prompts"]
        if self.stages:
            less = "fewer if all answers repeat" if self.tokens else "fewer once more text does not pay"
            parts.append(f"samples {self.stages[-1]:,} more tokens at temperature {self.temperature} ({less})")
            parts.append("counts all tokens")
        return f"learning {', '.join([*parts, 'fits the drafter', 'traces the answers'])}"


@dataclass(frozen=True, eq=False)
class Stage:
    """What was learned from so many sampled tokens, by the chain of the likeliest tokens on texts not counted."""

    tokens: int  # that were sampled
    answered: Ints  # [T], tokens of each text; the turns of a dialogue are one
    steps: Ints  # [T], its steps
    seconds: float  # since the stage before, with sampling

    @property
    def tokens_per_step(self) -> float:
        """Of all texts."""
        return float(self.answered.sum() / max(1, self.steps.sum()))

    @property
    def standard_error(self) -> float | None:
        """Of the tokens per step, clustered by text; None below two texts."""
        return standard_error(self.answered, self.steps)

    def pays(self, before: Stage) -> bool:
        """Whether its gain over the stage before is at least `PAYS`, and more than the standard error of the gain."""
        gain = before.steps.sum() / max(1, self.steps.sum()) - 1  # the texts are the same
        error = standard_error(before.steps, self.steps) or 0.0
        return bool(gain >= PAYS and gain > error)

    def as_dict(self) -> dict[str, Any]:
        """For a program."""
        return picked(self, "tokens", "tokens_per_step", "standard_error", "seconds")

    def line(self) -> str:
        """What is printed."""
        error = "" if self.standard_error is None else f" +- {1.645 * self.standard_error:.3f}"
        return f"{self.tokens:>7,} sampled tokens: {self.tokens_per_step:.3f}{error} by a chain, {self.seconds:.1f} s"


@dataclass(frozen=True, eq=False)
class Learned:
    """A drafter, and the drafters of the folds, which trace the texts that it was learned from."""

    drafter: Drafter  # with the n-gram table of all texts
    folds: tuple[Drafter, ...]  # the same levels with tables that leave out the texts of one fold each
    fold_of: dict[str, int]  # by prompt id
    tokens: int  # counted, of greedy and sampled answers
    seconds: dict[str, float] = field(default_factory=dict)  # of each part of the work
    stages: tuple[Stage, ...] = ()  # where their number was to be found
    sampled: int = 0  # tokens

    def lines(self) -> Iterator[str]:
        """What is printed: the text that was counted, the size of the n-gram table, and the seconds."""
        table, source = self.drafter.ngram_table, self.drafter.source.get("learning", {})
        if table is not None and table.empty:
            yield "nothing was counted: the n-gram table is empty, and the text so far gives the candidates"
        elif table is not None:
            sampled = f", and answers sampled at temperature {source.get('temperature')}, seed {source.get('seed')}"
            yield (
                f"learned from {table.num_tokens:,} tokens: {len(self.fold_of)} prompts with their answers"
                f"{sampled if source.get('tokens') else ''}; the model's greedy choice after each token is counted"
            )
            yield f"n-gram table: {table.contexts:,} contexts of 1 to 4 tokens, {table.bytes / 1e6:.1f} MB"
        yield from (stage.line() for stage in self.stages)
        yield ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self.seconds.items())

    def warnings(self, positions: int) -> list[str]:
        """Warnings where it was fitted to few positions, or to texts that its table counts."""
        few = f"fitted to {counted(positions, 'position')}; with fewer than {_FEW:,} the weights are unreliable"
        own = "all texts are of one prompt or dialogue, so each is judged by counts of itself; figures are too high"
        same = len(self.folds) == 1 and self.drafter.ngram_table is not None and not self.drafter.ngram_table.empty
        return [f"warning: {text}" for text, holds in ((few, positions < _FEW), (own, same)) if holds]

    def as_dict(self) -> dict[str, Any]:
        """What programs read of it: the drafter's weights, too."""
        table = self.drafter.ngram_table
        return {
            **picked(self.drafter, "id", "levels", "source"),
            **picked(self, "tokens", "seconds"),
            "stages": [stage.as_dict() for stage in self.stages],
            "contexts": 0 if table is None else table.contexts,
            "bytes": 0 if table is None else table.bytes,
        }


def learned_from_these(drafter: Drafter | None, prompts: PromptSet) -> Iterator[str]:
    """A warning where a drafter was learned from these prompts."""
    source = {} if drafter is None else drafter.source
    first, last = source.get("rows", (0, -1))
    known = prompts.sha256 in source.get("prompts", {})
    if drafter is not None and known and first <= prompts.prompts[-1].row and prompts.prompts[0].row <= last:
        yield (
            "warning: the drafter was learned from these prompts, so its figures here are higher than on other prompts "
            f"(--drafter {drafter.name} traces each text by a drafter that was learned without it)"
        )


def learn(
    base: Base,
    heads: MedusaHeads | None,
    texts: Sequence[Text],
    learning: Learning,
    *,
    options: AnswerOptions,
    draft: Base | None = None,
    run: BatchRun[Chunk] = ALONE,
    progress: Progress = silent,
) -> Learned:
    """Learn a drafter from prompts with the base's answers, and from others that are sampled with their `options`."""
    watch, began = Stopwatch(base), time.monotonic()
    fold_of = _folds(texts)
    counts = [NgramCounts(base.vocab_size) for _ in range(max(fold_of.values()) + 1)] if learning.ngram else None
    given = _Given(base, heads, texts, learning, draft, fold_of)
    if counts is None or not learning.stages:
        return given.fitted(counts, watch)
    by_prompt = {prompt_id: counts[fold] for prompt_id, fold in fold_of.items()}
    sampling = dataclasses.replace(options, temperature=learning.temperature, seed=learning.seed)
    count_texts(base, texts, by_prompt, options, run=run, progress=progress)
    watch.lap("counting")
    learned, stages, sampled = None, list[Stage](), 0
    judged = learning.tokens is None and len(counts) == FOLDS  # else each text would be judged by counts of itself
    for number, most in enumerate(learning.stages if judged else learning.stages[:1]):
        asked, before = most - sampled, sampled
        for drawn in draw(base, texts, asked, sampling, first=number * _APART, run=run, progress=progress):
            count_drawn(by_prompt[drawn.text.prompt_id], drawn)
            sampled += len(drawn.choices)
        watch.lap("drawing")
        learned = given.fitted(counts, watch)
        if judged:
            make = functools.partial(given.judged, learned, options.batch_size)
            [(arrays, _)] = run.each("judged", [number], make, progress)  # by one process, so that all go on alike
            watch.lap("judging")
            stages.append(Stage(sampled, arrays["answered"], arrays["steps"], time.monotonic() - began))
            began = time.monotonic()
            if (number and not stages[-1].pays(stages[-2])) or sampled - before < asked:
                break
    assert learned is not None
    return dataclasses.replace(learned, stages=tuple(stages), sampled=sampled)


@dataclass(frozen=True, eq=False)
class _Given:
    """What a drafter is learned for and from; the folds by prompt id."""

    base: Base
    heads: MedusaHeads | None
    texts: Sequence[Text]
    learning: Learning
    draft: Base | None
    fold_of: dict[str, int]

    def fitted(self, counts: Sequence[NgramCounts] | None, watch: Stopwatch) -> Learned:
        """The drafter of counts of each fold, of which those of nothing make an empty table; None for no table."""
        whole: NgramTable | None = None
        tables: list[NgramTable | None] = [None] * (max(self.fold_of.values()) + 1)
        if counts is not None:
            none = NgramCounts(self.base.vocab_size)
            tables = [none.merged([*counts[:fold], *counts[fold + 1 :]]).table() for fold in range(len(counts))]
            whole = none.merged(counts).table()
            if len(counts) == 1:
                tables = [whole]  # nothing to leave out: an empty table would be another kind of drafter
            watch.lap("counting")
        unfitted = _unfitted(self.base, self.heads, self.draft, self.learning, whole)
        folds = fit_drafter(self._sample, [dataclasses.replace(unfitted, ngram_table=table) for table in tables])
        watch.lap("fitting")
        return Learned(
            drafter=dataclasses.replace(folds[0], ngram_table=whole),
            folds=tuple(folds),
            fold_of=self.fold_of,
            tokens=0 if whole is None else whole.num_tokens,
            seconds=watch.seconds,
        )

    @functools.cached_property
    def _sample(self) -> FitSample:
        return FitSample(self.base, self.heads, self.texts, self.fold_of, self.learning.seed, draft=self.draft)

    def judged(self, learned: Learned, at_once: int, _: int) -> Chunk:
        """Tokens and steps of some texts by the chain of the likeliest tokens, each by the drafter without it."""
        folds = [proposer_for(self.base, self.heads, fold, self.draft) for fold in learned.folds]
        some = sorted(self.texts[:: -(-len(self.texts) // _JUDGED)], key=lambda text: self.fold_of[text.prompt_id])
        tokens, steps = np.zeros(len(some), np.int64), np.zeros(len(some), np.int64)
        for start in range(0, len(some), at_once):
            part = some[start : start + at_once]
            proposers = [folds[self.fold_of[text.prompt_id]] for text in part]
            for i, traces in enumerate(trace_texts(self.base, proposers, part, 1), start=start):
                advance = 1 + (traces.ranks == 0).cumprod(1).sum(1)
                while tokens[i] < len(advance):
                    tokens[i] += advance[tokens[i]]
                    steps[i] += 1
        first = {text.dialogue: str(text.answer) for text in reversed(some)}  # equal ones are of one cluster, too
        by_cluster = by_text([first[text.dialogue] for text in some], tokens, steps)
        return dict(zip(("answered", "steps"), by_cluster, strict=True)), {}


def _unfitted(
    base: Base, heads: MedusaHeads | None, draft: Base | None, learning: Learning, table: NgramTable | None
) -> Drafter:
    """The drafter before its numbers are fitted."""
    num_heads = 0 if heads is None else heads.num_heads
    depth = max(1, num_heads, learning.levels if learning.ngram or draft is not None else 0)
    depth = depth if draft is None else min(depth, most_levels(draft.model))
    return Drafter(
        levels=(Level(),) * depth,
        num_heads=num_heads,
        top=min(learning.top, base.vocab_size),
        window=learning.window if learning.ngram else 0,
        ngram_table=table,
        voted=VOTED if table is not None and table.empty else 0,
        lm_head_levels=0 if num_heads or draft is not None else min(LM_HEAD_LEVELS, depth),
        top_logprobs=0 if table is None else min(TOP_LOGPROBS, base.vocab_size),
        draft="" if draft is None else draft.fingerprint,
        draft_kind=MODEL if draft is None else kind_of(draft.model),
    )


def _folds(texts: Sequence[Text]) -> dict[str, int]:
    """The fold of each prompt id; all turns of a dialogue share one, and so do equal prompts."""
    first: dict[str, bytes] = {}
    for text in sorted(texts, key=lambda one: one.turn):
        first.setdefault(text.dialogue, array("i", text.prompt).tobytes())
    number = {prompt: i for i, prompt in enumerate(dict.fromkeys(first.values()))}
    return {text.prompt_id: number[first[text.dialogue]] % FOLDS for text in texts}
