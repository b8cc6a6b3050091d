"""What validations of all acceptance rules share: options, inputs, the runs of every text, and their prediction."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from pydantic import TypeAdapter
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from treeopt.calibrate.pipeline import as_calibration
from treeopt.calibration import Calibration, Provenance
from treeopt.decode.decoder import TreeDecoder
from treeopt.decode.rules import Greedy, Rule, Sample, Typical
from treeopt.drafter import Drafter
from treeopt.drafting.memory import Memory, search
from treeopt.drafting.plans import proposer_for
from treeopt.drafting.trace import Target, TextTraces, trace_texts
from treeopt.errors import Code, TreeoptError, check_counts
from treeopt.evaluate.baselines import GENERATE, STOCK, TREE, WARMING, Baseline, Call, Metrics, Run, Trial, warm_up
from treeopt.facts import picked
from treeopt.files.trees import plan_id
from treeopt.models.base import Base
from treeopt.models.given import GivenModel
from treeopt.models.heads import MedusaHeads
from treeopt.models.tensors import fingerprint
from treeopt.optimize.per_step import replay_plan, replay_schedule
from treeopt.optimize.replay import Replay
from treeopt.policy import TreePolicy
from treeopt.progress import Progress
from treeopt.runs.work import ALONE, BatchRun
from treeopt.schedule import Planned, Schedule
from treeopt.texts.encode import Text, next_turn
from treeopt.texts.prompts import Skipped
from treeopt.traces import MAX_RANKS
from treeopt.tree import Tree

DRAWS = 1000  # texts drawn of each prompt for the test of their distribution, by each decoder
JUDGED = 5  # differing texts judged by default: each takes a float64 forward of the model on the CPU
_WARM_UP_TOKENS = 8

RunsByName = dict[str, list[Run]]  # by baseline, one run a repeat
_BATCH = TypeAdapter(list[list[RunsByName]])  # of each turn of a batch, the runs of each text


@dataclass(frozen=True)
class ValidateOptions:
    """How texts are decoded and judged.

    Args:
        max_new_tokens: maximum number of new tokens of each text.
        repeats: runs of each text and baseline.
        batch_size: prompts decoded together, by every baseline.
        chat_template: apply the tokenizer's chat template to requests, where it has one.
        judge: number of differing texts to judge, as in `Validation.judged`; 0 judges none.
        draft: the draft model of the drafter, in any form that models have; None where it has none.
        acceptance: `Greedy()`, `Sample(...)` or `Typical(...)`.
        draws: under `Sample`, texts drawn of each prompt whose distribution is tested; 0 tests none.
        memory: earlier texts, under `Greedy`; those of a batch are added when all of them have ended.
        division: the processes of a command, which divide the batches; see `divided_validate`.

    Raises:
        TypeError: where the rule is another one.
        ValueError: where a number is not whole or out of range, or the temperature of the rule is 0.
    """

    max_new_tokens: int = 128
    repeats: int = 1
    batch_size: int = 1
    chat_template: bool = True
    judge: int = JUDGED
    draft: GivenModel | None = None
    acceptance: Rule = field(default_factory=Greedy)
    draws: int = DRAWS
    memory: Memory | None = None
    division: BatchRun[Any] = ALONE

    def __post_init__(self) -> None:
        check_counts(max_new_tokens=self.max_new_tokens, repeats=self.repeats, batch_size=self.batch_size)
        check_counts(0, judge=self.judge, draws=self.draws)
        if not isinstance(self.acceptance, (Greedy, Sample, Typical)):
            kind = type(self.acceptance).__name__
            raise TypeError(f"acceptance is Greedy(), Sample(...) or Typical(...), not an object of type {kind}")
        if getattr(self.acceptance, "temperature", None) == 0:
            raise ValueError("temperature 0 is greedy decoding: validate it as Greedy()")


@dataclass(frozen=True)
class Measured:
    """What the validations of all rules have in common."""

    metrics: Metrics  # tokens per step and speed of all texts
    # replay over the texts of stock generate, under sampling with the expected drafts of every step; under typical
    # acceptance over the texts that the tree decoded
    predicted: Replay
    expected_tokens_per_step: float | None  # from the tree file; None where it has none
    nodes: int  # N of the tree; the maximum for a tree chosen per step
    skipped: tuple[Skipped, ...]  # prompts, and later turns of dialogues, that do not fit into the context
    left_out: Mapping[str, str]  # baselines that do not support this model or batch size, and their error messages
    repeats: int  # as in `ValidateOptions`; under sampling each gives texts of its own, which are trials
    batch_size: int  # texts decoded together
    made_by: dict[str, str]  # versions, device, threads, dtype, attention

    @property
    def texts(self) -> tuple[Text, ...]:
        """Prompts and answers of stock generate, one for each trial of the metrics."""
        return tuple(trial.text for trial in self.metrics.trials)

    @property
    def measured_by_depth(self) -> tuple[float, ...]:
        """Share of steps that accepted d drafts or more, d = 1 .. D."""
        lengths = np.concatenate([trial.runs[TREE][0].step_lengths for trial in self.metrics.trials])
        return tuple(float(np.mean(lengths > d)) for d in range(1, self.predicted.depth + 1))

    @property
    def tokens_per_step(self) -> float:
        """tau: all tokens / all steps."""
        return self.metrics.tokens_per_step()

    @property
    def overhead(self) -> float | None:
        """Seconds of a tree step / seconds of an autoregressive step; the median repeat, None where not timed."""
        spread = self.metrics.overhead
        return None if spread is None else spread.median

    @property
    def speedup(self) -> float | None:
        """tau / overhead: tokens per second of the tree / of autoregressive decoding; median, None where not timed."""
        spread = self.metrics.speedup()
        return None if spread is None else spread.median

    def check(self, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        """Raise E501 where the texts should be lossless and are not; of a lossy rule none are."""

    def check_minima(self, tokens_per_step: float | None = None, speedup: float | None = None) -> None:
        """Raise E505 where a metric is below its minimum, or was not measured."""
        timed = "no speedup was measured" if self.speedup is None else f"speedup {self.speedup:.3f}"
        tau = f"{self.tokens_per_step:.4f} tokens per step"
        checks = (
            ("--min-tokens-per-step", tokens_per_step, self.tokens_per_step, tau),
            ("--min-speedup", speedup, self.speedup, timed),
        )
        below = {
            option: f"{what}, the minimum is {least:g}"
            for option, least, value, what in checks
            if least is not None and (value is None or value < least)
        }
        if below:
            raise TreeoptError(Code.BELOW_THRESHOLD, "; ".join(below.values()), at=", ".join(below))


@dataclass(frozen=True, eq=False)
class Inputs:
    """The checked arguments of `validate`; `skipped` are prompts that do not fit into the context."""

    base: Base
    heads: MedusaHeads | None
    tree: Planned
    drafter: Drafter | None
    draft: Base | None
    texts: Sequence[Text]
    skipped: tuple[Skipped, ...]
    options: ValidateOptions
    before: Memory | None = None  # the memory before the first text

    def decoder(self, rule: Rule) -> TreeDecoder:
        given: Any = {"drafter": self.drafter, "draft": self.draft, "memory": self.options.memory}
        made = TreeDecoder(self.base, self.heads, self.tree, acceptance=rule, **given)
        made.memory = None  # `decode_all` adds each text once
        return made

    @property
    def content(self) -> dict[str, str]:
        """Ids of all that drafts, for the comparison of processes."""
        return {
            "tree": plan_id(self.tree),
            "drafter": "" if self.drafter is None else self.drafter.id,
            "heads_id": "" if self.heads is None else fingerprint(self.heads),
            "draft_id": "" if self.draft is None else self.draft.fingerprint,
        }

    def traces(
        self, texts: Sequence[Text], scores: Callable[[Tensor], Tensor] | None = None, batches: Sequence[int] = ()
    ) -> Calibration:
        """Teacher-forced traces; with `scores`, the probabilities of the candidates that are their softmax, too.

        `batches` has the number of each text's batch, for the memory.
        """
        target = None if scores is None else Target(scores, min(num_ranks(self.tree), self.base.vocab_size))
        given = self.base, self.heads, texts, self.drafter, self.draft
        stream = None if self.before is None else Stream(self.before.copy(), batches)
        return trace(*given, steps=step_depth(self.tree), target=target, stream=stream)

    def measured(self, runs: Runs, traces: Calibration) -> dict[str, Any]:
        """The fields of `Measured`, predicted from traces of as many texts."""
        if isinstance(self.tree, Schedule):
            prompts, expected = [len(text.prompt) for text in runs.texts], None
            predicted = replay_schedule(self.tree, traces, prompts, batch=self.options.batch_size)
        else:
            predicted, expected = replay_plan(self.tree, traces), self.tree.expected
        rows = zip(runs.trials, predicted.sums.steps.tolist(), predicted.sums.tokens.tolist(), strict=True)
        return {
            "metrics": Metrics(tuple(Trial(one.text, one.runs, steps, tokens) for one, steps, tokens in rows)),
            "predicted": predicted,
            "expected_tokens_per_step": expected.replay if expected else None,
            "nodes": self.tree.nodes,
            "skipped": (*self.skipped, *runs.skipped),
            "left_out": runs.left_out,
            "repeats": self.options.repeats,
            "batch_size": self.options.batch_size,
            "made_by": made_by(self.base),
        }


def made_by(base: Base) -> dict[str, str]:
    """Versions, device, threads, dtype, attention, and whether forwards over trees are compiled."""
    return {
        **base.versions(),
        "threads": str(torch.get_num_threads()),
        "dtype": base.dtype_name,
        "attention": base.model.config._attn_implementation,
        **({"compiled": "yes"} if base.compile else {}),
    }


class Stream(NamedTuple):
    """Texts that are decoded with a memory, and the number of each one's batch; by default each is alone."""

    memory: Memory
    batches: Sequence[int] = ()


