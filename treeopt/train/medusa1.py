"""Medusa-1: draft heads for a frozen base model (arXiv:2401.10774, section 2.2.1), trained by transformers' Trainer.

The Trainer brings schedule, accumulation, mixed precision, several devices, checkpoints and resuming. What it sees as
the model is the heads alone; the base hangs beside them, is never saved, and never changes.
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

from treeopt.errors import Code, TreeoptError, check_counts
from treeopt.files.atomic import check_space, check_writable
from treeopt.files.outputs import check_no_input
from treeopt.models.base import Base
from treeopt.models.given import GivenModel, as_base, name_of
from treeopt.models.heads import MedusaHeads
from treeopt.models.layouts import CONFIG_FILE, WEIGHT_FILES, check_heads_writable, save_heads
from treeopt.progress import Progress, silent
from treeopt.train.checkpoints import FOLDER as CHECKPOINTS
from treeopt.train.checkpoints import begin, check_same, check_unfinished, drop_half_written, last_checkpoint, step_of
from treeopt.train.data import Example, collate
from treeopt.train.disk import is_full
from treeopt.train.given_texts import GivenTexts, as_training_texts, names_of
from treeopt.train.settings import Settings, steps_of, trainer_arguments
from treeopt.train.trainer import HeadScore, HeadsOnBase, HeadsTrainer, trainer_of

METRICS_FILE = "metrics.jsonl"
DEFAULT_LENGTH = 2048  # most tokens of a text
_LOGS = 1 << 20  # bytes of metrics, states and notes


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
        TreeoptError: E202 where the folder holds heads or an unfinished run, E204 where it holds a base model or the
            texts' own file in the way, E205 where there is nothing to resume, or it was begun with other settings or is
            damaged, E212 as `new_heads`, E303 where nothing is left to train on, E403 where the disk is too small, E504
            where the loss is not a number; as `load_base` and `load_texts`.
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
    check_counts(length=length)
    place = Path(folder)
    inputs = (*names_of(texts), *name_of(model))
    check_outputs(place, inputs, resume=resume, overwrite=overwrite)
    base = as_base(model, tokenizer)
    texts = as_training_texts(base, texts, length=length)
    seen, unseen = _split(texts.examples, chosen)
    arguments = trainer_arguments(place / CHECKPOINTS, chosen, len(seen), base.device)  # joins the other processes
    if arguments.process_index == 0:
        check_space(place, _disk_needed(base, chosen, arguments, len(seen)), "training these heads")
    heads = new_heads(base, chosen.num_heads, blocks=chosen.blocks, shared_lm_head=chosen.shared_lm_head)
    tokens = sum(len(example.ids) for example in texts.examples)  # tells a change of --length or template, too
    begun = {"settings": asdict(chosen), "base": base.fingerprint, "data": list(texts.sha256), "tokens": tokens}
    steps = steps_of(chosen, len(seen))
    try:
        if arguments.process_index == 0:
            (check_same if resume else begin)(place / CHECKPOINTS, begun)
        wait_for_everyone()
        begun_at = last_checkpoint(place / CHECKPOINTS, min(int(arguments.save_steps), steps))
        set_seed(chosen.short_seed)
        trainer = trainer_of(base, heads, arguments, seen, unseen, place / METRICS_FILE, progress)
        scores = _trained(trainer, begun_at, steps, unseen, (unseen or seen)[: chosen.batch_size])
        if arguments.process_index == 0:
            made_by = {"method": "Medusa-1", **begun, "texts": list(texts.names), "versions": base.versions()}
            _save(heads, place, base, made_by, overwrite=overwrite or resume)
            shutil.rmtree(place / CHECKPOINTS)
    except Exception as error:
        if not is_full(error):
            raise
        raise _disk_full(place) from error
    return Trained(heads.eval(), scores, trainer.state.global_step)


def check_outputs(folder: Path, inputs: Sequence[str], *, resume: bool, overwrite: bool) -> None:
    """Check that a run can begin, or go on, in a folder; called before any long work.

    Args:
        folder: for the heads.
        inputs: files of texts and the folder of the base model, where they are such.
        resume: go on with an unfinished run.
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
            what = f"{name} lies among the checkpoints, which are removed when the heads are done"
            raise TreeoptError(Code.FILE_UNWRITABLE, what, fix="move it elsewhere, or name another folder with -o")


