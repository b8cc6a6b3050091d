"""Calibrate: encode prompts, answer them, learn a drafter (where one is to be learned), trace the answers.

The answers are generated in batches; then one teacher-forced forward a batch gives the hidden states of all positions,
from which the drafter ranks every true token. (The reference implementation runs its heads at every step.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any

from transformers import PreTrainedTokenizerBase

from treeopt.calibrate.job import CalibrationOptions as CalibrationOptions
from treeopt.calibrate.job import Job, job_of, provenance_of, settings_of, source_of
from treeopt.calibrate.record import as_calibration, check_whole
from treeopt.calibrate.results import CalibrationRun as CalibrationRun
from treeopt.calibrate.stages import Batches, answered, drafts_of, traced_texts
from treeopt.drafter import Drafter
from treeopt.drafting.learn import Learned, Learning, learn
from treeopt.drafting.ngram import check_drafter
from treeopt.files.shards import AnswerShard, CalibrationShard
from treeopt.files.work import Chunk
from treeopt.models.given import GivenHeads, GivenModel, as_base
from treeopt.progress import Progress, silent
from treeopt.texts.answers import answer_batches
from treeopt.texts.encode import Encoded, Text, encode_prompts
from treeopt.texts.given_prompts import GivenPrompts


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
            drafter does not, E303 where every prompt
            is too long; as `load_base`, `load_heads`, `load_prompts` and `encode`.
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
    if not isinstance(learning, (Learning, NoneType)):
        raise TypeError(f"learning is treeopt.Learning or None, not an object of type {type(learning).__name__}")
    _check_drafts(heads is not None, chosen.draft is not None, drafter, learning)
    if chosen.shard is not None and learning is not None:
        raise ValueError("shard and learning are both given: use answer_shard, then learn from all answers")
    job = job_of(as_base(model, tokenizer), heads, prompts, chosen, progress)
    if drafter is not None:
        check_drafter(drafter, job.base, job.heads, job.draft)
    known = "" if drafter is None else drafter.id
    begun = _begin(job, learning, known)
    texts, turns = answered(job, begun.batches, job.keep)
    learned = None if learning is None else _learned(job, texts, learning)
    drafts = drafts_of(job, texts, learned or drafter)
    traced = traced_texts(job, begun.batches, texts, drafts)
    check_whole(texts, [text.prompt_id for _, batch in begun.batches for text in batch], chosen.max_new_tokens)
    provenance = provenance_of(job, known if learned is None else learned.drafter.id)
    calibration = as_calibration(texts, traced, job.top_k, provenance, levels=drafts.levels)
    num_heads = 0 if job.heads is None else job.heads.num_heads
    skipped, cut = begun.encoded.skipped, begun.encoded.answers_cut
    part = None
    if chosen.shard is not None:
        left_out = tuple(map(vars, skipped)), tuple(map(vars, turns))
        part = CalibrationShard(calibration, chosen.shard, begun.total, begun.settings, num_heads, cut, *left_out)
    return CalibrationRun(calibration, (*skipped, *turns), cut, num_heads, learned, tuple(texts), part)


def answer_shard(
    model: GivenModel,
    heads: GivenHeads | None,
    prompts: GivenPrompts,
    learning: Learning,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    progress: Progress = silent,
    **options: Any,
) -> AnswerShard:
    """Answer the prompts of one shard of a calibration with a drafter that is learned.

    A drafter is learned from all texts, so only the answers are divided. `treeopt.calibrate.shards.fill_work` joins
    them to an unfinished run, which `run_calibration` continues.

    Args:
        model: as for `run_calibration`.
        heads: as for `run_calibration`.
        prompts: as for `run_calibration`.
        learning: how the drafter will be learned.
        tokenizer: as for `run_calibration`.
        progress: called after each batch.
        options: fields of `CalibrationOptions`, `shard` among them.

    Raises:
        TreeoptError: as `run_calibration`.
        ValueError: as `run_calibration`; where there is no shard, or the answers are given.
    """
    chosen = CalibrationOptions(**options)
    if chosen.shard is None or chosen.responses:
        raise ValueError("shard is None, or the answers are given: there is nothing to divide")
    _check_drafts(heads is not None, chosen.draft is not None, None, learning)
    job = job_of(as_base(model, tokenizer), heads, prompts, chosen, progress)
    begun = _begin(job, learning, "")
    chunks: dict[str, Chunk] = {}

    def keep(name: str, make: Callable[[], Chunk]) -> Chunk:
        chunks[name] = job.keep(name, make)
        return chunks[name]

    answered(job, begun.batches, keep)
    if chosen.work is not None:
        chosen.work.agree("number of batches", str(len(chunks)))  # all have read them before the folder is deleted
        chosen.work.leader_only()
    return AnswerShard(chosen.shard, begun.total, begun.settings, chunks)


@dataclass(frozen=True)
class _Begun:
    """The prompts of a run, and their batches of its shard with their numbers among all `total` batches."""

    settings: dict[str, Any]
    encoded: Encoded
    batches: Batches
    total: int


def _begin(job: Job, learning: Learning | None, drafter_id: str) -> _Begun:
    """Begin or continue the work folder, and form the batches."""
    options, shard = job.options, job.options.shard
    settings = settings_of(job, learning, drafter_id)
    if options.work is not None:
        options.work.begin({**settings, "shard": None if shard is None else str(shard)})
    budget, template = options.max_new_tokens, options.chat_template
    encoded = encode_prompts(job.base, job.prompts, budget, chat_template=template, scored=options.responses)
    batches = answer_batches(encoded.texts, options)
    chosen = [(number, batch) for number, batch in enumerate(batches) if shard is None or shard.has(number)]
    return _Begun(settings, encoded, chosen, len(batches))


def _check_drafts(heads: bool, draft: bool, drafter: Drafter | None, learning: Learning | None) -> None:
    """Raise ValueError where nothing would draft, or both heads and a draft model would."""
    if heads and draft:
        raise ValueError("both heads and a draft model are given: leave one out")
    if not heads and drafter is None and learning is None:
        raise ValueError("heads is None: drafter=treeopt.load_drafter(FILE) or learning=treeopt.Learning() is needed")
    if not heads and not draft and learning is not None and not learning.ngram:
        raise ValueError("heads is None and learning.ngram is off, so nothing drafts")


def _learned(job: Job, texts: Sequence[Text], learning: Learning) -> Learned:
    """A drafter from the texts, the same in all processes of the run."""
    learned = learn(
        job.base,
        job.heads,
        texts,
        learning,
        options=job.options,
        draft=job.draft,
        source=source_of(job, learning),
        recording=job.recording,
    )
    if job.options.work is not None:
        job.options.work.agree("drafter", " ".join(one.id for one in (learned.drafter, *learned.folds)))
    return learned
