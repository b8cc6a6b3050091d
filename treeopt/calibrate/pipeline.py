"""Calibrate in four steps: encode prompts, answer them, learn a drafter (where there is to be one), trace the answers.

Batches are formed once, of the prompts' lengths. A batch has its number, which seeds its sampling and names its chunks,
so its result does not depend on the batches that are made before it, or elsewhere. One teacher-forced forward a batch
gives the hidden states of all positions, from which the drafter ranks every true token. (The reference implementation
runs its heads at every step.)
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from treeopt.calibrate.job import CalibrationOptions, Job, job_of, provenance_of, settings_of, source_of
from treeopt.calibrate.results import CalibrationRun
from treeopt.calibration import Calibration, Provenance
from treeopt.drafter import Drafter
from treeopt.drafting.interface import Proposer
from treeopt.drafting.learn import Learned, Learning, learn
from treeopt.drafting.plans import proposer_for
from treeopt.drafting.trace import Target, TextTraces, trace_texts
from treeopt.models.auto_batch import in_parts
from treeopt.models.given import GivenHeads, GivenModel
from treeopt.progress import Progress, silent
from treeopt.runs.shards import AnswerShard, CalibrationShard, answers_name
from treeopt.runs.work import Chunk, damaged_part, pack_rows, unpack_rows
from treeopt.texts.answers import answer_batch, answer_batches, collect
from treeopt.texts.encode import Encoded, Text, encode_prompts
from treeopt.texts.prompts import GivenPrompts, Skipped
from treeopt.traces import NONE, StepTraces, TargetTraces, joined

Batches = Mapping[int, Sequence[Text]]  # prompts by the number of their batch among those of all shards
_STEPS = ("node_rank", "expected_tokens", "confidence")
_TARGET = ("probability", "places")
_LENGTHS = "lengths"  # of the texts of a chunk, in rows


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
    if chosen.shard is not None and learning is not None:
        raise ValueError("shard and learning are both given: use answer_shard, then learn from all answers")
    given: dict[str, Any] = {"tokenizer": tokenizer, "drafter": drafter, "learning": learning, "progress": progress}
    run = calibrate(job_of(model, heads, prompts, chosen, **given))
    assert run is not None, "only commands divide a run among processes"
    return run


def calibrate(job: Job) -> CalibrationRun | None:
    """The four steps; None in a process that follows another."""
    begun = _begin(job)
    texts, turns = _answered(job, begun.batches)
    learned = None if job.learning is None else _learned(job, texts, job.learning)
    proposers, levels = _proposers(job, texts, learned or job.drafter)
    traced = _traced(job, begun.batches, texts, proposers, levels)
    if traced is None:
        return None
    skipped, cut, shard = begun.encoded.skipped, begun.encoded.answers_cut, job.options.shard
    budget = job.options.max_new_tokens
    check_whole(texts, [text.prompt_id for batch in begun.batches.values() for text in batch], budget)
    provenance = provenance_of(job, job.drafter_id if learned is None else learned.drafter.id)
    calibration = as_calibration(texts, traced, job.top_k, provenance, levels=levels)
    num_heads = 0 if job.heads is None else job.heads.num_heads
    part = None
    if shard is not None:
        left_out = tuple(map(vars, skipped)), tuple(map(vars, turns))
        part = CalibrationShard(calibration, shard, begun.total, begun.settings, num_heads, cut, *left_out)
    return CalibrationRun(calibration, (*skipped, *turns), cut, num_heads, learned, tuple(texts), part)


def answer_shard(job: Job) -> AnswerShard | None:
    """The answers to the prompts of one shard, where a drafter is learned; None in a process that follows another.

    A drafter is learned from all texts, so only the answers are divided. `treeopt.calibrate.results.fill_work` joins
    them to an unfinished run, which `run_calibration` continues.
    """
    shard = job.options.shard
    if shard is None or job.options.responses:
        raise ValueError("shard is None, or the answers are given: there is nothing to divide")
    begun = _begin(job)
    chunks: dict[str, Chunk] = {}
    _answered(job, begun.batches, chunks)
    job.run.agree("number of batches", str(len(chunks)))  # all have read them before the folder is deleted
    return None if job.run.follows else AnswerShard(shard, begun.total, begun.settings, chunks)


@dataclass(frozen=True)
class _Begun:
    """Step one: the prompts of a run, and the batches of its shard; all shards have `total`."""

    settings: dict[str, Any]
    encoded: Encoded
    batches: Batches
    total: int


def _begin(job: Job) -> _Begun:
    """Begin or continue the work folder, encode the prompts, and form the batches."""
    options, shard = job.options, job.options.shard
    settings = settings_of(job)
    if options.work is not None:
        options.work.begin({**settings, "shard": None if shard is None else str(shard)})
    budget, template = options.max_new_tokens, options.chat_template
    encoded = encode_prompts(job.base, job.prompts, budget, chat_template=template, scored=options.responses)
    batches = answer_batches(encoded.texts, options)
    chosen = {number: batch for number, batch in enumerate(batches) if shard is None or shard.has(number)}
    return _Begun(settings, encoded, chosen, len(batches))


def _answered(job: Job, batches: Batches, kept: dict[str, Chunk] | None = None) -> tuple[list[Text], list[Skipped]]:
    """Step two: the texts with their answers, generated or given, by prompt id, and the turns that did not fit.

    The chunks of generated answers are added to `kept`.
    """
    if job.options.responses:
        return sorted((text for batch in batches.values() for text in batch), key=lambda text: text.prompt_id), []
    fresh: dict[int, tuple[list[Text], list[Skipped]]] = {}

    def make(number: int) -> Chunk:
        texts, _ = fresh[number] = answer_batch(job.base, batches[number], job.options, number)
        return pack_rows([text.answer for text in texts], prompt_ids=[text.prompt_id for text in texts])

    made = job.run.each("answers", list(batches), make, job.progress)

    def read() -> Iterator[tuple[list[Text], list[Skipped]]]:
        for (number, batch), chunk in zip(batches.items(), made, strict=True):
            if kept is not None:
                kept[answers_name(number)] = chunk
            if number in fresh:
                yield fresh.pop(number)
            else:  # an earlier run, or another process, has made them
                known = dict(zip(chunk[1]["prompt_ids"], unpack_rows(chunk), strict=True))
                yield answer_batch(job.base, batch, job.options, number, known=known)

    return collect(list(batches.values()), read(), lambda done, total: job.progress(done, total, "answers"))


def _learned(job: Job, texts: Sequence[Text], learning: Learning) -> Learned:
    """Step three: a drafter from the texts, the same in all processes of the run."""
    learned = learn(
        job.base,
        job.heads,
        texts,
        learning,
        options=job.options,
        draft=job.draft,
        run=job.run,
        progress=job.progress,
    )
    learned = dataclasses.replace(learned, drafter=dataclasses.replace(learned.drafter, source=source_of(job)))
    if job.run.team is not None:
        job.run.agree("drafter", " ".join(one.id for one in (learned.drafter, *learned.folds)))
    return learned


def _proposers(job: Job, texts: Sequence[Text], drafter: Learned | Drafter | None) -> tuple[dict[str, Proposer], int]:
    """What ranks the tokens of each text, by prompt id, and its levels: the heads, a drafter, or a fold's drafter."""
    if isinstance(drafter, Learned):
        proposers, levels = drafter.proposers(job.base, job.heads, texts, job.draft), drafter.drafter.depth
    else:
        one = proposer_for(job.base, job.heads, drafter, job.draft)
        proposers, levels = [one] * len(texts), one.depth
    return {text.prompt_id: proposer for text, proposer in zip(texts, proposers, strict=True)}, levels


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
    return [_of_arrays(whole)] if whole else []