def _trained(
    trainer: HeadsTrainer, begun_at: Path | None, steps: int, unseen: Sequence[Example], judged: Sequence[Example]
) -> tuple[HeadScore, ...]:
    """The scores on the texts held out, after training."""
    if begun_at is not None and step_of(begun_at) >= steps:  # of this the Trainer would take a step beyond the last
        trainer.model.load_state_dict(safetensors.torch.load_file(begun_at / SAFE_WEIGHTS_NAME))
        trainer.state = TrainerState.load_from_json(str(begun_at / TRAINER_STATE_NAME))
    else:
        trainer.train(resume_from_checkpoint=None if begun_at is None else str(begun_at))
    _check_trained(trainer.accelerator.unwrap_model(trainer.model), judged)
    if not unseen:
        return ()
    trainer.evaluate()
    return trainer.scores


def _save(heads: MedusaHeads, place: Path, base: Base, made_by: dict[str, Any], *, overwrite: bool) -> None:
    """Write the heads in the base's dtype; where that fails, nothing new is left."""
    new = [path for path in (place / WEIGHT_FILES[0], place / CONFIG_FILE) if not path.exists()]
    try:
        save_heads(copy.deepcopy(heads).to(base.dtype), place, base=base.name, made_by=made_by, overwrite=overwrite)
    except BaseException:
        for path in new:
            path.unlink(missing_ok=True)
        raise


def _disk_full(place: Path) -> TreeoptError:
    """E403, after what was half-written is removed."""
    drop_half_written(place / CHECKPOINTS)
    fix = "make room; the same command with --resume goes on from the last checkpoint"
    return TreeoptError(Code.OUT_OF_MEMORY, "the disk is full", at=str(place), fix=fix)


def _disk_needed(base: Base, settings: Settings, arguments: TrainingArguments, texts: int) -> int:
    """Most bytes that a run has on disk at once, beyond those of checkpoints that are there."""
    d, vocab = base.hidden_size, 0 if settings.shared_lm_head else base.vocab_size
    weights = settings.num_heads * (settings.blocks * (d * d + d) + vocab * d)
    saved = weights * int(base.dtype.itemsize)
    checkpoint = 3 * 4 * weights  # weights and AdamW's two moments, in float32
    written = math.ceil(steps_of(settings, texts) / int(arguments.save_steps))
    # Two checkpoints are kept; a third is written before the oldest goes.
    most = max(min(3, written) * checkpoint, min(2, written) * checkpoint + saved)
    folder = Path(arguments.output_dir)
    held = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return most + _LOGS - held


@torch.no_grad()
def _check_trained(model: HeadsOnBase, examples: Sequence[Example]) -> None:
    """Raise E504 where the last steps have spoiled the heads: logged losses are those before a step."""
    batch = {name: ids.to(model.heads.bias.device) for name, ids in collate(examples).items()}
    loss = model(**batch)["loss"]
    model.take_tally()
    if not torch.isfinite(loss):
        what = "the heads' loss is not a number after the last step"
        raise TreeoptError(Code.NOT_FINITE, what, fix="lower --learning-rate, and begin anew with --force")


def _split(examples: Sequence[Example], settings: Settings) -> tuple[list[Example], list[Example]]:
    """Examples to train on, and those held out, drawn at random."""
    if settings.holdout >= len(examples):
        what = f"{settings.holdout} of {len(examples)} texts are to be held out: none is left to train on"
        raise TreeoptError(Code.PROMPTS_EMPTY, what, fix="lower --holdout")
    order = random.Random(settings.seed).sample(range(len(examples)), len(examples))
    unseen = set(order[: settings.holdout])
    return [e for i, e in enumerate(examples) if i not in unseen], [examples[i] for i in sorted(unseen)]
