"""Calibrate: encode prompts, answer them, learn a drafter (where one is to be learned), trace the answers.

The answers are generated in batches; then one teacher-forced forward a batch gives the hidden states of all positions,
from which the drafter ranks every true token. (The reference implementation runs its heads at every step.)
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from treeopt.calibrate.job import CalibrationOptions, Job, job_of, provenance_of, settings_of, source_of
from treeopt.calibrate.results import CalibrationRun
from treeopt.calibration import NONE, Calibration, Provenance
from treeopt.drafter import Drafter
from treeopt.drafting.interface import Proposer
from treeopt.drafting.learn import Learned, Learning, learn
from treeopt.drafting.ngram import check_drafter
from treeopt.drafting.plans import proposer_for
from treeopt.drafting.trace import Target, TextTraces, trace_texts
from treeopt.models.auto_batch import in_parts
from treeopt.models.given import GivenHeads, GivenModel, as_base
from treeopt.progress import Progress, silent
from treeopt.runs.shards import AnswerShard, CalibrationShard, answers_name
from treeopt.runs.work import Chunk, Keep, chunk_name, damaged_part, pack_rows, unpack_rows
from treeopt.texts.answers import answer_batch, answer_batches, collect
from treeopt.texts.encode import Encoded, Text, encode_prompts
from treeopt.texts.prompts import GivenPrompts, Skipped
from treeopt.traces import StepTraces, TargetTraces, joined


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

    A drafter is learned from all texts, so only the answers are divided. `treeopt.calibrate.results.fill_work` joins
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


Batches = Sequence[tuple[int, Sequence[Text]]]  # numbers and prompts
_STEPS = ("node_rank", "expected_tokens", "confidence")
_TARGET = ("probability", "places")
_LENGTHS = "lengths"  # of the texts of a chunk, in rows


def answered(job: Job, batches: Batches, keep: Keep) -> tuple[list[Text], tuple[Skipped, ...]]:
    """The texts of the batches with their answers, generated or given, by prompt id; `keep` stores the generated ones.

    Returns:
        The texts, and the turns that did not fit into the context.
    """
    if job.options.responses:
        return sorted((text for _, batch in batches for text in batch), key=lambda text: text.prompt_id), ()
    numbers = [number for number, _ in batches]

    makes = {answers_name(number): functools.partial(_answer, job, number, batch) for number, batch in batches}
    job.share(makes, job.progress)

    def answer(place: int, batch: Sequence[Text]) -> tuple[list[Text], list[Skipped]]:
        name = answers_name(numbers[place])
        chunk = keep(name, makes[name])
        known = dict(zip(chunk[1]["prompt_ids"], unpack_rows(chunk), strict=True))
        return answer_batch(job.base, batch, job.options, numbers[place], known=known)

    whole = [batch for _, batch in batches]
    texts, skipped = collect(whole, answer, lambda done, total: job.progress(done, total, "answers"))
    return texts, tuple(skipped)


def _answer(job: Job, number: int, batch: Sequence[Text]) -> Chunk:
    """The answers to one batch."""
    texts, _ = answer_batch(job.base, batch, job.options, number)
    return pack_rows([text.answer for text in texts], prompt_ids=[text.prompt_id for text in texts])


@dataclass(frozen=True, eq=False)
class Drafts:
    """What ranks the tokens of the texts.

    Args:
        proposers: of each text, by prompt id.
        levels: of the traces.
        step_depth: of the traced per-step trees; 0 traces none.
        first: the name of the first level, for progress.
    """

    proposers: dict[str, Proposer]
    levels: int
    step_depth: int
    first: str


def drafts_of(job: Job, texts: Sequence[Text], drafter: Learned | Drafter | None) -> Drafts:
    """The heads, one drafter, or for each text the learned drafter that left the text out."""
    if isinstance(drafter, Learned):
        proposers = drafter.proposers(job.base, job.heads, texts, job.draft)
        depth = levels = drafter.drafter.depth
    else:
        one = proposer_for(job.base, job.heads, drafter, job.draft)
        proposers, levels = [one] * len(texts), one.depth
        depth = 0 if drafter is None else drafter.depth
    by_prompt = {text.prompt_id: proposer for text, proposer in zip(texts, proposers, strict=True)}
    first = "head 1" if drafter is None else "level 1"
    return Drafts(by_prompt, levels, depth if job.options.steps else 0, first)


def traced_texts(job: Job, batches: Batches, texts: Sequence[Text], drafts: Drafts) -> list[TextTraces]:
    """The traces of all texts, in their order, as one part; none where there is no text.

    Each batch is traced with the later turns of its dialogues. Its rows are copied to arrays of all texts, so that no
    trace is in memory twice.
    """
    target = Target.at_temperature(job.options.temperature, job.base.vocab_size) if job.options.sampled else None
    number_of = {text.prompt_id: number for number, batch in batches for text in batch}
    of_batch: dict[int, list[int]] = {number: [] for number, _ in batches}
    for place, text in enumerate(texts):
        of_batch[number_of[text.dialogue]].append(place)
    ends = np.cumsum([len(text.answer) for text in texts], dtype=np.int64)
    makes = {
        chunk_name("traces", number): functools.partial(_trace, job, [texts[place] for place in places], drafts, target)
        for number, places in of_batch.items()
    }
    job.share(makes, job.progress)
    if job.options.work is not None:
        job.options.work.leader_only()
    whole: dict[str, NDArray[Any]] = {}
    done = hits = trials = 0
    for (name, make), places in zip(makes.items(), of_batch.values(), strict=True):
        arrays, _ = job.keep(name, make)
        _check_rows(arrays, [len(texts[place].answer) for place in places])
        _put(whole, arrays, ends, places)
        hits += int(np.count_nonzero(arrays["ranks"][:, 0] == 0))
        trials += int(np.count_nonzero(arrays["ranks"][:, 0] != NONE))
        done += len(places)
        job.progress(done, len(texts), f"{drafts.first} top-1 {hits / max(trials, 1):.1%}")
    return [_traced(whole)] if whole else []


def _check_rows(arrays: Mapping[str, NDArray[Any]], lengths: Sequence[int]) -> None:
    """Raise E205 unless the arrays of a chunk hold the rows of texts with answers of these lengths."""
    if not np.array_equal(arrays.get(_LENGTHS, ()), lengths):
        raise damaged_part("its lengths are not those of the answers")
    if any(len(rows) != sum(lengths) for name, rows in arrays.items() if name != _LENGTHS):
        raise damaged_part("its traces are not of the answers' tokens")


def _put(
    whole: dict[str, NDArray[Any]], arrays: Mapping[str, NDArray[Any]], ends: NDArray[np.int64], places: Sequence[int]
) -> None:
    """Copy the rows of a chunk's texts to arrays of all texts, which are made with the first chunk.

    Args:
        whole: the arrays, by name.
        arrays: of the chunk.
        ends: int64 [S], of the rows of each text in `whole`.
        places: of the chunk's texts among all texts, in their order in the chunk.
    """
    for name, rows in arrays.items():
        if name == _LENGTHS:
            continue
        if name not in whole:
            whole[name] = np.empty((ends[-1], *rows.shape[1:]), rows.dtype)
        last = 0
        for place, length in zip(places, arrays[_LENGTHS].tolist(), strict=True):
            first, last = last, last + length
            whole[name][ends[place] - length : ends[place]] = rows[first:last]


def _trace(job: Job, batch: Sequence[Text], drafts: Drafts, target: Target | None) -> Chunk:
    """Traces of the texts of one batch; a few at a time, as later turns make them more than the batch size."""
    traced: list[TextTraces] = []

    def trace(texts: Sequence[Text]) -> list[TextTraces]:
        proposers = [drafts.proposers[text.prompt_id] for text in texts]
        return trace_texts(job.base, proposers, texts, job.top_k, step_depth=drafts.step_depth, target=target)

    for start in range(0, len(batch), job.options.batch_size):
        traced += in_parts(job.options.auto_batch, batch[start : start + job.options.batch_size], trace)
    return _packed(traced)


def _packed(traced: Sequence[TextTraces]) -> Chunk:
    """The traces of a batch as a chunk."""
    arrays: dict[str, NDArray[Any]] = {
        "ranks": np.concatenate([one.ranks for one in traced]),
        _LENGTHS: np.array([len(one.ranks) for one in traced], np.int64),
    }
    steps, target = joined([one.steps for one in traced]), joined([one.target for one in traced])
    for names, record in ((_STEPS, steps), (_TARGET, target)):
        arrays |= {name: getattr(record, name) for name in names if getattr(record, name, None) is not None}
    return arrays, {}


def _traced(arrays: Mapping[str, NDArray[Any]]) -> TextTraces:
    """The traces in the arrays of a chunk, or of all texts."""
    steps = StepTraces(*(arrays[name] for name in _STEPS)) if _STEPS[0] in arrays else None
    target = TargetTraces(arrays["probability"], arrays.get("places")) if "probability" in arrays else None
    return TextTraces(arrays["ranks"], steps, target)


def as_calibration(
    texts: Sequence[Text], traced: Sequence[TextTraces], top_k: int, provenance: Provenance, *, levels: int = 1
) -> Calibration:
    """The calibration of traced texts.

    Args:
        texts: by ascending prompt id.
        traced: their traces, in this order; a part may have those of several texts, and one of all is not copied.
        top_k: ranks that are told apart.
        provenance: the origin.
        levels: of traces, where there is no text.
    """
    ranks = [one.ranks for one in traced] or [np.zeros((0, levels), np.uint8)]
    return Calibration(
        ranks=ranks[0] if len(ranks) == 1 else np.concatenate(ranks),
        offsets=np.concatenate([[0], np.cumsum([len(text.answer) for text in texts])]).astype(np.int64),
        prompt_ids=tuple(text.prompt_id for text in texts),
        token_hashes=tuple(_token_hash(text.answer) for text in texts),
        top_k=top_k,
        provenance=provenance,
        steps=joined([one.steps for one in traced]),
        target=joined([one.target for one in traced]),
    )


def check_whole(texts: Sequence[Text], prompt_ids: Sequence[str], budget: int) -> None:
    """Raise RuntimeError, for a fault of this program, unless the texts are those of a run, each of them once.

    Args:
        texts: with their answers; later turns of a prompt too.
        prompt_ids: of the run's prompts.
        budget: most tokens of an answer.
    """
    found = {text.prompt_id for text in texts}
    longest = max((len(text.answer) for text in texts), default=0)
    if len(found) < len(texts) or {text.dialogue for text in texts} != set(prompt_ids) or longest > budget:
        what = f"{len(texts)} texts with answers of up to {longest} tokens"
        raise RuntimeError(f"{what} are not those of {len(prompt_ids)} prompts with up to {budget} new tokens")


def _token_hash(tokens: Sequence[int]) -> str:
    """The first digits of an answer's sha256."""
    return hashlib.sha256(np.asarray(tokens, np.int32).tobytes()).hexdigest()[:16]
