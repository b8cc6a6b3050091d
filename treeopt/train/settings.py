"""Settings of a training run, and the Trainer's arguments for them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import TrainingArguments

from treeopt.errors import Code, TreeoptError, check_counts
from treeopt.sampling import check_seed

_COUNTS = ("num_heads", "batch_size", "accumulate", "log_every", "saves", "length")
_SEEDS = 2**32  # seeds of numpy's generator, which transformers seeds too


@dataclass(frozen=True)
class Settings:
    """Settings of a training run; the defaults are the paper's where it states them.

    Args:
        num_heads: H.
        blocks: residual blocks of each head.
        shared_lm_head: use the base's LM head: a tenth of the memory, and much faster steps.
        epochs: passes over the texts.
        steps: optimizer steps in place of epochs, where not 0.
        batch_size: texts of one forward.
        accumulate: forwards of one optimizer step.
        learning_rate: peak of the cosine schedule.
        warmup: share of the steps in which the rate rises.
        weight_decay: of AdamW.
        holdout: number of texts held out of training, for evaluation.
        log_every: steps between two lines of metrics; at most all of them.
        saves: checkpoints over the run; the last two are kept.
        bf16: mixed precision in the heads; their weights stay float32.
        seed: of the order of texts and of those held out.
        length: most tokens of a text; `TrainingTexts` have a length already.

    Raises:
        ValueError: where nothing would be trained, or a number is out of range.
    """

    num_heads: int = 5
    blocks: int = 1
    shared_lm_head: bool = False
    epochs: float = 1.0
    steps: int = 0
    batch_size: int = 8
    accumulate: int = 1
    learning_rate: float = 1e-3
    warmup: float = 0.05
    weight_decay: float = 0.0
    holdout: int = 0
    log_every: int = 10
    saves: int = 10
    bf16: bool = False
    seed: int = 0
    length: int = 2048

    def __post_init__(self) -> None:
        check_seed(self.seed)
        check_counts(**{name: getattr(self, name) for name in _COUNTS})
        for name in ("epochs", "learning_rate"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} {getattr(self, name)!r}: it must be a finite number above 0")
        if not 0 <= self.warmup < 1 or not 0 <= self.weight_decay < math.inf:
            given = f"warmup {self.warmup!r}, weight_decay {self.weight_decay!r}"
            raise ValueError(f"{given}: both must be 0 or more, and warmup below 1")
        check_counts(0, blocks=self.blocks, steps=self.steps, holdout=self.holdout)
        if not self.blocks and self.shared_lm_head:
            raise ValueError("heads without blocks that share the base's LM head have nothing to train")

    @property
    def short_seed(self) -> int:
        """The seed in 32 bits."""
        return self.seed % _SEEDS


def steps_of(settings: Settings, texts: int) -> int:
    """Optimizer steps of a run over a number of texts."""
    a_pass = math.ceil(texts / (settings.batch_size * settings.accumulate))
    return settings.steps or math.ceil(a_pass * settings.epochs)


def trainer_arguments(folder: Path, settings: Settings, texts: int, device: torch.device) -> TrainingArguments:
    """The Trainer's arguments.

    Args:
        folder: of the checkpoints.
        settings: of the run.
        texts: number of texts to train on.
        device: of the base.

    Raises:
        TreeoptError: E402 where the Trainer would use another device.
    """
    steps = steps_of(settings, texts)
    # Checkpoints are at logged steps, so that a resumed run logs the same lines as an uninterrupted one.
    log_every = min(settings.log_every, steps)
    every = math.ceil(steps / settings.saves / log_every) * log_every
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
        logging_steps=log_every,
        save_steps=every,
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
    arguments._n_gpu = min(arguments.n_gpu, 1)  # one device a process: torchrun starts a process for each
    return arguments
