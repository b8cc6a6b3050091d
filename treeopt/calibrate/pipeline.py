"""Calibrate in four steps: encode prompts, answer them, learn a drafter (where there is to be one), trace the answers.

Batches are formed once, of the prompts' lengths. A batch has its number, which seeds its sampling and names its chunks,
so its result does not depend on the batches that are made before it, or elsewhere. One teacher-forced forward a batch
gives the hidden states of all positions, from which the drafter ranks every true token. (The reference implementation
runs its heads at every step.)
"""

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from treeopt.calibrate.results import CalibrationRun, CalibrationShard, Shard
from treeopt.calibration import Calibration, Provenance
from treeopt.drafter import Drafter
from treeopt.drafting.interface import Proposer
from treeopt.drafting.learn import Learned, Learning, learn
from treeopt.drafting.ngram import check_drafter
from treeopt.drafting.plans import proposer_for
from treeopt.drafting.trace import Arrays, Target, TextTraces, trace_texts
from treeopt.models.auto_batch import in_parts
from treeopt.models.base import Base
from treeopt.models.compatibility import heads_like
from treeopt.models.draft_module import layout_of
from treeopt.models.given import GivenHeads, GivenModel, as_base, as_draft, as_heads
from treeopt.models.heads import MedusaHeads
from treeopt.progress import Progress, silent
from treeopt.runs.work import ALONE, BatchRun, Chunk, Work, damaged_part, pack_rows, unpack_rows
from treeopt.texts.answers import AnswerOptions, answer_batch, answer_batches, collect
from treeopt.texts.encode import Text, encode_prompts
from treeopt.texts.prompts import GivenPrompts, PromptSet, Skipped, as_prompt_set
from treeopt.traces import MAX_RANKS, NONE, joined

Batches = Mapping[int, Sequence[Text]]  # prompts by the number of their batch among those of all shards
_LENGTHS = "lengths"  # of the texts of a chunk, in rows


@dataclass(frozen=True)
class CalibrationOptions(AnswerOptions):
    """How `run_calibration` answers and traces prompts; the fields of `AnswerOptions`, and these.

    Args:
        responses: trace the answers that the prompts bring; nothing is generated, and later turns are ignored.
        steps: with a drafter, trace per-step trees too.
        draft: the draft model of the drafter, or the one to learn a drafter with, in any form that models have.
        work: stores finished batches, from which an interrupted run continues; None stores nothing.
        shard: answer and trace only the batches of this shard; None for all.
    """

    responses: bool = False
    steps: bool = False
    draft: GivenModel | None = None
    work: Work | None = None
    shard: Shard | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shard is not None and self.auto_batch is not None:
            raise ValueError("shard and auto_batch are both given: the shards of a run have one batch size")

    @property
    def sampled(self) -> bool:
        """Whether the answers are sampled from the model; then its probabilities of the candidates are traced."""
        return self.temperature > 0 and not self.responses

    @property
    def greedy(self) -> bool:
        """Whether every token of the answers is the model's greedy choice; given answers are taken not to be."""
        return super().greedy and not self.responses

    @property
    def answers(self) -> str:
        """The origin of the answers, as calibrations store it."""
        if self.responses:
            return "given"
        return "greedy" if self.temperature == 0 else f"sampled at {self.temperature}, seed {self.seed}"


@dataclass(frozen=True)
class Job:
    """The inputs of a calibration, loaded and checked."""

    base: Base
    heads: MedusaHeads | None  # on the base's device and in its dtype
    draft: Base | None
    prompts: PromptSet  # to answer, or with their answers
    options: CalibrationOptions
    made_for: dict[str, Any]  # name and id of the base and of the heads; empty without heads
    drafter: Drafter | None  # whose candidates are ranked; None for the heads alone, and where one is learned
    learning: Learning | None
    progress: Progress  # called after each batch

    @property
    def top_k(self) -> int:
        """Number of ranks that a trace distinguishes; a token of a higher rank is a miss."""
        return min(MAX_RANKS, self.base.vocab_size)

    @property
    def learned_from(self) -> dict[str, Any]:
        """The first and the last row of the prompts, and how a drafter is learned; in types of JSON."""
        rows = [self.prompts.prompts[0].row, self.prompts.prompts[-1].row]
        return {"rows": rows, "learning": None if self.learning is None else dataclasses.asdict(self.learning)}

    @property
    def run(self) -> BatchRun[Chunk]:
        """Makes, stores and divides the batches."""
        return ALONE if self.options.work is None else self.options.work


