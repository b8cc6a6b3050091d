"""The inputs of a calibration: models, prompts and options, and the origin that files store."""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass
from types import NoneType
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from treeopt.calibration import Provenance
from treeopt.drafter import Drafter
from treeopt.drafting.learn import Learning
from treeopt.drafting.ngram import check_drafter
from treeopt.models.base import Base
from treeopt.models.compatibility import heads_like
from treeopt.models.given import GivenHeads, GivenModel, as_base, as_draft, as_heads
from treeopt.models.heads import MedusaHeads
from treeopt.progress import Progress, silent
from treeopt.runs.shards import Shard
from treeopt.runs.work import ALONE, BatchRun, Chunk, Work
from treeopt.texts.answers import AnswerOptions
from treeopt.texts.prompts import GivenPrompts, PromptSet, as_prompt_set
from treeopt.traces import MAX_RANKS


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
    """The inputs of a calibration, loaded and checked.

    Args:
        base: the base model.
        heads: on the base's device and in its dtype.
        draft: the draft model.
        prompts: to answer, or with their answers.
        options: how they are answered and traced.
        made_for: name and id of the base and of the heads; empty without heads.
        drafter: whose candidates are ranked; None for the heads alone, and where one is learned.
        learning: how a drafter is learned, if one is.
        progress: called after each batch.
    """

    base: Base
    heads: MedusaHeads | None
    draft: Base | None
    prompts: PromptSet
    options: CalibrationOptions
    made_for: dict[str, str]
    drafter: Drafter | None
    learning: Learning | None
    progress: Progress

    @property
    def top_k(self) -> int:
        """Number of ranks that a trace distinguishes; a token of a higher rank is a miss."""
        return min(MAX_RANKS, self.base.vocab_size)

    @property
    def run(self) -> BatchRun[Chunk]:
        """Makes, stores and divides the batches."""
        return ALONE if self.options.work is None else self.options.work

    @property
    def drafter_id(self) -> str:
        """Of the given drafter."""
        return "" if self.drafter is None else self.drafter.id


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
    _check_drafts(heads is not None, options.draft is not None, drafter, learning)
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


def source_of(job: Job) -> dict[str, Any]:
    """The origin of the learned drafter, as its file stores it."""
    return {
        **job.made_for,
        **({} if job.draft is None else {"draft": job.draft.name, "draft_id": job.draft.fingerprint}),
        "dtype": job.base.dtype_name,
        "prompts": {job.prompts.sha256: job.prompts.name},
        "rows": _rows(job.prompts),
        "max_new_tokens": job.options.max_new_tokens,
        "learning": _learning_of(job),
        "made_by": job.base.versions(),
    }


def provenance_of(job: Job, drafter_id: str) -> Provenance:
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
    prompts = {job.prompts.sha256: job.prompts.name}
    made_for: dict[str, Any] = job.made_for
    made_by = job.base.versions()
    return Provenance(**made_for, settings=settings, prompts=prompts, made_by=made_by, drafter_id=drafter_id)


def settings_of(job: Job) -> dict[str, Any]:
    """All that the chunks of a run depend on, in types of JSON; equal in all shards of a run."""
    return {
        "model_id": job.made_for["model_id"],
        "heads_id": job.made_for["heads_id"],
        "draft_id": "" if job.draft is None else job.draft.fingerprint,
        "drafter_id": job.drafter_id,
        "prompts": job.prompts.sha256,
        "rows": _rows(job.prompts),
        "batch_size": job.options.batches,
        **provenance_of(job, job.drafter_id).settings,
        "kind": "dynamic" if job.options.steps else "static",
        "learning": _learning_of(job),
        **job.base.versions(),
        "threads": torch.get_num_threads(),  # sums are rounded differently
    }


def _check_drafts(heads: bool, draft: bool, drafter: Drafter | None, learning: Learning | None) -> None:
    """Raise ValueError where nothing would draft, or both heads and a draft model would."""
    if heads and draft:
        raise ValueError("both heads and a draft model are given: leave one out")
    if not heads and drafter is None and learning is None:
        raise ValueError("heads is None: drafter=treeopt.load_drafter(FILE) or learning=treeopt.Learning() is needed")
    if not heads and not draft and learning is not None and not learning.ngram:
        raise ValueError("heads is None and learning.ngram is off, so nothing drafts")


def _rows(prompts: PromptSet) -> list[int]:
    """The first and the last row."""
    return [prompts.prompts[0].row, prompts.prompts[-1].row]


def _learning_of(job: Job) -> dict[str, Any] | None:
    return None if job.learning is None else dataclasses.asdict(job.learning)


def _template_hash(base: Base, used: bool) -> str:
    """The first digits of the chat template's sha256; `none` where none is used."""
    template = base.tokenizer.chat_template if used and base.tokenizer is not None else None
    return hashlib.sha256(str(template).encode()).hexdigest()[:16] if template else "none"
