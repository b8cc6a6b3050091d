"""Medusa-1: draft heads for a frozen base model (arXiv:2401.10774, section 2.2.1), trained by transformers' Trainer.

The Trainer's model is the heads alone; the base is neither trained nor saved. `run.py` holds what both stages share.
"""

import copy
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from treeopt.errors import Code, TreeoptError
from treeopt.models.base import Base
from treeopt.models.devices import weight_of
from treeopt.models.given import GivenModel, as_base, name_of
from treeopt.models.head_files import save_heads
from treeopt.models.heads import MedusaHeads
from treeopt.progress import Progress, silent
from treeopt.train.data import GivenTexts, as_training_texts, names_of
from treeopt.train.run import TrainingRun, check_outputs, job_of, run_job
from treeopt.train.settings import Settings
from treeopt.train.trainer import HeadScore, HeadsOnBase, HeadsTrainer


@dataclass(frozen=True)
class Trained:
    """The result of `train_heads`."""

    heads: MedusaHeads  # in float32
    held_out: tuple[HeadScore, ...]  # scores of each head on the texts held out; empty where there are none
    steps: int  # optimizer steps


def new_heads(base: Base, num_heads: int, *, blocks: int = 1, shared_lm_head: bool = False) -> MedusaHeads:
    """Heads with the base's own predictions: blocks of zeros, and its LM head, shared or copied (section 2.2.1)."""
    if not shared_lm_head and base.lm_head.bias is not None:
        what = f"the LM head of {base.name} has a bias, which heads with their own LM heads cannot copy"
        raise TreeoptError(Code.HEADS_MISMATCH, what, fix="--shared-lm-head")
    heads = MedusaHeads(num_heads, blocks, base.hidden_size, None if shared_lm_head else base.rows)
    if heads.lm_head is not None:
        with torch.no_grad():
            heads.lm_head.copy_(weight_of(base.lm_head, "weight").float().expand_as(heads.lm_head))
    return heads.to(base.device)


def train_heads(
    model: GivenModel,
    texts: GivenTexts,
    folder: str | os.PathLike[str],
    settings: Settings | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    resume: bool = False,
    overwrite: bool = False,
    progress: Progress = silent,
) -> Trained:
    """Train heads on texts and write them to a folder; losses and accuracies are in its `metrics.jsonl`.

    Args:
        model: the base model: a causal language model of transformers, a folder or hub name, or a `Base`; its weights
            do not change.
        texts: training texts, best the base's own answers as `distill` writes them: a file name or hub data set, a
            list of texts, rows or conversations, or `TrainingTexts`.
        folder: for heads and metrics, and for checkpoints during the run.
        settings: the defaults where None.
        tokenizer: of the model; None takes the one beside the model's weights.
        resume: continue from the last checkpoint in the folder; the result is that of an uninterrupted run.
        overwrite: replace heads, and delete checkpoints, in the folder.
        progress: called after each step.

    Raises:
        TreeoptError: E202 where the folder holds heads or an unfinished run, E204 where it holds a base model or the
            file of the texts, E205 where there is no run to resume, or it has other settings or is damaged, E212 as
            `new_heads`, E303 where no text is left to train on, E403 where the disk is too small, E504 where the loss
            is not finite; as `load_base` and `load_texts`.
        TypeError: where model, texts or settings are of another type.

    Examples:
        >>> import treeopt
        >>> texts = ["import os\\nprint(os.getcwd())", "def main():\\n    return 0"]
        >>> settings = treeopt.Settings(num_heads=2, steps=1, shared_lm_head=True)
        >>> trained = treeopt.train_heads("pocket", texts, "my-heads", settings)
        >>> trained.steps, treeopt.load_heads("my-heads").heads.num_heads
        (1, 2)
    """
    chosen = Settings() if settings is None else settings
    if not isinstance(chosen, Settings):
        raise TypeError(f"settings are treeopt.Settings, not an object of type {type(chosen).__name__}")
    place = Path(folder)
    check_outputs(place, (*names_of(texts), *name_of(model)), resume=resume, overwrite=overwrite)
    base = as_base(model, tokenizer)
    given = as_training_texts(base, texts, length=chosen.length)
    job = job_of(base, given, place, chosen, trained=weights_of(base, chosen))
    heads = new_heads(base, chosen.num_heads, blocks=chosen.blocks, shared_lm_head=chosen.shared_lm_head)
    trainer = run_job(
        job,
        HeadsOnBase(base, heads),
        progress,
        lambda: save_trained(heads, job, {"method": "Medusa-1"}, overwrite=overwrite or resume),
        kind=HeadsTrainer,
        resume=resume,
        overwrite=overwrite,
    )
    return Trained(heads.eval(), trainer.scores, trainer.state.global_step)


def weights_of(base: Base, settings: Settings) -> int:
    """Number of weights of the heads of these settings."""
    d, vocab = base.hidden_size, 0 if settings.shared_lm_head else base.rows
    return settings.num_heads * (settings.blocks * (d * d + d) + vocab * d)


def save_trained(
    heads: MedusaHeads,
    job: TrainingRun,
    method: dict[str, Any],
    *,
    also: Mapping[Path, bytes] | None = None,
    overwrite: bool,
) -> None:
    """Write heads in the base's dtype, with the origin of `method` and with other files: all, or none."""
    base = job.base
    made_by = {**method, **job.begun, "texts": list(job.texts.names), "versions": base.versions()}
    written = copy.deepcopy(heads).to(base.dtype)
    save_heads(written, job.folder, base=base.name, made_by=made_by, also=also, overwrite=overwrite)