def job_of(
    model: GivenModel,
    heads: GivenHeads | None,
    prompts: GivenPrompts,
    options: CalibrationOptions,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    drafter: Drafter | None = None,
    learning: Learning | None = None,
    progress: Progress = silent,
) -> Job:
    """The arguments of `run_calibration`, loaded and checked; its errors."""
    if not isinstance(learning, (Learning, NoneType)):
        raise TypeError(f"learning is treeopt.Learning or None, not an object of type {type(learning).__name__}")
    if options.shard is not None and learning is not None:
        raise ValueError("shard and learning are both given: learn a drafter of all prompts first, then give drafter")
    if heads is not None and options.draft is not None:
        raise ValueError("both heads and a draft model are given: leave one out")
    if drafter is not None and learning is not None:
        raise ValueError("drafter and learning are both given: leave one out")
    if heads is None and drafter is None and learning is None:
        raise ValueError("heads is None: drafter=treeopt.load_drafter(FILE) or learning=treeopt.Learning() is needed")
    if heads is None and options.draft is None and learning is not None and not learning.ngram:
        raise ValueError("heads is None and learning.ngram is off, so nothing drafts")
    base = as_base(model, tokenizer)
    draft = as_draft(options.draft, base)
    chosen = as_prompt_set(prompts, answers=options.responses)
    made_for = {"model": base.name, "model_id": base.fingerprint, "heads": "", "heads_id": ""}
    used = None
    if heads is not None:
        loaded = as_heads(heads)
        used = heads_like(base, loaded.heads, loaded.name)
        made_for |= {"heads": loaded.name, "heads_id": loaded.fingerprint}
    if drafter is not None:
        check_drafter(drafter, base, used, draft)
    return Job(base, used, draft, chosen, options, made_for, drafter, learning, progress)


def run_calibration(
    model: GivenModel,
    heads: GivenHeads | None,
    prompts: GivenPrompts,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    drafter: Drafter | None = None,
    learning: Learning | None = None,
    progress: Progress = silent,
    **options: Any,
) -> CalibrationRun:
    """Trace heads, or a drafter, over the base model's answers to prompts.

    Args:
        model: the base model: a causal language model of transformers, a folder or hub name, or a `Base`.
        heads: its heads: `MedusaHeads`, what `load_heads` returns, or a folder or hub name; None for a drafter without
            heads.
        prompts: a file name or another name as for `load_prompts`, a list of requests, rows or conversations, or a
            `PromptSet`. Later turns of a dialogue each follow the model's answer to the turn before.
        tokenizer: of the model; None takes the one beside the model's weights.
        drafter: the drafter whose candidates are ranked; None ranks the guesses of the heads.
        learning: learn a drafter from these prompts, and trace each text by a drafter that was learned without it.
            Without heads either `drafter` or `learning` is needed.
        progress: called after each batch with what is done, of how many, and a note: answers, sampled tokens, counted
            prompts (or texts), and traces, each from 0.
        options: fields of `CalibrationOptions`: `max_new_tokens`, `batch_size`, `temperature`, `seed`,
            `chat_template`, `responses`, `steps`, `draft`, `work`, `shard`.

    Raises:
        TreeoptError: E212 where the heads do not fit the base, E213 where the draft model does not, E223 where the
            drafter does not, E303 where every prompt is too long; those of the loaders.
        TypeError: where model, heads, prompts, drafter or learning are of another type, or there is no such option.
        ValueError: where a number is out of range, neither heads nor an n-gram table would draft, or a drafter would be
            learned from a shard.

    Examples:
        >>> import treeopt
        >>> run = treeopt.run_calibration("pocket", "pocket", ["import os", "def main():"], max_new_tokens=12)
        >>> run.calibration.sequences, run.heads
        (2, 5)
        >>> treeopt.build_tree(run.calibration, nodes=4).nodes
        4
    """
    chosen = CalibrationOptions(**options)
    given: dict[str, Any] = {"tokenizer": tokenizer, "drafter": drafter, "learning": learning, "progress": progress}
    run = calibrate(job_of(model, heads, prompts, chosen, **given))
    assert run is not None, "only commands divide a run among processes"
    return run


