"""The inputs of a calibration: models, prompts and options, and the origin that files store."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from treeopt.calibration import MAX_RANKS, Provenance
from treeopt.drafting.learn import Learning
from treeopt.models.base import Base
from treeopt.models.compatibility import heads_like
from treeopt.models.given import GivenHeads, GivenModel, as_draft, as_heads
from treeopt.models.head_files import LoadedHeads
from treeopt.models.heads import MedusaHeads
from treeopt.progress import Progress
from treeopt.runs.shards import Shard
from treeopt.runs.work import Keep, Recording, Share, Work, unsaved, unshared
from treeopt.texts.answers import AnswerOptions
from treeopt.texts.prompts import GivenPrompts, PromptSet, as_prompt_set


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
    def keep(self) -> Keep:
        """Stores the chunks of the work."""
        return unsaved if self.options.work is None else self.options.work.chunk

    @property
    def share(self) -> Share:
        """Divides chunks of the work among processes."""
        return unshared if self.options.work is None else self.options.work.share

    @property
    def recording(self) -> Recording:
        """How the work is reported, stored and divided."""
        return Recording(self.progress, self.keep, self.share)

    @property
    def made_for(self) -> dict[str, str]:
        """Name and id of the base and of the heads; empty without heads."""
        name, heads_id = ("", "") if self.loaded is None else (self.loaded.name, self.loaded.fingerprint)
        return {"model": self.base.name, "model_id": self.base.fingerprint, "heads": name, "heads_id": heads_id}


def job_of(
    base: Base, heads: GivenHeads | None, prompts: GivenPrompts, options: CalibrationOptions, progress: Progress
) -> Job:
    """The inputs, loaded and checked.

    Raises:
        TreeoptError: E212 and E213 where heads or draft model do not fit; as `load_heads`.
    """
    draft = as_draft(options.draft, base)
    chosen = as_prompt_set(prompts, answers=options.responses)
    if heads is None:
        return Job(base, None, None, draft, chosen, options, progress)
    loaded = as_heads(heads)
    return Job(base, loaded, heads_like(base, loaded.heads, loaded.name), draft, chosen, options, progress)


def source_of(job: Job, learning: Learning) -> dict[str, Any]:
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
    made_for: dict[str, Any] = job.made_for
    return Provenance(
        **made_for,
        settings=settings,
        prompts={job.prompts.sha256: job.prompts.name},
        made_by=job.base.versions(),
        drafter_id=drafter_id,
    )


def settings_of(job: Job, learning: Learning | None, drafter_id: str) -> dict[str, Any]:
    """All that the chunks of a run depend on, in types of JSON; equal in all shards of a run.

    Args:
        job: the inputs.
        learning: how a drafter is learned, if one is.
        drafter_id: of the drafter whose candidates are ranked; empty for the heads alone, and where one is learned.
    """
    made_for: Mapping[str, Any] = {
        "model_id": job.base.fingerprint,
        "heads_id": "" if job.loaded is None else job.loaded.fingerprint,
        "draft_id": "" if job.draft is None else job.draft.fingerprint,
        "drafter_id": drafter_id,
    }
    return {
        **made_for,
        "prompts": job.prompts.sha256,
        "rows": [job.prompts.prompts[0].row, job.prompts.prompts[-1].row],
        "batch_size": job.options.batches,
        **provenance_of(job, drafter_id).settings,
        "kind": "dynamic" if job.options.steps else "static",
        "learning": None if learning is None else dataclasses.asdict(learning),
        **job.base.versions(),
        "threads": torch.get_num_threads(),  # sums are rounded differently
    }


def _template_hash(base: Base, used: bool) -> str:
    """The first digits of the chat template's sha256; `none` where none is used."""
    template = base.tokenizer.chat_template if used and base.tokenizer is not None else None
    return hashlib.sha256(str(template).encode()).hexdigest()[:16] if template else "none"
