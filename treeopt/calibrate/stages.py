"""The stages of a calibration that work batch by batch: answers, and their traces.

Batches are formed once, of the prompts' lengths. A batch has its number, which seeds its sampling and names its chunks
(`treeopt.files.work`), so its result does not depend on the batches that are made before it, or elsewhere.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treeopt.calibrate.job import Job
from treeopt.calibration import NONE
from treeopt.drafter import Drafter
from treeopt.drafting.interface import Proposer
from treeopt.drafting.learn import Learned
from treeopt.drafting.plans import proposer_for
from treeopt.drafting.trace import Target, TextTraces, trace_texts
from treeopt.files.resume import damaged_part
from treeopt.files.shards import answers_name
from treeopt.files.work import Chunk, Keep, chunk_name, pack_rows, unpack_rows
from treeopt.models.auto_batch import in_parts
from treeopt.texts.answers import answer_batch, collect
from treeopt.texts.encode import Text
from treeopt.texts.skipped import Skipped
from treeopt.traces import StepTraces, TargetTraces, joined

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
    """The traces of a batch as a chunk, without the target's entropy, which a calibration does not hold."""
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
