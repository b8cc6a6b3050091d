"""Medusa-1: draft heads for a frozen base model (arXiv:2401.10774, section 2.2.1), trained by transformers' Trainer.

The Trainer brings schedule, accumulation, mixed precision, several devices, checkpoints and resuming. What it sees as
the model is the heads alone; the base hangs beside them, is never saved, and never changes.
"""

from __future__ import annotations

import copy
import json
import math
import os
import random
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import wait_for_everyone
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import (
    PreTrainedTokenizerBase,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
)

from treeopt.errors import Code, TreeoptError
from treeopt.files.atomic import make_folder, write_text
from treeopt.models.base import Base
from treeopt.models.given import GivenModel, as_base
from treeopt.models.heads import MedusaHeads
from treeopt.models.layouts import check_heads_writable, save_heads
from treeopt.progress import Progress, silent
from treeopt.train.data import Example, collate
from treeopt.train.given_texts import GivenTexts, as_training_texts
from treeopt.train.loss import IGNORED, TOPS, head_losses, hits, targets, weighted
from treeopt.train.resume import begun_otherwise

METRICS_FILE = "metrics.jsonl"
DEFAULT_LENGTH = 2048  # most tokens of a text
_CHECKPOINTS = "checkpoints"


@dataclass(frozen=True)
class Settings:
    """What a training run is made of; the defaults are the paper's where it gives them.

    Args:
        num_heads: H.
        blocks: residual blocks of each head.
        shared_lm_head: use the base's LM head: a tenth of the memory, and far cheaper steps.
        epochs: passes over the texts.
        steps: optimizer steps in place of epochs, where not 0.
        batch_size: texts of one forward.
        accumulate: forwards of one optimizer step.
        learning_rate: peak of the cosine schedule.
        warmup: share of the steps in which the rate rises.
        weight_decay: of AdamW.
        holdout: texts kept out of training, to judge the heads on.
        log_every: steps between two lines of metrics; at most all of them.
        saves: checkpoints over the run; the last one is kept.
        bf16: mixed precision in the heads; their weights stay float32.
        seed: of the order of texts and of those held out.
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

    def __post_init__(self) -> None:
        if not self.blocks and self.shared_lm_head:
            raise ValueError("heads without blocks that share the base's LM head have nothing to train")


@dataclass(frozen=True)
class HeadScore:
    """One head on texts: mean cross-entropy in nats, share of its first 1 .. 5 guesses that held the true token."""

    loss: float
    top: tuple[float, ...]
    trials: int


@dataclass(frozen=True)
class Trained:
    """Trained heads (float32), and how each did on the texts held out; no scores where none were."""

    heads: MedusaHeads
    held_out: tuple[HeadScore, ...]
    steps: int


def new_heads(base: Base, num_heads: int, *, blocks: int = 1, shared_lm_head: bool = False) -> MedusaHeads:
    """Heads that repeat the base exactly: zero blocks, and its LM head, shared or copied (section 2.2.1).

    Raises:
        TreeoptError: E212 where a copy is asked for of an LM head with a bias, which the layout cannot hold.
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
    length: int = DEFAULT_LENGTH,
    resume: bool = False,
    overwrite: bool = False,
    progress: Progress = silent,
) -> Trained:
    """Train heads on texts and write them to a folder, with `metrics.jsonl`: loss and accuracies as training goes.

    Args:
        model: the base model: a causal language model of transformers, a folder or hub name, or a `Base`; its weights
            stay as they are.
        texts: what to learn from, best the base's own answers as `distill` writes them: a file name or hub data set, a
            list of texts, rows or conversations, or `TrainingTexts`.
        folder: where heads, metrics and, while it runs, checkpoints go.
        settings: the defaults where None.
        tokenizer: the model's, where it does not lie beside its weights.
        length: most tokens of a text; not of `TrainingTexts`, which are cut already.
        resume: go on from the last checkpoint in the folder; the result is that of an unbroken run.
        overwrite: replace heads, and drop checkpoints, that are in the folder.
        progress: told after each step.

    Raises:
        TreeoptError: E202 where the folder holds heads or an unfinished run, E205 where there is nothing to resume or
            it was begun with other settings, E212 as `new_heads`, E303 where nothing is left to train on, E504 where
            the loss is not a number; as `load_base` and `load_texts`.
        TypeError: where model, texts or settings are none of these.

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
    check_heads_writable(place, overwrite=overwrite or resume)
    base = as_base(model, tokenizer)
    texts = as_training_texts(base, texts, length=length)
    seen, unseen = _split(texts.examples, chosen)
    arguments = _arguments(place / _CHECKPOINTS, chosen, len(seen), base.device)  # joins the other processes
    tokens = sum(len(example.ids) for example in texts.examples)  # tells a change of --length or template, too
    begun = {"settings": asdict(chosen), "base": base.fingerprint, "data": list(texts.sha256), "tokens": tokens}
    if arguments.process_index == 0:
        _begin(place / _CHECKPOINTS, begun, resume=resume, overwrite=overwrite)
    wait_for_everyone()
    set_seed(chosen.seed)
    heads = new_heads(base, chosen.num_heads, blocks=chosen.blocks, shared_lm_head=chosen.shared_lm_head)
    both = _HeadsOnBase(base, heads)
    trainer = _HeadsTrainer(
        model=both,
        args=arguments,
        train_dataset=_Rows(seen),
        eval_dataset=_Rows(unseen),
        data_collator=collate,
        callbacks=[_Watch(both, int(arguments.logging_steps), progress)],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.metrics_file = place / METRICS_FILE
    trainer.train(resume_from_checkpoint=_last_checkpoint(place / _CHECKPOINTS))
    _check_trained(both, (unseen or seen)[: chosen.batch_size])
    scores: tuple[HeadScore, ...] = ()
    if unseen:
        trainer.evaluate()
        scores = trainer.scores
    if trainer.is_world_process_zero():
        made_by = {"method": "Medusa-1", **begun, "texts": list(texts.names), "versions": base.versions()}
        saved = copy.deepcopy(heads).to(base.dtype)
        save_heads(saved, place, base=base.name, made_by=made_by, overwrite=overwrite or resume)
        shutil.rmtree(place / _CHECKPOINTS)
    return Trained(heads.eval(), scores, trainer.state.global_step)


class _Rows(Dataset[Example]):
    """Examples as torch wants them."""

    def __init__(self, examples: Sequence[Example]) -> None:
        self._examples = examples

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, index: int) -> Example:
        return self._examples[index]


class _HeadsOnBase(nn.Module):
    """What the Trainer trains: the heads. The base is held in a tuple, out of sight of parameters and checkpoints."""

    def __init__(self, base: Base, heads: MedusaHeads) -> None:
        super().__init__()
        self.heads = heads
        self.counts_hits = False
        self._base = (base,)
        self._tally = _no_tally(heads.num_heads, base.device)

    def forward(self, ids: Tensor, answers: Tensor) -> dict[str, Tensor]:
        """The loss of a batch, as `data.collate` makes it."""
        (base,) = self._base
        with torch.no_grad():
            _, hidden = base.forward(ids, use_cache=False, logits_to_keep=1)
        true = targets(ids, answers, self.heads.num_heads)
        rows = (true != IGNORED).any(-1)
        hidden, true = hidden[rows].to(self.heads.bias.dtype), true[rows]
        losses = head_losses(self.heads, hidden, true, base.lm_head)
        self._count(losses.detach(), hidden, true, base.lm_head)
        return {"loss": weighted(losses)}

    def take_tally(self) -> Tensor:
        """float64 [H, 3 + 5]: summed loss, its trials, trials of the hits, hits among 1 .. 5; begins anew."""
        tally, self._tally = self._tally, _no_tally(self.heads.num_heads, self._tally.device)
        return tally

    def _count(self, losses: Tensor, hidden: Tensor, true: Tensor, lm_head: nn.Linear) -> None:
        trials = (true != IGNORED).sum(0)
        self._tally[:, 0] += losses * trials
        self._tally[:, 1] += trials
        if self.counts_hits:
            self._tally[:, 2] += trials
            self._tally[:, 3:] += hits(self.heads, hidden, true, lm_head)


class _HeadsTrainer(Trainer):
    """A Trainer that logs each head's loss and accuracies, and keeps all it logged in one file."""

    metrics_file: Path
    scores: tuple[HeadScore, ...] = ()

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        tally = self.accelerator.reduce(self.accelerator.unwrap_model(self.model).take_tally(), "sum")
        if tally[:, 1].any():
            self.scores = _scores(tally)
            if not all(math.isfinite(score.loss) for score in self.scores):
                what = f"the loss is not a number at step {self.state.global_step}"
                raise TreeoptError(Code.NOT_FINITE, what, fix="lower --learning-rate, or look at the base model")
            prefix = "eval_" if "eval_loss" in logs else ""
            for h, score in enumerate(self.scores, start=1):
                logs[f"{prefix}head{h}_loss"] = score.loss
                logs |= {f"{prefix}head{h}_top{i}": share for i, share in enumerate(score.top, start=1)}
        super().log(logs, start_time)
        if self.is_world_process_zero():
            lines = [_without_clock(line) for line in self.state.log_history if "train_runtime" not in line]
            write_text(self.metrics_file, "".join(json.dumps(line) + "\n" for line in lines))

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        self.accelerator.unwrap_model(self.model).counts_hits = True
        found: dict[str, float] = super().evaluate(*args, **kwargs)
        return found


