"""Settings of a run of Medusa-2."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from treeopt.errors import check_choice, check_counts
from treeopt.models.heads import MedusaHeads
from treeopt.train.joint import CONSTANT, SCHEDULES, SINE
from treeopt.train.lora import Lora
from treeopt.train.settings import Settings

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
        for name, value in (("alpha", self.alpha), ("heads_rate", self.heads_rate), ("heads_weight", weight)):
            if not 0 < value < math.inf:
                raise ValueError(f"{name} {value!r}: it must be a finite number above 0")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout {self.dropout!r}: it must be 0 or more, and below 1")
        if self.heads_schedule is not None:
            check_choice("heads_schedule", self.heads_schedule, SCHEDULES)

    @property
    def lora(self) -> Lora:
        """The shape of the adapter."""
        return Lora(self.rank, self.alpha, self.dropout)

    def chosen(self, heads: MedusaHeads | None) -> JointSettings:
        """The settings with the defaults for these trained heads (None: new ones), and with their number and form."""
        schedule = self.heads_schedule or (SINE if heads is None else CONSTANT)
        weight = _WEIGHTS[schedule] if self.heads_weight is None else self.heads_weight
        known = dataclasses.replace(self, heads_schedule=schedule, heads_weight=weight)
        if heads is None:
            return known
        shared, blocks = heads.lm_head is None, heads.bias.shape[0]
        return dataclasses.replace(known, num_heads=heads.num_heads, blocks=blocks, shared_lm_head=shared)
