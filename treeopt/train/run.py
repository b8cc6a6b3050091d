"""A training run, of either stage: its texts, checkpoints, errors of the disk, and the check of its result.

transformers' Trainer provides schedule, accumulation, mixed precision, several devices, checkpoints and resuming. Its
model holds the trained weights alone; the base is not saved.
"""

import contextlib
import math
import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import safetensors.torch
import torch
from accelerate.utils import wait_for_everyone
from transformers import PrinterCallback, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.utils import SAFE_WEIGHTS_NAME

from treeopt.errors import Code, TreeoptError, disk_full
from treeopt.files.atomic import check_space, check_writable
from treeopt.files.outputs import check_no_input
from treeopt.models.base import Base
from treeopt.models.head_files import CONFIG_FILE, WEIGHT_FILES, check_heads_writable
from treeopt.progress import Progress
from treeopt.runs.lock import Lock
from treeopt.train import checkpoints
from treeopt.train.data import Example, TrainingTexts, collate
from treeopt.train.settings import Settings, steps_of
from treeopt.train.trainer import HeadsOnBase, HeadsTrainer, Watch

AnyTrainer = TypeVar("AnyTrainer", bound=HeadsTrainer)
METRICS_FILE = "metrics.jsonl"
_LOGS = 1 << 20  # bytes of metrics, Trainer states and notes


@dataclass(frozen=True)
class TrainingRun:
    """The inputs of a training run, loaded and checked."""

    base: Base  # the base model
    texts: TrainingTexts  # all texts
    train: Sequence[Example]  # the texts to train on
    held_out: Sequence[Example]  # the others
    folder: Path  # for the heads
    settings: Settings  # of the run
    arguments: TrainingArguments  # of the Trainer
    more: Mapping[str, Any] = field(default_factory=dict)  # further entries of `begun`

    @property
    def is_main(self) -> bool:
        """Whether this process writes the files."""
        return bool(self.arguments.process_index == 0)

    @property
    def checkpoints(self) -> Path:
        return self.folder / checkpoints.FOLDER

    @property
    def steps(self) -> int:
        return steps_of(self.settings, len(self.train), self.arguments.world_size)

    @property
    def begun(self) -> dict[str, Any]:
        """What a resumed run has in common with the interrupted one."""
        tokens = sum(len(example.ids) for example in self.texts.examples)  # differs by --length and template, too
        settings = {name: value for name, value in asdict(self.settings).items() if name != "length"}
        return {
            "settings": settings,
            "base": self.base.fingerprint,
            "data": list(self.texts.sha256),
            "tokens": tokens,
            "processes": self.arguments.world_size,
            **self.more,
        }


def job_of(
    base: Base,
    texts: TrainingTexts,
    folder: Path,
    settings: Settings,
    *,
    trained: int,
    more: Mapping[str, Any] | None = None,
) -> TrainingRun:
    """A run over texts, after checking that the disk has space for so many `trained` weights."""
    train, held_out = _split(texts.examples, settings)
    arguments = _trainer_arguments(folder / checkpoints.FOLDER, settings, len(train), base.device)  # joins processes
    job = TrainingRun(base, texts, train, held_out, folder, settings, arguments, more or {})
    if job.is_main:
        checkpoint = 3 * 4 * trained  # weights and AdamW's two moments, in float32
        held = sum(path.stat().st_size for path in job.checkpoints.rglob("*") if path.is_file())
        # Two checkpoints are kept; a third, or the smaller file of the heads, is written before the oldest is deleted.
        check_space(folder, 3 * checkpoint + _LOGS - held, "training these heads")
    return job


def run_job(
    job: TrainingRun,
    model: HeadsOnBase,
    progress: Progress,
    save: Callable[[], None],
    *,
    kind: type[AnyTrainer],
    resume: bool,
    overwrite: bool,
) -> AnyTrainer:
    """Train by this kind of Trainer, evaluate on the texts held out, save, and delete the checkpoints."""
    # The first process has the lock for all.
    with Lock(job.checkpoints) if job.is_main else contextlib.nullcontext():
        try:
            if job.is_main:
                checkpoints.check_unfinished(job.folder, resume=resume, overwrite=overwrite)  # another may have begun
                (checkpoints.check_same if resume else checkpoints.begin)(job.checkpoints, job.begun)
            wait_for_everyone()
            checkpoint = checkpoints.last_checkpoint(job.checkpoints)
            trainer = kind(
                model=model,
                args=job.arguments,
                train_dataset=job.train,
                eval_dataset=_even(job.held_out, job.arguments),
                data_collator=collate,
                callbacks=[Watch(progress), checkpoints.Marks()],
            )
            trainer.remove_callback(PrinterCallback)
            trainer.metrics_file = job.folder / METRICS_FILE
            _train(trainer, checkpoint, job)
            if job.is_main:
                save()
                shutil.rmtree(job.checkpoints)
        except Exception as error:
            if not disk_full(error):
                raise
            checkpoints.drop_half_written(job.checkpoints)
            fix = "free some space; the same command with --resume continues from the last checkpoint"
            raise TreeoptError(Code.OUT_OF_MEMORY, "the disk is full", at=str(job.folder), fix=fix) from error
    return trainer


