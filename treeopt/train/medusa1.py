"""Medusa-1: draft heads for a frozen base model (arXiv:2401.10774, section 2.2.1), trained by transformers' Trainer.

The Trainer provides schedule, accumulation, mixed precision, several devices, checkpoints and resuming. Its model is
the heads alone; the base is neither trained nor saved.
"""

from __future__ import annotations

import copy
import math
import os
import random
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from accelerate.utils import wait_for_everyone
from transformers import PreTrainedTokenizerBase, TrainerState, TrainingArguments, set_seed
from transformers.trainer import TRAINER_STATE_NAME
from transformers.utils import SAFE_WEIGHTS_NAME

from treeopt.errors import Code, TreeoptError
from treeopt.files.atomic import check_space, check_writable
from treeopt.files.outputs import check_no_input
from treeopt.models.base import Base
from treeopt.models.given import GivenModel, as_base, name_of
from treeopt.models.heads import MedusaHeads
from treeopt.models.layouts import CONFIG_FILE, WEIGHT_FILES, check_heads_writable, save_heads
from treeopt.progress import Progress, silent
from treeopt.train.checkpoints import FOLDER as CHECKPOINTS
from treeopt.train.checkpoints import begin, check_same, check_unfinished, drop_half_written, last_checkpoint, step_of
from treeopt.train.data import Example, TrainingTexts, collate
from treeopt.train.disk import is_full
from treeopt.train.given_texts import GivenTexts, as_training_texts, names_of
from treeopt.train.settings import Settings, steps_of, trainer_arguments
from treeopt.train.trainer import HeadScore, HeadsOnBase, HeadsTrainer, TrainerData, trainer_of

METRICS_FILE = "metrics.jsonl"
_LOGS = 1 << 20  # bytes of metrics, Trainer states and notes


@dataclass(frozen=True)
class Trained:
    """The result of `train_heads`.

    Args:
        heads: in float32.
        held_out: scores of each head on the texts held out; empty where there are none.
        steps: optimizer steps.
    """

    heads: MedusaHeads
    held_out: tuple[HeadScore, ...]
    steps: int


def new_heads(base: Base, num_heads: int, *, blocks: int = 1, shared_lm_head: bool = False) -> MedusaHeads:
    """Heads with the base's own predictions: blocks of zeros, and its LM head, shared or copied (section 2.2.1).

    Raises:
        TreeoptError: E212 where the LM head would be copied and has a bias, which the layout cannot hold.
    """
    if not shared_lm_head and base.lm_head.bias is not None:
        what = f"the LM head of {base.name} has a bias, which heads with their own LM heads cannot copy"
        raise TreeoptError(Code.HEADS_MISMATCH, what, fix="--shared-lm-head")
    heads = MedusaHeads(num_heads, blocks, base.hidden_size, None if shared_lm_head else base.vocab_size)
    if heads.lm_head is not None:
        with torch.no_grad():
            heads.lm_head.copy_(base.lm_head.weight.float().expand_as(heads.lm_head))
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
    """Train heads on texts and write them to a folder, with losses and accuracies in `metrics.jsonl`.

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

    Example:
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
    job = _job(base, as_training_texts(base, texts, length=chosen.length), place, chosen)
    heads = new_heads(base, chosen.num_heads, blocks=chosen.blocks, shared_lm_head=chosen.shared_lm_head)
    try:
        if job.is_main:
            (check_same if resume else begin)(job.checkpoints, job.begun)
        wait_for_everyone()
        checkpoint = last_checkpoint(job.checkpoints, min(int(job.arguments.save_steps), job.steps))
        set_seed(chosen.short_seed)
        trainer = trainer_of(job.data, heads, job.arguments, place / METRICS_FILE, progress)
        scores = _trained(trainer, checkpoint, job)
        if job.is_main:
            _save(heads, job, overwrite=overwrite or resume)
            shutil.rmtree(job.checkpoints)
    except Exception as error:
        if not is_full(error):
            raise
        raise _disk_full(place) from error
    return Trained(heads.eval(), scores, trainer.state.global_step)


@dataclass(frozen=True)
class _Job:
    """The inputs of a training run, loaded and checked.

    Args:
        texts: all texts.
        data: the base, the texts to train on, and those held out.
        folder: for the heads.
        settings: of the run.
        arguments: of the Trainer.
    """

    texts: TrainingTexts
    data: TrainerData
    folder: Path
    settings: Settings
    arguments: TrainingArguments

    @property
    def is_main(self) -> bool:
        """Whether this process writes the files."""
        return bool(self.arguments.process_index == 0)

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.folder / CHECKPOINTS

    @property
    def steps(self) -> int:
        """Optimizer steps."""
        return steps_of(self.settings, len(self.data.train))

    @property
    def begun(self) -> dict[str, Any]:
        """What a resumed run must have in common with the interrupted one."""
        tokens = sum(len(example.ids) for example in self.texts.examples)  # differs by --length and template, too
        settings = {name: value for name, value in asdict(self.settings).items() if name != "length"}
        return {
            "settings": settings,
            "base": self.data.base.fingerprint,
            "data": list(self.texts.sha256),
            "tokens": tokens,
        }


def _job(base: Base, texts: TrainingTexts, folder: Path, settings: Settings) -> _Job:
    train, held_out = _split(texts.examples, settings)
    arguments = trainer_arguments(folder / CHECKPOINTS, settings, len(train), base.device)  # joins the other processes
    job = _Job(texts, TrainerData(base, train, held_out), folder, settings, arguments)
    if job.is_main:
        check_space(folder, _disk_needed(job), "training these heads")
    return job


def check_outputs(folder: Path, inputs: Sequence[str], *, resume: bool, overwrite: bool) -> None:
    """Check, before any work, that a run can begin or continue in a folder.

    Args:
        folder: for the heads.
        inputs: names of the texts' files and of the base model's folder.
        resume: continue an unfinished run.
        overwrite: replace heads, metrics and an unfinished run.

    Raises:
        TreeoptError: as `check_heads_writable` and `check_unfinished`; E204 where the run would replace one of its
            inputs.
    """
    check_heads_writable(folder, overwrite=overwrite or resume)
    checkpoints = check_unfinished(folder, resume=resume, overwrite=overwrite)
    if folder.exists():
        check_writable(folder / METRICS_FILE, overwrite=overwrite or resume)
    for name in inputs:
        path = Path(os.path.realpath(Path(name).expanduser()))
        check_no_input(folder / METRICS_FILE, path)
        check_no_input(folder / CONFIG_FILE, path)
        removed = Path(os.path.realpath(checkpoints))
        if os.path.exists(path) and removed in (path, *path.parents):
            what = f"{name} lies among the checkpoints, which are deleted at the end of the run"
            raise TreeoptError(Code.FILE_UNWRITABLE, what, fix="move it elsewhere, or choose another folder with -o")


def _trained(trainer: HeadsTrainer, checkpoint: Path | None, job: _Job) -> tuple[HeadScore, ...]:
    """Train, and return the scores on the texts held out."""
    if checkpoint is not None and step_of(checkpoint) >= job.steps:  # the Trainer would take one step more
        trainer.model.load_state_dict(safetensors.torch.load_file(checkpoint / SAFE_WEIGHTS_NAME))
        trainer.state = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME))
    else:
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    examples = job.data.held_out or job.data.train
    _check_trained(trainer.accelerator.unwrap_model(trainer.model), examples[: job.settings.batch_size])
    if not job.data.held_out:
        return ()
    trainer.evaluate()
    return trainer.scores


def _save(heads: MedusaHeads, job: _Job, *, overwrite: bool) -> None:
    """Write the heads in the base's dtype; where that fails, delete what was written."""
    base, folder = job.data.base, job.folder
    made_by = {"method": "Medusa-1", **job.begun, "texts": list(job.texts.names), "versions": base.versions()}
    new = [path for path in (folder / WEIGHT_FILES[0], folder / CONFIG_FILE) if not path.exists()]
    try:
        save_heads(copy.deepcopy(heads).to(base.dtype), folder, base=base.name, made_by=made_by, overwrite=overwrite)
    except BaseException:
        for path in new:
            path.unlink(missing_ok=True)
        raise