def calibrate(job: Job) -> CalibrationRun | None:
    """The four steps; None in a process that follows another."""
    options, shard = job.options, job.options.shard
    settings, budget = settings_of(job), options.max_new_tokens
    if options.work is not None:
        options.work.begin({**settings, "shard": None if shard is None else str(shard)})
    encoded = encode_prompts(
        job.base, job.prompts, budget, chat_template=options.chat_template, scored=options.responses
    )
    formed = answer_batches(encoded.texts, options)
    batches = {number: batch for number, batch in enumerate(formed) if shard is None or shard.has(number)}
    texts, turns = _answered(job, batches)
    learned = None if job.learning is None else _learned(job, texts, job.learning)
    proposers, levels = _proposers(job, texts, learned or job.drafter)
    traced = _traced(job, batches, texts, proposers, levels)
    if traced is None:
        return None
    skipped, cut = encoded.skipped, encoded.answers_cut
    check_whole(texts, [text.prompt_id for batch in batches.values() for text in batch], budget)
    provenance = provenance_of(job, job.drafter if learned is None else learned.drafter)
    calibration = as_calibration(texts, traced, job.top_k, provenance, levels=levels)
    num_heads = 0 if job.heads is None else job.heads.num_heads
    part = None
    if shard is not None:
        part = CalibrationShard(calibration, shard, len(formed), settings, num_heads, cut, skipped, tuple(turns))
    return CalibrationRun(calibration, (*skipped, *turns), cut, num_heads, learned, tuple(texts), part)


def _answered(job: Job, batches: Batches) -> tuple[list[Text], list[Skipped]]:
    """Step two: the texts with their answers, generated or given, by prompt id, and the turns that did not fit."""
    if job.options.responses:
        return sorted((text for batch in batches.values() for text in batch), key=lambda text: text.prompt_id), []
    fresh: dict[int, tuple[list[Text], list[Skipped]]] = {}

    def make(number: int) -> Chunk:
        texts, _ = fresh[number] = answer_batch(job.base, batches[number], job.options, number)
        return pack_rows([text.answer for text in texts], prompt_ids=[text.prompt_id for text in texts])

    made = job.run.each("answers", list(batches), make, job.progress)

    def read() -> Iterator[tuple[list[Text], list[Skipped]]]:
        for (number, batch), chunk in zip(batches.items(), made, strict=True):
            if number in fresh:
                yield fresh.pop(number)
            else:  # an earlier run, or another process, has made them
                known = dict(zip(chunk[1]["prompt_ids"], unpack_rows(chunk), strict=True))
                yield answer_batch(job.base, batch, job.options, number, known=known)

    return collect(list(batches.values()), read(), lambda done, total: job.progress(done, total, "answers"))


def _learned(job: Job, texts: Sequence[Text], learning: Learning) -> Learned:
    """Step three: a drafter from the texts, the same in all processes of the run."""
    learned = learn(
        job.base, job.heads, texts, learning, options=job.options, draft=job.draft, run=job.run, progress=job.progress
    )
    source = source_of(job)
    if learned.stages:
        stages = [[stage.tokens, round(stage.tokens_per_step, 4)] for stage in learned.stages]
        source["learning"] |= {"stages": stages}
    if learning.tokens is None and learning.stages:
        source["learning"] |= {"tokens": learned.sampled}
    learned = dataclasses.replace(learned, drafter=dataclasses.replace(learned.drafter, source=source))
    if job.run.team is not None:
        job.run.agree("drafter", " ".join(one.id for one in (learned.drafter, *learned.folds)))
    return learned


