"""The Trainer of heads: its model, and its log."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from treeopt.errors import Code, TreeoptError
from treeopt.files.atomic import write_text
from treeopt.models.base import Base
from treeopt.models.heads import MedusaHeads
from treeopt.progress import Progress
from treeopt.train.loss import IGNORED, TOPS, head_losses, hits, targets, weighted

_TIMES = ("_runtime", "_per_second", "_time")  # ends of names in the log whose values differ between equal runs


@dataclass(frozen=True)
class HeadScore:
    """One head's scores on texts."""

    loss: float | None  # mean cross-entropy in nats; None of no tokens
    top: tuple[float, ...]  # accuracies of the top 1 .. 5 guesses
    trials: int  # number of tokens


class HeadsOnBase(nn.Module):
    """Heads as the Trainer's model. The base is in a tuple, so that it is neither trained nor saved."""

    def __init__(self, base: Base, heads: MedusaHeads) -> None:
        super().__init__()
        self.heads = heads
        self.counts_hits = False
        self._base = (base,)
        counts = torch.float32 if base.device.type == "mps" else torch.float64  # mps has no float64
        self.tally = torch.zeros(heads.num_heads + 1, 3 + TOPS, dtype=counts, device=base.device)

    def forward(self, ids: Tensor, answers: Tensor) -> dict[str, Tensor]:
        """The loss of a batch from `data.collate`."""
        (base,) = self._base
        with torch.no_grad(), torch.autocast(base.device.type, enabled=False):  # states as decoding has them
            _, hidden = base.forward(ids, use_cache=False, logits_to_keep=1)
        true = targets(ids, answers, self.heads.num_heads)
        rows = (true != IGNORED).any(-1)
        hidden, true = hidden[rows].to(self.heads.bias.dtype), true[rows]
        losses = head_losses(self.heads, hidden, true, base.lm_head)
        self.count(losses.detach(), hidden, true, base.lm_head)
        return {"loss": weighted(losses)}

    def take_tally(self) -> Tensor:
        """[H + 1, 3 + 5]: summed loss, its trials, trials of the hits, top-1 .. top-5 hits of each head. Resets it.

        The last row is of the base: summed loss, divergence and original loss, and tokens.
        """
        tally, self.tally = self.tally, torch.zeros_like(self.tally)
        return tally

    def count(self, losses: Tensor, hidden: Tensor, true: Tensor, lm_head: nn.Linear) -> None:
        """Add a batch to the tally; arguments as of `head_losses`, whose result is `losses`."""
        trials = (true != IGNORED).sum(0)
        of_heads = self.tally[:-1]
        of_heads[:, 0] += losses * trials
        of_heads[:, 1] += trials
        if self.counts_hits:
            of_heads[:, 2] += trials
            of_heads[:, 3:] += hits(self.heads, hidden, true, lm_head)


class HeadsTrainer(Trainer):
    """A Trainer that logs each head's loss and accuracies, and writes its log to one file."""

    metrics_file: Path
    scores: tuple[HeadScore, ...] = ()

    def training_step(self, *given: Any, **options: Any) -> Tensor:
        """As the Trainer's; accuracies are counted where the step is logged."""
        model = self.accelerator.unwrap_model(self.model)
        step = self.state.global_step + 1
        model.counts_hits = step % int(self.args.logging_steps) == 0 or step == self.state.max_steps
        loss: Tensor = super().training_step(*given, **options)
        return loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        tally = self.accelerator.reduce(self.accelerator.unwrap_model(self.model).take_tally(), "sum")
        if tally[:-1, 1].any():
            self.add_base(logs, *tally[-1, :4].tolist())
            self.scores = _scores(tally[:-1])
            wrong = [str(h) for h, score in enumerate(self.scores, start=1) if not math.isfinite(score.loss or 0.0)]
            if wrong:
                what = f"the loss of head {', '.join(wrong)} is not finite at step {self.state.global_step}"
                raise TreeoptError(Code.NOT_FINITE, what, fix="lower --learning-rate, or check the base model")
            prefix = prefix_of(logs)
            for h, score in enumerate(self.scores, start=1):
                logs |= {} if score.loss is None else {f"{prefix}head{h}_loss": score.loss}
                logs |= {f"{prefix}head{h}_top{i}": share for i, share in enumerate(score.top, start=1)}
        super().log(logs, start_time)
        if self.is_world_process_zero():
            lines = [line for line in self.state.log_history if "train_runtime" not in line]
            lines = [{key: line[key] for key in line if not key.endswith(_TIMES)} for line in lines]
            write_text(self.metrics_file, "".join(json.dumps(line) + "\n" for line in lines))

    def add_base(self, logs: dict[str, float], *sums: float) -> None:
        """Add the base's losses to a log line, where they are counted; `sums` is the last row of the tally."""

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        self.accelerator.unwrap_model(self.model).counts_hits = True
        found: dict[str, float] = super().evaluate(*args, **kwargs)
        return found


class Watch(TrainerCallback):
    """Reports progress, with the last losses and accuracies that were logged."""

    def __init__(self, progress: Progress) -> None:
        self._progress, self._note = progress, ""

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float],
        **kwargs: Any,
    ) -> None:
        if "head1_top1" in logs:
            self._note = f"head 1 loss {logs['head1_loss']:.3f} top-1 {logs['head1_top1']:.1%}"

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._progress(state.global_step, state.max_steps, self._note)
        control.should_log |= state.global_step == state.max_steps  # the last steps, too


def prefix_of(logs: Mapping[str, float]) -> str:
    """The prefix of the names in a log line of the texts held out; empty for other lines."""
    return "eval_" if "eval_loss" in logs else ""


def _scores(tally: Tensor) -> tuple[HeadScore, ...]:
    scores = []
    for loss, trials, counted, *top in tally.tolist():
        shares = tuple(count / counted for count in top) if counted else ()
        scores.append(HeadScore(loss / trials if trials else None, shares, int(trials)))
    return tuple(scores)