def check_outputs(folder: Path, inputs: Sequence[str], *, resume: bool, overwrite: bool) -> None:
    """Check, before any work, that a run can begin or continue in a folder."""
    check_heads_writable(folder, overwrite=overwrite or resume)
    checkpoints.check_unfinished(folder, resume=resume, overwrite=overwrite)
    if folder.exists():
        check_writable(folder / METRICS_FILE, overwrite=overwrite or resume)
    for file in (METRICS_FILE, CONFIG_FILE, WEIGHT_FILES[0]):
        check_no_input(folder / file, *inputs)


def _even(held_out: Sequence[Example], arguments: TrainingArguments) -> Sequence[Example]:
    """The texts, and texts of no answer, so that no process repeats texts to fill its batches."""
    size = arguments.world_size * arguments.per_device_eval_batch_size if arguments.world_size > 1 else 1
    return [*held_out, *(Example(text.ids[:1], ()) for text in [*held_out[:1]] * (-len(held_out) % size))]


def _train(trainer: HeadsTrainer, checkpoint: Path | None, job: TrainingRun) -> None:
    """Train, and evaluate on the texts held out; without any the Trainer has no scores."""
    if checkpoint is not None and checkpoints.step_of(checkpoint) >= job.steps:  # the Trainer would take one step more
        trainer.model.load_state_dict(safetensors.torch.load_file(checkpoint / SAFE_WEIGHTS_NAME))
        trainer.state = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME))
    else:
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    examples = job.held_out or job.train
    _check_trained(trainer.accelerator.unwrap_model(trainer.model), examples[: job.settings.batch_size])
    trainer.scores = ()
    if job.held_out:
        trainer.evaluate()


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
    """Examples to train on, and random ones to hold out; what is held out is not trained on, also where rows repeat."""
    order = random.Random(settings.seed).sample(range(len(examples)), len(examples))
    held_out = [examples[i] for i in sorted(order[: settings.holdout])]
    known = {example.ids.tobytes() for example in held_out}
    trained = [example for example in examples if example.ids.tobytes() not in known]
    if not trained:
        what = f"{settings.holdout} of {len(examples)} texts are to be held out: no other is left to train on"
        raise TreeoptError(Code.PROMPTS_EMPTY, what, fix="lower --holdout")
    return trained, held_out


def _trainer_arguments(folder: Path, settings: Settings, texts: int, device: torch.device) -> TrainingArguments:
    arguments = TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=settings.epochs,
        max_steps=settings.steps or -1,
        per_device_train_batch_size=settings.batch_size,
        per_device_eval_batch_size=settings.batch_size,
        gradient_accumulation_steps=settings.accumulate,
        learning_rate=settings.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=settings.warmup,
        weight_decay=settings.weight_decay,
        save_total_limit=2,  # a run that is killed while it saves still has the one before
        bf16=settings.bf16,
        use_cpu=device.type == "cpu",
        seed=settings.short_seed,
        label_names=["answers"],
        remove_unused_columns=False,
        report_to=[],
        disable_tqdm=True,
    )
    if device.type == "cuda" and arguments.device.index not in (None, device.index):
        what = f"the base is on {device}, but the Trainer uses {arguments.device}"
        fix = f"CUDA_VISIBLE_DEVICES={device.index}, and leave out --device"
        raise TreeoptError(Code.DEVICE_UNUSABLE, what, fix=fix)
    steps = steps_of(settings, texts, arguments.world_size)
    # Checkpoints are at logged steps, so that a resumed run logs the same lines as an uninterrupted one.
    arguments.logging_steps = min(settings.log_every, steps)
    arguments.save_steps = math.ceil(steps / settings.saves / arguments.logging_steps) * arguments.logging_steps
    arguments._n_gpu = min(arguments.n_gpu, 1)  # one device a process: torchrun starts a process for each
    return arguments