def _proposers(job: Job, texts: Sequence[Text], drafter: Learned | Drafter | None) -> tuple[dict[str, Proposer], int]:
    """What ranks the tokens of each text, by prompt id, and its levels: the heads, a drafter, or a fold's drafter."""
    if isinstance(drafter, Learned):
        folds = [proposer_for(job.base, job.heads, fold, job.draft) for fold in drafter.folds]
        return {text.prompt_id: folds[drafter.fold_of[text.prompt_id]] for text in texts}, drafter.drafter.depth
    one = proposer_for(job.base, job.heads, drafter, job.draft)
    return dict.fromkeys((text.prompt_id for text in texts), one), one.depth


def _traced(
    job: Job, batches: Batches, texts: Sequence[Text], proposers: Mapping[str, Proposer], levels: int
) -> list[TextTraces] | None:
    """Step four: the traces of all texts, in their order, as one part; none where there is no text.

    Each batch is traced with the later turns of its dialogues. Its rows are copied to arrays of all texts, so that no
    trace is in memory twice. None in a process that follows another.
    """
    number_of = {text.prompt_id: number for number, batch in batches.items() for text in batch}
    of_batch: dict[int, list[int]] = {number: [] for number in batches}  # places of its texts among all
    for place, text in enumerate(texts):
        of_batch[number_of[text.dialogue]].append(place)
    drafted = job.drafter is not None or job.learning is not None
    depth = levels if drafted and job.options.steps else 0

    def make(number: int) -> Chunk:
        return _trace(job, [texts[place] for place in of_batch[number]], proposers, depth)

    made = job.run.each("traces", list(of_batch), make, job.progress)
    if job.run.follows:
        return None
    ends = np.cumsum([len(text.answer) for text in texts], dtype=np.int64)
    whole: dict[str, NDArray[Any]] = {}
    done = hits = trials = 0
    for (arrays, _), places in zip(made, of_batch.values(), strict=True):
        _check_rows(arrays, [len(texts[place].answer) for place in places])
        _put(whole, arrays, ends, places)
        hits += int(np.count_nonzero(arrays["ranks"][:, 0] == 0))
        trials += int(np.count_nonzero(arrays["ranks"][:, 0] != NONE))
        done += len(places)
        first = "level 1" if drafted else "head 1"
        job.progress(done, len(texts), f"{first} top-1 {hits / max(trials, 1):.1%}")
    return [TextTraces.of(whole)] if whole else []


def _trace(job: Job, batch: Sequence[Text], proposers: Mapping[str, Proposer], depth: int) -> Chunk:
    """Traces of the texts of one batch; a few at a time, as later turns make them more than the batch size."""
    options, traced = job.options, list[TextTraces]()
    target = Target.at_temperature(options.temperature, job.base.vocab_size) if options.sampled else None

    def trace(texts: Sequence[Text]) -> list[TextTraces]:
        chosen = [proposers[text.prompt_id] for text in texts]
        return trace_texts(job.base, chosen, texts, job.top_k, step_depth=depth, target=target)

    for start in range(0, len(batch), options.batch_size):
        traced += in_parts(options.auto_batch, batch[start : start + options.batch_size], trace)
    parts = [one.arrays() for one in traced]
    arrays = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    return {**arrays, _LENGTHS: np.array([len(one.ranks) for one in traced], np.int64)}, {}


def _check_rows(arrays: Arrays, lengths: Sequence[int]) -> None:
    """Raise E205 unless the arrays of a chunk hold the rows of texts with answers of these lengths."""
    if not np.array_equal(arrays.get(_LENGTHS, ()), lengths):
        raise damaged_part("its lengths are not those of the answers")
    if any(len(rows) != sum(lengths) for name, rows in arrays.items() if name != _LENGTHS):
        raise damaged_part("its traces are not of the answers' tokens")