def _disk_full(folder: Path) -> TreeoptError:
    """E403, after half-written checkpoints are deleted."""
    drop_half_written(folder / CHECKPOINTS)
    fix = "free some space; the same command with --resume continues from the last checkpoint"
    return TreeoptError(Code.OUT_OF_MEMORY, "the disk is full", at=str(folder), fix=fix)


def _disk_needed(job: _Job) -> int:
    """Most bytes of a run on disk at once, beyond those of existing checkpoints."""
    base, settings = job.data.base, job.settings
    d, vocab = base.hidden_size, 0 if settings.shared_lm_head else base.vocab_size
    weights = settings.num_heads * (settings.blocks * (d * d + d) + vocab * d)
    saved = weights * int(base.dtype.itemsize)
    checkpoint = 3 * 4 * weights  # weights and AdamW's two moments, in float32
    written = math.ceil(job.steps / int(job.arguments.save_steps))
    # Two checkpoints are kept; a third is written before the oldest is deleted.
    most = max(min(3, written) * checkpoint, min(2, written) * checkpoint + saved)
    held = sum(path.stat().st_size for path in job.checkpoints.rglob("*") if path.is_file())
    return most + _LOGS - held


@torch.no_grad()
def _check_trained(model: HeadsOnBase, examples: Sequence[Example]) -> None:
    """Raise E504 where the loss is not finite after the last step; logged losses are those before a step."""
    batch = {name: ids.to(model.heads.bias.device) for name, ids in collate(examples).items()}
    loss = model(**batch)["loss"]
    model.take_tally()
    if not torch.isfinite(loss):
        what = "the heads' loss is not finite after the last step"
        raise TreeoptError(Code.NOT_FINITE, what, fix="lower --learning-rate, and start again with --force")


def _split(examples: Sequence[Example], settings: Settings) -> tuple[list[Example], list[Example]]:
    """Examples to train on, and random ones to hold out."""
    if settings.holdout >= len(examples):
        what = f"{settings.holdout} of {len(examples)} texts are to be held out: none is left to train on"
        raise TreeoptError(Code.PROMPTS_EMPTY, what, fix="lower --holdout")
    order = random.Random(settings.seed).sample(range(len(examples)), len(examples))
    held_out = set(order[: settings.holdout])
    return [e for i, e in enumerate(examples) if i not in held_out], [examples[i] for i in sorted(held_out)]