@torch.no_grad()
def _check_trained(model: _HeadsOnBase, examples: Sequence[Example]) -> None:
    """Raise E504 where the last steps have spoiled the heads: logged losses are those before a step."""
    batch = {name: ids.to(model.heads.bias.device) for name, ids in collate(examples).items()}
    loss = model(**batch)["loss"]
    model.take_tally()
    if not torch.isfinite(loss):
        what = "the heads' loss is not a number after the last step"
        raise TreeoptError(Code.NOT_FINITE, what, fix="lower --learning-rate, and begin anew with --force")


def _without_clock(line: Mapping[str, float]) -> dict[str, float]:
    """A line of metrics that equal runs have in common."""
    return {key: value for key, value in line.items() if not key.endswith(("_runtime", "_per_second"))}


class _Watch(TrainerCallback):
    """Counts accuracies in the steps that are logged, and tells how far the run is."""

    def __init__(self, model: _HeadsOnBase, log_every: int, progress: Progress) -> None:
        self._model, self._log_every, self._progress = model, log_every, progress
        self._note = ""

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._model.counts_hits = (state.global_step + 1) % self._log_every == 0

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


def _arguments(folder: Path, settings: Settings, texts: int, device: torch.device) -> TrainingArguments:
    a_pass = math.ceil(texts / (settings.batch_size * settings.accumulate))
    steps = settings.steps or math.ceil(a_pass * settings.epochs)
    # A checkpoint falls on a logged step, so that a resumed run logs what an unbroken one does.
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
        save_total_limit=2,  # a run killed while it saves still has the one before
        bf16=settings.bf16,
        use_cpu=device.type == "cpu",
        seed=settings.seed,
        label_names=["answers"],
        remove_unused_columns=False,
        report_to=[],
        disable_tqdm=True,
    )
    if device.type == "cuda" and arguments.device.index not in (None, device.index):
        what = f"the base is on {device}, but the Trainer takes {arguments.device}"
        fix = f"CUDA_VISIBLE_DEVICES={device.index}, and leave out --device"
        raise TreeoptError(Code.DEVICE_UNUSABLE, what, fix=fix)
    arguments._n_gpu = min(arguments.n_gpu, 1)  # one device a process: torchrun starts a process for each
    return arguments