def _trace(job: Job, batch: Sequence[Text], proposers: Mapping[str, Proposer], depth: int) -> Chunk:
    """Traces of the texts of one batch; a few at a time, as later turns make them more than the batch size."""
    options, traced = job.options, list[TextTraces]()
    target = Target.at_temperature(options.temperature, job.base.vocab_size) if options.sampled else None

    def trace(texts: Sequence[Text]) -> list[TextTraces]:
        chosen = [proposers[text.prompt_id] for text in texts]
        return trace_texts(job.base, chosen, texts, job.top_k, step_depth=depth, target=target)

    for start in range(0, len(batch), options.batch_size):
        traced += in_parts(options.auto_batch, batch[start : start + options.batch_size], trace)
    arrays: dict[str, NDArray[Any]] = {
        "ranks": np.concatenate([one.ranks for one in traced]),
        _LENGTHS: np.array([len(one.ranks) for one in traced], np.int64),
    }
    steps, drawn = joined([one.steps for one in traced]), joined([one.target for one in traced])
    for names, record in ((_STEPS, steps), (_TARGET, drawn)):
        arrays |= {name: getattr(record, name) for name in names if getattr(record, name, None) is not None}
    return arrays, {}


def _check_rows(arrays: Mapping[str, NDArray[Any]], lengths: Sequence[int]) -> None:
    """Raise E205 unless the arrays of a chunk hold the rows of texts with answers of these lengths."""
    if not np.array_equal(arrays.get(_LENGTHS, ()), lengths):
        raise damaged_part("its lengths are not those of the answers")
    if any(len(rows) != sum(lengths) for name, rows in arrays.items() if name != _LENGTHS):
        raise damaged_part("its traces are not of the answers' tokens")


def _put(
    whole: dict[str, NDArray[Any]], arrays: Mapping[str, NDArray[Any]], ends: NDArray[np.int64], places: Sequence[int]
) -> None:
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


def _of_arrays(arrays: Mapping[str, NDArray[Any]]) -> TextTraces:
    """The traces in the arrays of all texts."""
    steps = StepTraces(*(arrays[name] for name in _STEPS)) if _STEPS[0] in arrays else None
    target = TargetTraces(arrays["probability"], arrays.get("places")) if "probability" in arrays else None
    return TextTraces(arrays["ranks"], steps, target)


def as_calibration(
    texts: Sequence[Text], traced: Sequence[TextTraces], top_k: int, provenance: Provenance, *, levels: int = 1
) -> Calibration:
    """The calibration of texts, by ascending prompt id, and of their traces in this order.

    A part may have the traces of several texts; one of all is not copied. `levels` are those where there is no text.
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

    `prompt_ids` are those of the run, whose texts have later turns too; `budget` is the most tokens of an answer.
    """
    found = {text.prompt_id for text in texts}
    longest = max((len(text.answer) for text in texts), default=0)
    if len(found) < len(texts) or {text.dialogue for text in texts} != set(prompt_ids) or longest > budget:
        what = f"{len(texts)} texts with answers of up to {longest} tokens"
        raise RuntimeError(f"{what} are not those of {len(prompt_ids)} prompts with up to {budget} new tokens")


def _token_hash(tokens: Sequence[int]) -> str:
    """The first digits of an answer's sha256."""
    return hashlib.sha256(np.asarray(tokens, np.int32).tobytes()).hexdigest()[:16]
