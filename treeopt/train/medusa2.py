"""Medusa-2: heads trained together with a LoRA adapter of the base (arXiv:2401.10774, section 2.2.2)."""

from __future__ import annotations

import copy
import functools
import os
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from treeopt.errors import Code, TreeoptError
from treeopt.files.outputs import check_no_input
from treeopt.models.adapters import ADAPTER_FOLDER, check_adapter_writable, require_peft
from treeopt.models.fingerprint import fingerprint
from treeopt.models.fit import check_heads_fit
from treeopt.models.given import GivenHeads, GivenModel, as_base, as_heads, name_of
from treeopt.models.heads import MedusaHeads
from treeopt.models.layouts import JOINT_METHOD, WEIGHT_FILES, LoadedHeads
from treeopt.models.placement import check_one_device
from treeopt.progress import Progress, silent
from treeopt.train import run
from treeopt.train.given_texts import GivenTexts, as_training_texts, names_of
from treeopt.train.joint import BaseScore, HeadsWeight, JointModel, JointTrainer, heads_weight
from treeopt.train.joint_settings import JointSettings
from treeopt.train.lora import Adapted, adapted, adapter_size
from treeopt.train.medusa1 import Trained, new_heads, save_trained, weights_of
from treeopt.train.trainer import trainer_of


@dataclass(frozen=True)
class JointlyTrained(Trained):
    """The result of `train_jointly`.

    Args:
        adapter: its folder, for `load_base(..., adapter=)`.
        base_score: of the base on the texts held out; None where there are none.
    """

    adapter: Path
    base_score: BaseScore | None


def train_jointly(
    model: GivenModel,
    texts: GivenTexts,
    folder: str | os.PathLike[str],
    settings: JointSettings | None = None,
    *,
    heads: GivenHeads | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    resume: bool = False,
    overwrite: bool = False,
    progress: Progress = silent,
) -> JointlyTrained:
    """Train heads and a LoRA adapter of their base, and write both to a folder (Medusa-2).

    The loss is L_LM + lambda_0 * L_heads. The adapter is on all linear layers, the LM head among them, but not on
    experts whose matrices are one parameter. It is written to the folder `adapter` in the folder of the heads.

    Args:
        model: the base model, as of `train_heads`; it does not change.
        texts: training texts, as of `train_heads`.
        folder: for heads, adapter and metrics, and for checkpoints during the run.
        settings: the defaults where None.
        heads: trained heads to start from, as those of stage 1; they do not change. None starts with new ones.
        tokenizer: of the model; None takes the one beside the model's weights.
        resume: continue from the last checkpoint in the folder; the result is that of an uninterrupted run.
        overwrite: replace heads and adapter, and delete checkpoints, in the folder.
        progress: called after each step.

    Raises:
        TreeoptError: as `train_heads`; E212 where the heads do not fit the base or have a token map, E304 where the
            base changes the logits of its LM head or peft cannot adapt its linear layers, E401 where peft is not
            installed.
        TypeError: where model, texts, settings, heads or tokenizer are of another type.

    Examples:
        >>> import treeopt
        >>> texts = ["import os\\nprint(os.getcwd())", "def main():\\n    return 0"]
        >>> settings = treeopt.JointSettings(steps=1, self_distill=True)
        >>> trained = treeopt.train_jointly("pocket", texts, "joint-heads", settings, heads="pocket")
        >>> treeopt.load_base("pocket", adapter="joint-heads/adapter").adapter.name
        'joint-heads/adapter'
    """
    settings = JointSettings() if settings is None else settings
    if not isinstance(settings, JointSettings):
        raise TypeError(f"settings are treeopt.JointSettings, not an object of type {type(settings).__name__}")
    require_peft()
    place = Path(folder)
    first = None if heads is None else as_heads(heads)
    _check_all_tokens(first)
    inputs = (*names_of(texts), *name_of(model), *([] if first is None else [first.name]))
    check_outputs(place, inputs, resume=resume, overwrite=overwrite)
    base = as_base(model, tokenizer)
    check_one_device(base.model, "training with an adapter", fix="a device that holds it, or heads alone (stage 1)")
    if first is not None:
        check_heads_fit(base, first.heads, first.name)
    chosen = settings.chosen(None if first is None else first.heads)
    adapted(base, chosen.lora)  # its errors come before anything is written
    job = run.job_of(
        base,
        as_training_texts(base, texts, length=chosen.length),
        place,
        chosen,
        trained=weights_of(base, chosen) + adapter_size(base, chosen.rank),
        more={"heads": None if first is None else first.fingerprint},
    )
    if first is None:
        begun = new_heads(base, chosen.num_heads, blocks=chosen.blocks, shared_lm_head=chosen.shared_lm_head)
    else:
        begun = copy.deepcopy(first.heads).to(base.device).float().train()
    trainer = run.run_job(
        job,
        functools.partial(_trainer, job, chosen, begun, progress),
        functools.partial(_save, job, overwrite=overwrite or resume),
        resume=resume,
        overwrite=overwrite,
    )
    found = begun.eval(), trainer.scores, trainer.state.global_step
    return JointlyTrained(*found, place / ADAPTER_FOLDER, trainer.base_score)


def _check_all_tokens(heads: LoadedHeads | None) -> None:
    """Raise E212 for heads that draft only the tokens of a map: losses and files are of LM heads with all tokens."""
    if heads is None or heads.heads.token_map is None:
        return
    mapped, vocab_size = len(heads.heads.token_map), heads.heads.vocab_size
    what = f"the heads {heads.name} draft only the {mapped} of {vocab_size} tokens in their token_map"
    why = "heads are trained on all tokens, and the layout of trained heads has no token_map"
    raise TreeoptError(Code.HEADS_MISMATCH, what, why=why, fix="train heads of stage 1, or start with new ones")


def check_outputs(folder: Path, inputs: tuple[str, ...], *, resume: bool, overwrite: bool) -> None:
    """Check, before any work, that a run of stage 2 can begin or continue in a folder.

    Raises:
        TreeoptError: as `run.check_outputs` and `check_adapter_writable`.
    """
    run.check_outputs(folder, inputs, resume=resume, overwrite=overwrite)
    for name in inputs:
        check_no_input(folder / WEIGHT_FILES[0], name)
    check_adapter_writable(folder / ADAPTER_FOLDER, overwrite=overwrite or resume)


def _trainer(job: run.Job, settings: JointSettings, heads: MedusaHeads, progress: Progress) -> JointTrainer:
    """The Trainer of a run, with a new adapter."""
    joined = adapted(job.data.base, settings.lora)
    model = JointModel(joined, heads, self_distill=settings.self_distill)
    trainer = trainer_of(model, job.data, job.arguments, job.metrics, progress, kind=JointTrainer)
    assert settings.heads_weight is not None
    assert settings.heads_schedule is not None
    trainer.heads_rate = settings.heads_rate
    trainer.weight_at = functools.partial(heads_weight, settings.heads_weight, settings.heads_schedule)
    trainer.add_callback(HeadsWeight(model, trainer.weight_at))
    trainer.adapted = joined
    return trainer


def _save(job: run.Job, trainer: JointTrainer, *, overwrite: bool) -> None:
    """Write the adapter and the heads: all files, or none."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    heads = model.heads
    joined: Adapted = trainer.adapted
    heads_id = fingerprint(copy.deepcopy(heads).to(job.data.base.dtype))
    adapter = joined.files(job.folder / ADAPTER_FOLDER, heads_id)
    save_trained(heads, job, {"method": JOINT_METHOD}, also=adapter, overwrite=overwrite)