def trace(
    base: Base,
    heads: MedusaHeads | None,
    texts: Sequence[Text],
    drafter: Drafter | None = None,
    draft: Base | None = None,
    *,
    steps: int = 0,
    target: Target | None = None,
    stream: Stream | None = None,
) -> Calibration:
    """Ranks on these texts, one teacher-forced pass a text; with `steps`, also the per-step trees of that depth.

    In a `stream` each text is drafted with those of earlier batches in the memory, to which they are added.
    """
    top_k, proposer = min(MAX_RANKS, base.vocab_size), proposer_for(base, heads, drafter, draft)
    if stream is not None:
        proposer = search(proposer, stream.memory)
    traced: dict[int, TextTraces] = {}
    numbers = stream.batches if stream is not None and stream.batches else range(len(texts))
    for _, batch in itertools.groupby(sorted(range(len(texts)), key=numbers.__getitem__), key=numbers.__getitem__):
        together = list(batch)
        for i in together:
            [traced[i]] = trace_texts(base, [proposer], [texts[i]], top_k, step_depth=steps, target=target)
        if stream is not None:
            stream.memory.add(*([*texts[i].prompt, *texts[i].answer] for i in together))
    provenance = Provenance("", "", "", "", {}, drafter_id=drafter.id if drafter else "")
    return as_calibration(texts, [traced[i] for i in range(len(texts))], top_k, provenance)