def _split(examples: Sequence[Example], settings: Settings) -> tuple[list[Example], list[Example]]:
    """Examples to train on, and those held out, drawn at random."""
    if settings.holdout >= len(examples):
        what = f"{settings.holdout} of {len(examples)} texts are to be held out: none is left to train on"
        raise TreeoptError(Code.PROMPTS_EMPTY, what, fix="lower --holdout")
    order = random.Random(settings.seed).sample(range(len(examples)), len(examples))
    unseen = set(order[: settings.holdout])
    return [e for i, e in enumerate(examples) if i not in unseen], [examples[i] for i in sorted(unseen)]


def _begin(folder: Path, begun: Mapping[str, Any], *, resume: bool, overwrite: bool) -> None:
    """Write down what a run is made of, or check that a resumed one is made of the same."""
    note = folder / "begun.json"
    if resume:
        if not note.is_file():
            raise TreeoptError(
                Code.RESUME_INVALID, f"{folder.parent} holds no unfinished run", fix="leave out --resume"
            )
        found = json.loads(note.read_text())
        wanted = json.loads(json.dumps(begun))
        if found != wanted:
            raise begun_otherwise(folder.parent, found, wanted)
        return
    if folder.exists():
        if not overwrite:
            what = f"{folder.parent} holds an unfinished run"
            raise TreeoptError(Code.FILE_EXISTS, what, fix="go on with --resume, or begin anew with --force")
        shutil.rmtree(folder)
    make_folder(folder)
    write_text(note, json.dumps(begun))


def _last_checkpoint(folder: Path) -> str | None:
    """The latest whole checkpoint; None where there is none yet. A checkpoint's state file is written last."""
    found = [path.parent for path in folder.glob("checkpoint-*/trainer_state.json") if _is_json(path)]
    return str(max(found, key=lambda path: int(path.name.split("-")[1]))) if found else None


def _is_json(path: Path) -> bool:
    try:
        json.loads(path.read_text())
    except ValueError:
        return False
    return True


def _no_tally(num_heads: int, device: torch.device) -> Tensor:
    counts = torch.float32 if device.type == "mps" else torch.float64  # the one kind of device without float64
    return torch.zeros(num_heads, 3 + TOPS, dtype=counts, device=device)


def _scores(tally: Tensor) -> tuple[HeadScore, ...]:
    scores = []
    for loss, trials, counted, *top in tally.tolist():
        shares = tuple(count / counted for count in top) if counted else ()
        scores.append(HeadScore(loss / trials if trials else 0.0, shares, int(trials)))
    return tuple(scores)
