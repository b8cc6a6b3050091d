"""Settings of a training run, and the Trainer's arguments for them."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from treeopt.errors import check_choice, check_counts
from treeopt.models.heads import MedusaHeads
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
        _check_positive(epochs=self.epochs, learning_rate=self.learning_rate)
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


def _check_positive(**numbers: float) -> None:
    for name, value in numbers.items():
        if not 0 < value < math.inf:
            raise ValueError(f"{name} {value!r}: it must be a finite number above 0")


def steps_of(settings: Settings, texts: int, processes: int) -> int:
    """Optimizer steps of a run over a number of texts, whose batches are divided among processes."""
    a_pass = math.ceil(math.ceil(texts / (settings.batch_size * processes)) / settings.accumulate)
    return settings.steps or math.ceil(a_pass * settings.epochs)


CONSTANT, SINE = "constant", "sine"
SCHEDULES = (CONSTANT, SINE)
# The paper's lambda_0 (appendix B): of Vicuna-7B after stage 1, and of Vicuna-33B without it.
_WEIGHTS = {CONSTANT: 0.2, SINE: 0.01}


@dataclass(frozen=True)
class JointSettings(Settings):
    """Settings of `train_jointly`; the defaults are the paper's (section 2.2.2 and appendix B).

    Args:
        learning_rate: peak of the adapter's cosine schedule.
        rank: of the adapter's updates.
        alpha: scale of the updates, which are multiplied by alpha / rank.
        dropout: share of the inputs of the updates that are left out while training.
        heads_rate: learning rate of the heads over that of the adapter.
        heads_weight: lambda_0, the weight of the heads' loss, at its peak; None is 0.2 where it is constant, and 0.01
            on the sine schedule.
        heads_schedule: `constant`, or `sine`: rising from 0; None is `constant` for trained heads and `sine` for new
            ones.
        self_distill: the base's loss is its divergence from the original base, in place of the cross-entropy of the
            texts.

    Raises:
        ValueError: as `Settings`, and where one of these is out of range.
    """

    learning_rate: float = 5e-4
    rank: int = 32
    alpha: float = 16.0
    dropout: float = 0.05
    heads_rate: float = 4.0
    heads_weight: float | None = None
    heads_schedule: str | None = None
    self_distill: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(rank=self.rank)
        weight = 1.0 if self.heads_weight is None else self.heads_weight
        _check_positive(alpha=self.alpha, heads_rate=self.heads_rate, heads_weight=weight)
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout {self.dropout!r}: it must be 0 or more, and below 1")
        if self.heads_schedule is not None:
            check_choice("heads_schedule", self.heads_schedule, SCHEDULES)

    def chosen(self, heads: MedusaHeads | None) -> JointSettings:
        """The settings with the defaults for these trained heads (None: new ones), and with their number and form."""
        schedule = self.heads_schedule or (SINE if heads is None else CONSTANT)
        weight = _WEIGHTS[schedule] if self.heads_weight is None else self.heads_weight
        known = dataclasses.replace(self, heads_schedule=schedule, heads_weight=weight)
        if heads is None:
            return known
        shared, blocks = heads.lm_head is None, heads.bias.shape[0]
        return dataclasses.replace(known, num_heads=heads.num_heads, blocks=blocks, shared_lm_head=shared)