def _put(whole: dict[str, NDArray[Any]], arrays: Arrays, ends: NDArray[np.int64], places: Sequence[int]) -> None:
    """Copy the rows of a chunk's texts to the arrays of all texts, in which the rows of text i end at `ends[i]`."""
    for name, rows in arrays.items():
        if name == _LENGTHS:
            continue
        if name not in whole:
            whole[name] = np.empty((ends[-1], *rows.shape[1:]), rows.dtype)
        last = 0
        for place, length in zip(places, arrays[_LENGTHS].tolist(), strict=True):
            first, last = last, last + length
            whole[name][ends[place] - length : ends[place]] = rows[first:last]


def as_calibration(
    texts: Sequence[Text], traced: Sequence[TextTraces], top_k: int, provenance: Provenance, *, levels: int = 1
) -> Calibration:
    """The calibration of texts, by ascending prompt id, and of their traces in this order; `levels` without a text."""
    ranks = [one.ranks for one in traced] or [np.zeros((0, levels), np.uint8)]
    return Calibration(
        ranks=ranks[0] if len(ranks) == 1 else np.concatenate(ranks),
        offsets=np.concatenate([[0], np.cumsum([len(text.answer) for text in texts])]).astype(np.int64),
        prompt_ids=tuple(text.prompt_id for text in texts),
        token_hashes=tuple(
            hashlib.sha256(np.asarray(text.answer, np.int32).tobytes()).hexdigest()[:16] for text in texts
        ),
        top_k=top_k,
        provenance=provenance,
        steps=joined([one.steps for one in traced]),
        target=joined([one.target for one in traced]),
    )


def check_whole(texts: Sequence[Text], prompt_ids: Sequence[str], budget: int) -> None:
    """Raise RuntimeError, for a fault of this program, unless the texts are those of a run, each of them once."""
    found = {text.prompt_id for text in texts}
    longest = max((len(text.answer) for text in texts), default=0)
    if len(found) < len(texts) or {text.dialogue for text in texts} != set(prompt_ids) or longest > budget:
        what = f"{len(texts)} texts with answers of up to {longest} tokens"
        raise RuntimeError(f"{what} are not those of {len(prompt_ids)} prompts with up to {budget} new tokens")


def source_of(job: Job) -> dict[str, Any]:
    """The origin of the learned drafter, as its file stores it."""
    return {
        **job.made_for,
        **({} if job.draft is None else {"draft": job.draft.name, "draft_id": job.draft.fingerprint}),
        **({} if job.draft is None or not (title := layout_of(job.draft.model)) else {"draft_layout": title}),
        "dtype": job.base.dtype_name,
        "prompts": {job.prompts.sha256: job.prompts.name},
        "max_new_tokens": job.options.max_new_tokens,
        **job.learned_from,
        "made_by": job.base.versions(),
    }


def provenance_of(job: Job, drafter: Drafter | None) -> Provenance:
    """The origin of a calibration, as its file stores it."""
    tokenizer, used = job.base.tokenizer, job.options.chat_template
    template = tokenizer.chat_template if used and tokenizer is not None else None
    settings = {
        "answers": job.options.answers,
        "max_new_tokens": job.options.max_new_tokens,
        "chat_template": hashlib.sha256(str(template).encode()).hexdigest()[:16] if template else "none",
        "eos": list(job.base.eos_ids),
        "dtype": job.base.dtype_name,
    }
    if job.options.sampled:
        settings["temperature"] = float(job.options.temperature)
    return Provenance(
        **job.made_for,
        settings=settings,
        prompts={job.prompts.sha256: job.prompts.name},
        made_by=job.base.versions(),
        drafter_id="" if drafter is None else drafter.id,
    )


def settings_of(job: Job) -> dict[str, Any]:
    """All that the chunks of a run depend on, in types of JSON; equal in all shards of a run."""
    provenance = provenance_of(job, job.drafter)
    return {
        "model_id": job.made_for["model_id"],
        "heads_id": job.made_for["heads_id"],
        "draft_id": "" if job.draft is None else job.draft.fingerprint,
        "drafter_id": provenance.drafter_id,
        "prompts": job.prompts.sha256,
        "batch_size": job.options.batches,
        **provenance.settings,
        "kind": "dynamic" if job.options.steps else "static",
        **job.learned_from,
        **job.base.versions(),
        "threads": torch.get_num_threads(),  # sums are rounded differently
    }