def step_depth(tree: Planned) -> int:
    """Depth of the trees chosen per step; 0 for a static tree."""
    if isinstance(tree, Schedule):
        return max(map(step_depth, tree.plans))
    return tree.depth if isinstance(tree, TreePolicy) else 0


def num_ranks(tree: Planned) -> int:
    """The number of candidates of a node that may be nodes of the tree, at least 1."""
    if isinstance(tree, Schedule):
        return max(map(num_ranks, tree.plans))
    return max(1, tree.max_rank + 1 if isinstance(tree, Tree) else tree.nodes - 1)


@dataclass(frozen=True)
class Runs:
    """All turns of all prompts by prompt id, turns that do not fit, and messages of methods that do not run here.

    `batches` has the number of each turn's batch.
    """

    trials: tuple[Trial, ...]
    skipped: tuple[Skipped, ...]
    left_out: Mapping[str, str]
    batches: tuple[int, ...] = ()

    @property
    def texts(self) -> list[Text]:
        return [trial.text for trial in self.trials]


def decode_all(
    baselines: Mapping[str, Baseline],
    base: Base,
    prompts: Sequence[Text],
    options: ValidateOptions,
    progress: Progress,
    *,
    first_repeat: int = 0,
    content: Mapping[str, str] | None = None,
) -> Runs:
    """Decode all turns of all prompts by every baseline; a later turn follows the answer of stock generate.

    Each baseline first decodes a few tokens of the first batch, which are not timed; of a compiled base, each turn of
    each batch, so that its size of the cache is compiled. Several processes divide the batches; all of them get all
    runs, and E406 where they differ in what they decode or in `content`, ids of what decodes.
    """
    size = options.batch_size
    baselines, left_out = warm_up(
        baselines, [text.prompt for text in prompts[:size]], min(_WARM_UP_TOKENS, options.max_new_tokens)
    )
    options.division.check_same(lambda: _settings(base, prompts, options, [*left_out], content or {}))
    batches = [prompts[start : start + size] for start in range(0, len(prompts), size)]
    tally, total = options.division.tally(), sum(1 + len(prompt.later) for prompt in prompts)
    once, exact = dataclasses.replace(options, repeats=1), isinstance(options.acceptance, Greedy)

    def decode(number: int) -> Any:
        def decoded(turn: int, prompts: Sequence[Sequence[int]]) -> list[RunsByName]:
            call = Call(number, turn, first_repeat)
            if base.compile:
                decode_in_turns(baselines, prompts, once, call._replace(repeat=0, part=WARMING))
            return decode_in_turns(baselines, prompts, options, call)

        made: list[Any] = []
        for trials, left in _turns(base, batches[number], options, decoded):
            made.append([trial.runs for trial in trials])
            texts, differing = tally("texts", len(trials)), tally("differing", sum(map(_differs, trials)))
            # The turns of this batch that are skipped are no longer expected after this report.
            progress(texts, total - tally("skipped", 0), f"texts that differ: {differing}" if exact else "")
            tally("skipped", sum(len(trial.text.later) for trial, _ in left))
        return _BATCH.dump_python(made, mode="json")

    done: list[tuple[Trial, int]] = []
    skipped: list[Skipped] = []
    for number, made in enumerate(options.division.each("texts", range(len(batches)), decode)):
        known = _BATCH.validate_python(made)
        together: list[Trial] = []  # a batch of dialogues is decoded turn by turn
        for trials, left in _turns(base, batches[number], options, lambda turn, _: known[turn]):  # noqa: B023 - used up here
            together += trials
            skipped += [turn for _, turn in left]
        together.sort(key=lambda one: one.text.prompt_id)
        done += [(trial, number) for trial in together]
        if options.memory is not None:
            options.memory.add(*([*one.text.prompt, *one.text.answer] for one in together))
    done.sort(key=lambda one: one[0].text.prompt_id)
    return Runs(tuple(one for one, _ in done), tuple(skipped), left_out, tuple(number for _, number in done))


