"""The Trainer of Medusa-2: its model, the weight of the heads' loss, and its two learning rates."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from treeopt.errors import Code, TreeoptError
from treeopt.models.heads import MedusaHeads
from treeopt.train.joint_loss import joint_head_losses, kl_loss, lm_loss, next_tokens
from treeopt.train.lora import Adapted
from treeopt.train.loss import IGNORED, targets, weighted
from treeopt.train.trainer import HeadsOnBase, HeadsTrainer, no_tally, prefix_of

CONSTANT, SINE = "constant", "sine"
SCHEDULES = (CONSTANT, SINE)


def heads_weight(peak: float, schedule: str, step: int, steps: int) -> float:
    """lambda_0, the weight of the heads' loss, at a step from 0.

    Args:
        peak: its greatest value.
        schedule: `constant`, or `sine`: from 0 to the peak at the end of the run by a quarter of a sine (section
            2.2.2).
        step: steps done.
        steps: all steps.
    """
    return peak * math.sin(math.pi / 2 * step / steps) if schedule == SINE else peak


@dataclass(frozen=True)
class BaseScore:
    """The base's next-token scores on texts, in nats.

    Args:
        loss: mean cross-entropy with the adapter.
        original_loss: without the adapter.
        divergence: mean KL(p_original || p).
        trials: number of tokens.
    """

    loss: float
    original_loss: float
    divergence: float
    trials: int


class JointModel(HeadsOnBase):
    """Heads and adapter as the Trainer's model; the base is neither trained nor saved.

    Attributes:
        heads_weight: lambda_0; changed before each step.
        heads_learning_rate: of the step; changed before each step.
    """

    def __init__(self, adapted: Adapted, heads: MedusaHeads, *, self_distill: bool) -> None:
        super().__init__(adapted.base, heads)
        self.adapter = nn.ParameterList(adapted.weights)
        self.dropouts = nn.ModuleList(adapted.dropouts)  # follow `train` and `eval` of this module
        self.heads_weight = self.heads_learning_rate = 0.0
        self._adapted = (adapted,)
        self.self_distill = self_distill
        self._lm_tally = no_tally((4,), adapted.base.device)

    def forward(self, ids: Tensor, answers: Tensor) -> dict[str, Tensor]:
        """The loss of a batch from `data.collate`."""
        (adapted,) = self._adapted
        lm_head = adapted.base.lm_head
        following = next_tokens(ids, answers)
        rows = following != IGNORED
        _, states = adapted.base.forward(ids, use_cache=False, logits_to_keep=1)
        hidden, following = states[rows], following[rows]
        loss = self._lm_loss(adapted, ids, rows, hidden, following)
        true = targets(ids, answers, self.heads.num_heads)[rows]
        known = (true != IGNORED).any(-1)
        hidden, true = hidden[known].to(self.heads.bias.dtype), true[known]
        losses = joint_head_losses(self.heads, hidden, true, lm_head)
        # Accuracies are those of the merged LM head, which is made only where heads share it and hits are counted.
        read = self.counts_hits and self.heads.lm_head is None
        self.count(losses.detach(), hidden.detach(), true, adapted.plain_lm_head() if read else lm_head)
        return {"loss": loss + self.heads_weight * weighted(losses)}

    def take_lm_tally(self) -> Tensor:
        """float64 [4]: summed loss, divergence and original loss, and tokens. Resets the tally."""
        tally, self._lm_tally = self._lm_tally, no_tally((4,), self._lm_tally.device)
        return tally

    def reset(self) -> None:
        super().reset()
        self.take_lm_tally()

    def _lm_loss(self, adapted: Adapted, ids: Tensor, rows: Tensor, hidden: Tensor, following: Tensor) -> Tensor:
        """L_LM, which is counted; in evaluation all of cross-entropy, divergence and original loss are counted."""
        lm_head, original = adapted.base.lm_head, adapted.original
        loss = divergence = original_loss = torch.zeros((), device=hidden.device)
        if self.self_distill or not self.training:
            with torch.no_grad():
                _, states = original.forward(ids, use_cache=False, logits_to_keep=1)
            divergence = kl_loss(lm_head, original.lm_head, hidden, states[rows])
        if not self.training:
            original_loss = lm_loss(original.lm_head, states[rows], following).detach()
        if not (self.self_distill and self.training):
            loss = lm_loss(lm_head, hidden, following)
        counted = torch.stack([loss.detach(), divergence.detach(), original_loss, torch.ones_like(original_loss)])
        self._lm_tally += counted * len(following)
        return divergence if self.self_distill else loss


class JointTrainer(HeadsTrainer):
    """A Trainer of heads and adapter, with a learning rate for each.

    Attributes:
        heads_rate: learning rate of the heads over that of the adapter.
        weight_at: lambda_0 by steps done and all steps.
        adapted: base and adapter.
        base_score: on the texts held out, after `evaluate`.
    """

    heads_rate: float
    weight_at: Callable[[int, int], float]
    adapted: Adapted
    base_score: BaseScore | None = None

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """AdamW with groups for the adapter (first: its rate is the one that the Trainer logs) and the heads."""
        if getattr(self, "optimizer", None) is None:
            trained = self.accelerator.unwrap_model(self.model)
            kind, options = self.get_optimizer_cls_and_kwargs(self.args, trained)
            decayed = set(self.get_decay_parameter_names(trained))
            groups = []
            for prefix, rate in (("adapter.", 1.0), ("heads.", self.heads_rate)):
                for decays in (True, False):
                    found = [
                        parameter
                        for name, parameter in trained.named_parameters()
                        if name.startswith(prefix) and (name in decayed) == decays
                    ]
                    decay = self.args.weight_decay if decays else 0.0
                    groups.append({"params": found, "lr": rate * self.args.learning_rate, "weight_decay": decay})
            self.optimizer: torch.optim.Optimizer = kind([group for group in groups if group["params"]], **options)
        return self.optimizer

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        model = self.accelerator.unwrap_model(self.model)
        *sums, trials = self.accelerator.reduce(model.take_lm_tally(), "sum").tolist()
        if trials:
            loss, divergence, original_loss = (total / trials for total in sums)
            if not math.isfinite(loss + divergence):
                what = f"the base's loss is not finite at step {self.state.global_step}"
                raise TreeoptError(Code.NOT_FINITE, what, fix="lower --learning-rate, or check the base model")
            prefix = prefix_of(logs)
            if prefix:
                self.base_score = BaseScore(loss, original_loss, divergence, int(trials))
                found = {"lm_loss": loss, "original_lm_loss": original_loss, "kl": divergence}
                logs |= {prefix + name: value for name, value in found.items()}
            else:
                logs |= {"kl": divergence} if model.self_distill else {"lm_loss": loss}
                logs |= {"heads_weight": model.heads_weight, "heads_learning_rate": model.heads_learning_rate}
        super().log(logs, start_time)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        model = self.accelerator.unwrap_model(self.model)
        model.heads_weight = self.weight_at(1, 1)  # that of the end of the run
        return super().evaluate(*args, **kwargs)


class HeadsWeight(TrainerCallback):
    """Sets lambda_0, and notes the learning rate of the heads, before each step."""

    def __init__(self, model: JointModel, weight_at: Callable[[int, int], float]) -> None:
        self._model, self._weight_at = model, weight_at

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._model.heads_weight = self._weight_at(state.global_step, state.max_steps)
        self._model.heads_learning_rate = float(kwargs["optimizer"].param_groups[-1]["lr"])
