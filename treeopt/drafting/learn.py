"""Learn a drafter from text that the base model writes: greedy answers, and answers sampled at a low temperature.

After each token the model's greedy choice is counted, not the sampled token. Scores on texts that were counted are too
high, so prompts are divided into folds, and what is fitted or traced on the texts of one fold uses an n-gram table of
the other folds. The resulting drafter uses the table of all texts.
"""

import dataclasses
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from treeopt.defaults import LEARN_TOKENS, LEVELS, MAX_DEPTH, MODEL
from treeopt.drafter import LM_HEAD_LEVELS, MAX_WINDOW, TOP_LOGPROBS, WINDOW, Drafter, Level
from treeopt.drafting.count import NgramCounts, count_drawn, count_texts
from treeopt.drafting.fit import FitSample, fit_drafter
from treeopt.errors import check_counts, counted
from treeopt.facts import picked
from treeopt.models.base import Base, Stopwatch
from treeopt.models.draft_module import kind_of, most_levels
from treeopt.models.heads import MedusaHeads
from treeopt.ngram_table import CONTEXT, NgramTable
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
_FEW = 1000  # positions; fewer are too few for the weights and the calibration map of a level


@dataclass(frozen=True)
class Learning:
    """How a drafter is learned.

    Args:
        tokens: sampled tokens beyond the greedy answers, as for `draw`. With 0 nothing is counted either: the n-gram
            table is empty, and the text so far gives the candidates.
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
        check_counts(levels=self.levels, top=self.top)
        check_counts(0, tokens=self.tokens)
        if self.levels > MAX_DEPTH:
            raise ValueError(f"levels {self.levels}: at most {MAX_DEPTH}")
        if self.window != 0 and not CONTEXT <= self.window <= MAX_WINDOW:
            raise ValueError(f"window is {self.window}: 0, or from {CONTEXT} to {MAX_WINDOW}")

    def announcement(self, prompts: PromptSet, max_new_tokens: int, *, given: bool = False) -> str:
        """The parts of the work before it begins, with the numbers of answers and of tokens to sample."""
        # Of given answers only those to first turns are read.
        count = sum(1 if given else 1 + len(prompt.later) for prompt in prompts.prompts)
        verb = "reads" if given else "generates"
        parts = [f"{verb} {count:,} answers of up to {max_new_tokens:,} tokens to {len(prompts.prompts):,} prompts"]
        if self.ngram and self.tokens:
            less = "fewer if all answers repeat"
            parts.append(f"samples {self.tokens:,} more tokens at temperature {self.temperature} ({less})")
            parts.append("counts all tokens")
        return f"learning {', '.join([*parts, 'fits the drafter', 'traces the answers'])}"


@dataclass(frozen=True, eq=False)
class Learned:
    """A drafter, and the drafters of the folds, which trace the texts that it was learned from."""

    drafter: Drafter  # with the n-gram table of all texts
    folds: tuple[Drafter, ...]  # the same levels with tables that leave out the texts of one fold each
    fold_of: dict[str, int]  # by prompt id
    tokens: int  # counted, of greedy and sampled answers
    seconds: dict[str, float] = field(default_factory=dict)  # of each part of the work

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
        yield ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self.seconds.items())

    def warnings(self, positions: int) -> list[str]:
        """A warning where it was fitted to few positions."""
        few = f"fitted to {counted(positions, 'position')}; with fewer than {_FEW:,} the weights are unreliable"
        return [f"warning: {few}"] if positions < _FEW else []

    def as_dict(self) -> dict[str, Any]:
        """What programs read of it: the drafter's weights, too."""
        table = self.drafter.ngram_table
        return {
            **picked(self.drafter, "id", "levels", "source"),
            **picked(self, "tokens", "seconds"),
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
    watch = Stopwatch(base)
    fold_of = _folds(texts)
    num_folds = max(fold_of.values()) + 1
    whole: NgramTable | None = None
    tables: list[NgramTable | None] = [None] * num_folds
    if learning.ngram:
        counts = [NgramCounts(base.vocab_size) for _ in range(num_folds)]
        if learning.tokens:
            by_prompt = {prompt_id: counts[fold] for prompt_id, fold in fold_of.items()}
            sampling = dataclasses.replace(options, temperature=learning.temperature, seed=learning.seed)
            for drawn in draw(base, texts, learning.tokens, sampling, run=run, progress=progress):
                count_drawn(by_prompt[drawn.text.prompt_id], drawn)
            watch.lap("drawing")
            count_texts(base, texts, by_prompt, options, run=run, progress=progress)
        none = NgramCounts(base.vocab_size)
        tables = [none.merged([*counts[:fold], *counts[fold + 1 :]]).table() for fold in range(num_folds)]
        whole = none.merged(counts).table()
        if num_folds == 1:
            tables = [whole]  # nothing to leave out: an empty table would be another kind of drafter
        watch.lap("counting")
    unfitted = _unfitted(base, heads, draft, learning, whole)
    sample = FitSample(base, heads, texts, fold_of, learning.seed, draft=draft)
    folds = fit_drafter(sample, [dataclasses.replace(unfitted, ngram_table=table) for table in tables])
    watch.lap("fitting")
    return Learned(
        drafter=dataclasses.replace(folds[0], ngram_table=whole),
        folds=tuple(folds),
        fold_of=fold_of,
        tokens=0 if whole is None else whole.num_tokens,
        seconds=watch.seconds,
    )


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