def _settings(
    base: Base, prompts: Sequence[Text], options: ValidateOptions, left_out: Sequence[str], content: Mapping[str, str]
) -> dict[str, Any]:
    """All that the texts depend on, in types of JSON."""
    texts = [[list(text.prompt), repr(text.later)] for text in prompts]
    return {
        **picked(options, "max_new_tokens", "repeats", "batch_size", "chat_template"),
        **made_by(base),
        "model_id": base.fingerprint,
        "acceptance": repr(options.acceptance),
        "prompts": hashlib.sha256(json.dumps(texts).encode()).hexdigest(),
        "methods left out": sorted(left_out),
        **content,
    }


def _turns(
    base: Base,
    batch: Sequence[Text],
    options: ValidateOptions,
    decoded: Callable[[int, Sequence[Sequence[int]]], list[RunsByName]],
) -> Iterator[tuple[list[Trial], list[tuple[Trial, Skipped]]]]:
    """For each turn of a batch its texts with the runs that `decoded` gives, and those whose next turn is too long."""
    turns = list(batch)
    for number in itertools.count():
        if not turns:
            return
        runs = decoded(number, [turn.prompt for turn in turns])
        trials = [
            Trial(dataclasses.replace(turn, answer=by_name[GENERATE][0].tokens), by_name)
            for turn, by_name in zip(turns, runs, strict=True)
        ]
        template = options.chat_template
        following = [next_turn(base, one.text, options.max_new_tokens, chat_template=template) for one in trials]
        yield trials, [(one, turn) for one, turn in zip(trials, following, strict=True) if isinstance(turn, Skipped)]
        turns = [turn for turn in following if isinstance(turn, Text)]


def decode_in_turns(
    baselines: Mapping[str, Baseline], prompts: Sequence[Sequence[int]], options: ValidateOptions, call: Call
) -> list[RunsByName]:
    """The runs of each prompt of one batch; `call` is the first of the repeats.

    The baselines take turns; every batch, turn and repeat begins with another one.
    """
    runs: list[RunsByName] = [{name: [] for name in baselines} for _ in prompts]
    names = list(baselines)
    for repeat in range(call.repeat, call.repeat + options.repeats):
        begin = (call.batch + call.turn + repeat) % len(names)
        for name in names[begin:] + names[:begin]:
            found = baselines[name](prompts, options.max_new_tokens, call._replace(repeat=repeat))
            for by_name, run in zip(runs, found, strict=True):
                by_name[name].append(run)
    return runs


def _differs(trial: Trial) -> bool:
    return any(run.tokens != trial.text.answer for name in trial.runs.keys() - STOCK for run in trial.runs[name])
