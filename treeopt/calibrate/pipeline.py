"""Calibrate: encode prompts, answer them, learn a drafter (where one is to be learned), trace the answers.

The answers are generated in batches; then one teacher-forced forward a batch gives the hidden states of all positions,
from which the drafter ranks every true token. (The reference implementation runs its heads at every step.)
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from treeopt.calibration import MAX_RANKS, NONE, Calibration, Provenance
from treeopt.drafter import Drafter
from treeopt.drafting.learn import Learned, Learning, learn
from treeopt.drafting.plans import proposer_for
from treeopt.drafting.record_proposer import check_drafter
from treeopt.drafting.trace import Target, Traced, trace_texts
from treeopt.models.base import Base, check_heads_fit, heads_like
from treeopt.models.draft import as_draft
from treeopt.models.given import GivenHeads, GivenModel, as_base, as_heads
from treeopt.models.heads import MedusaHeads
from treeopt.models.layouts import LoadedHeads
from treeopt.progress import Progress, silent
from treeopt.texts.answers import AnswerOptions, answer_all
from treeopt.texts.encode import Encoded, Skipped, Text, encode_prompts
from treeopt.texts.given_prompts import GivenPrompts, as_prompt_set
from treeopt.texts.prompts import PromptSet
from treeopt.traces import joined


@dataclass(frozen=True)
class CalibrationOptions(AnswerOptions):
    """How `run_calibration` answers and traces prompts; the fields of `AnswerOptions`, and these.

    Args:
        responses: trace the answers that the prompts bring; nothing is generated, and later turns are ignored.
        steps: with a drafter, trace per-step trees too.
        draft: the draft model of the drafter, or the one to learn a drafter with, in any form that models have.
    """

    responses: bool = False
    steps: bool = False
    draft: GivenModel | None = None

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
class CalibrationRun:
    """The result of `run_calibration`.

    Args:
        calibration: the traces.
        skipped: prompts that were left out.
        answers_cut: number of given answers that were cut at the token budget.
        heads: H; a drafter may have more levels.
        learned: the drafter that was learned; None without `learning`.
        texts: the prompts with their answers.
    """

    calibration: Calibration
    skipped: tuple[Skipped, ...]
    answers_cut: int
    heads: int
    learned: Learned | None = None
    texts: tuple[Text, ...] = ()


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
            `chat_template`, `responses`, `steps`, `draft`.

    Raises:
        TreeoptError: E212 where the heads do not fit the base, E213 where the draft model does not, E223 where the
            drafter does not, E303 where every prompt
            is too long; as `load_base`, `load_heads`, `load_prompts` and `encode`.
        TypeError: where model, heads, prompts, drafter or learning are of another type, or there is no such option.
        ValueError: where a number is out of range, or neither heads nor an n-gram table would draft.

    Example:
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
    job = _job(as_base(model, tokenizer), heads, prompts, chosen, progress)
    if drafter is not None:
        check_drafter(drafter, job.base, job.heads, job.draft)
    encoded = _encoded(job)
    texts, skipped = _answered(job, encoded)
    learned = None if learning is None else _learned(job, texts, learning)
    traced = _traced(job, texts, learned or drafter)
    found = drafter if learned is None else learned.drafter
    provenance = _provenance(job, "" if found is None else found.id)
    calibration = as_calibration(texts, traced, job.top_k, provenance)
    num_heads = 0 if job.heads is None else job.heads.num_heads
    skipped = (*encoded.skipped, *skipped)
    return CalibrationRun(calibration, skipped, encoded.answers_cut, num_heads, learned, tuple(texts))


def _check_drafts(heads: bool, draft: bool, drafter: Drafter | None, learning: Learning | None) -> None:
    """Raise ValueError where nothing would draft, or both heads and a draft model would."""
    if heads and draft:
        raise ValueError("both heads and a draft model are given: leave one out")
    if not heads and drafter is None and learning is None:
        raise ValueError("heads is None: drafter=treeopt.load_drafter(FILE) or learning=treeopt.Learning() is needed")
    if not heads and not draft and learning is not None and not learning.ngram:
        raise ValueError("heads is None and learning.ngram is off, so nothing drafts")


@dataclass(frozen=True)
class _Job:
    """The inputs of a calibration, loaded and checked."""

    base: Base
    loaded: LoadedHeads | None
    heads: MedusaHeads | None  # on the base's device and in its dtype
    draft: Base | None
    prompts: PromptSet
    options: CalibrationOptions
    progress: Progress

    @property
    def top_k(self) -> int:
        """Number of ranks that a trace distinguishes; a token of a higher rank is a miss."""
        return min(MAX_RANKS, self.base.vocab_size)

    @property
    def made_for(self) -> dict[str, str]:
        """Name and id of the base and of the heads; empty without heads."""
        name, heads_id = ("", "") if self.loaded is None else (self.loaded.name, self.loaded.fingerprint)
        return {"model": self.base.name, "model_id": self.base.fingerprint, "heads": name, "heads_id": heads_id}


def _job(
    base: Base, heads: GivenHeads | None, prompts: GivenPrompts, options: CalibrationOptions, progress: Progress
) -> _Job:
    draft = as_draft(options.draft, base)
    chosen = as_prompt_set(prompts, answers=options.responses)
    if heads is None:
        return _Job(base, None, None, draft, chosen, options, progress)
    loaded = as_heads(heads)
    check_heads_fit(base, loaded.heads, loaded.name)
    return _Job(base, loaded, heads_like(base, loaded.heads), draft, chosen, options, progress)


def _encoded(job: _Job) -> Encoded:
    """The prompts as token ids."""
    budget, chat_template = job.options.max_new_tokens, job.options.chat_template
    return encode_prompts(job.base, job.prompts, budget, chat_template=chat_template, scored=job.options.responses)


def _answered(job: _Job, encoded: Encoded) -> tuple[Sequence[Text], tuple[Skipped, ...]]:
    """The texts with their answers, generated or given, and the turns that did not fit into the context."""
    if job.options.responses:
        return encoded.texts, ()
    if job.options.temperature > 0:
        torch.manual_seed(job.options.seed)
    texts, skipped = answer_all(
        job.base, encoded.texts, job.options, progress=lambda done, total: job.progress(done, total, "answers")
    )
    return texts, tuple(skipped)


def _learned(job: _Job, texts: Sequence[Text], learning: Learning) -> Learned:
    """A drafter from the texts."""
    return learn(
        job.base,
        job.heads,
        texts,
        learning,
        options=job.options,
        draft=job.draft,
        source=_source(job, learning),
        progress=job.progress,
    )


def _traced(job: _Job, texts: Sequence[Text], drafter: Learned | Drafter | None) -> list[Traced]:
    """Traces of all texts: by the heads, by one drafter, or each by the learned drafter that left the text out."""
    if isinstance(drafter, Learned):
        proposers, depth = drafter.proposers(job.base, job.heads, texts, job.draft), drafter.drafter.depth
    else:
        proposers = [proposer_for(job.base, job.heads, drafter, job.draft)] * len(texts)
        depth = 0 if drafter is None else drafter.depth
    step_depth = depth if job.options.steps else 0
    target = Target.at_temperature(job.options.temperature, job.base.vocab_size) if job.options.sampled else None
    first = "head 1" if drafter is None else "level 1"
    traced: list[Traced] = []
    hits = trials = 0
    for start in range(0, len(texts), job.options.batch_size):
        part = slice(start, start + job.options.batch_size)
        traced += trace_texts(job.base, proposers[part], texts[part], job.top_k, step_depth=step_depth, target=target)
        for one in traced[start:]:
            hits += int(np.count_nonzero(one.ranks[:, 0] == 0))
            trials += int(np.count_nonzero(one.ranks[:, 0] != NONE))
        job.progress(len(traced), len(texts), f"{first} top-1 {hits / max(trials, 1):.1%}")
    return traced


def _source(job: _Job, learning: Learning) -> dict[str, Any]:
    """The origin of a learned drafter, as its file stores it."""
    return {
        **job.made_for,
        **({} if job.draft is None else {"draft": job.draft.name, "draft_id": job.draft.fingerprint}),
        "dtype": job.base.dtype_name,
        "prompts": {job.prompts.sha256: job.prompts.name},
        "rows": [job.prompts.prompts[0].row, job.prompts.prompts[-1].row],
        "max_new_tokens": job.options.max_new_tokens,
        "learning": dataclasses.asdict(learning),
        "made_by": job.base.versions(),
    }


def _provenance(job: _Job, drafter_id: str) -> Provenance:
    """The origin of a calibration, as its file stores it."""
    settings = {
        "answers": job.options.answers,
        "max_new_tokens": job.options.max_new_tokens,
        "chat_template": _template_hash(job.base, job.options.chat_template),
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
        drafter_id=drafter_id,
    )


def as_calibration(texts: Sequence[Text], traced: Sequence[Traced], top_k: int, provenance: Provenance) -> Calibration:
    """The calibration of traced texts.

    Args:
        texts: by ascending prompt id.
        traced: their traces.
        top_k: ranks that are told apart.
        provenance: the origin.
    """
    return Calibration(
        ranks=np.concatenate([one.ranks for one in traced]),
        offsets=np.concatenate([[0], np.cumsum([len(one.ranks) for one in traced])]).astype(np.int64),
        prompt_ids=tuple(text.prompt_id for text in texts),
        token_hashes=tuple(_token_hash(text.answer) for text in texts),
        top_k=top_k,
        provenance=provenance,
        steps=joined([one.steps for one in traced]),
        target=joined([one.target for one in traced]),
    )


def _template_hash(base: Base, used: bool) -> str:
    """The first digits of the chat template's sha256; `none` where none is used."""
    template = base.tokenizer.chat_template if used and base.tokenizer is not None else None
    return hashlib.sha256(str(template).encode()).hexdigest()[:16] if template else "none"


def _token_hash(tokens: Sequence[int]) -> str:
    """The first digits of an answer's sha256."""
    return hashlib.sha256(np.asarray(tokens, np.int32).tobytes()).hexdigest()[:16]
