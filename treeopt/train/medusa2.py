"""Medusa-2: heads trained together with a LoRA adapter of their base (arXiv:2401.10774, section 2.2.2, appendix B).

The model with the adapter is a copy that shares the tensors of the given one, which does not change: it is the base
without the adapter at any time.
"""

import copy
import dataclasses
import functools
import math
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed
from transformers.pytorch_utils import Conv1D

from treeopt.errors import Code, TreeoptError, first_line
from treeopt.models import adapters
from treeopt.models.base import Base
from treeopt.models.compatibility import check_heads_fit
from treeopt.models.devices import check_one_device
from treeopt.models.given import GivenHeads, GivenModel, as_base, as_heads, name_of
from treeopt.models.head_files import JOINT_METHOD, LoadedHeads
from treeopt.models.heads import MedusaHeads
from treeopt.models.tensors import fingerprint
from treeopt.progress import Progress, silent
from treeopt.train import run
from treeopt.train.data import GivenTexts, as_training_texts, names_of
from treeopt.train.loss import IGNORED, joint_head_losses, kl_loss, lm_loss, next_tokens, targets, weighted
from treeopt.train.medusa1 import Trained, new_heads, save_trained, weights_of
from treeopt.train.settings import SINE, JointSettings
from treeopt.train.trainer import HeadsOnBase, HeadsTrainer, prefix_of

_NAME = "default"  # peft's name of an adapter
_SHOWN = 3  # layers in a message


@dataclass(frozen=True)
class Adapted:
    """A base with an adapter in its layers, the base without, which shares the tensors, and peft's model."""

    base: Base
    original: Base
    joined: Any

    @property
    def weights(self) -> list[nn.Parameter]:
        """In the order of the layers."""
        return [parameter for parameter in self.joined.parameters() if parameter.requires_grad]

    @property
    def dropouts(self) -> list[nn.Module]:
        """The adapter's dropout layers. Those of the base are never active."""
        return [module for name, module in self.joined.named_modules() if name.endswith(f"lora_dropout.{_NAME}")]

    @torch.no_grad()
    def plain_lm_head(self) -> nn.Linear:
        """The LM head with the adapter's update in its weights."""
        layer: Any = self.base.lm_head  # peft's layer
        weight = layer.weight + layer.get_delta_weight(_NAME).to(layer.weight.dtype)
        plain = nn.Linear(weight.shape[1], weight.shape[0], bias=layer.bias is not None, device="meta")
        plain.weight = nn.Parameter(weight, requires_grad=False)
        if layer.bias is not None:
            plain.bias = layer.bias
        return plain

    def files(self, folder: Path, heads_id: str) -> dict[Path, bytes]:
        """The adapter in peft's format, for the heads with this fingerprint: its files' contents."""
        from peft import get_peft_model_state_dict

        config = self.joined.peft_config[_NAME].to_dict()
        config |= {"inference_mode": True, "base_model_name_or_path": self.original.name}
        config = {name: sorted(value) if isinstance(value, set) else value for name, value in config.items()}
        weights = get_peft_model_state_dict(self.joined, save_embedding_layers=False)
        return adapters.adapter_files(folder, config, weights, base=self.original.model, heads_id=heads_id)


def adapted(base: Base, settings: JointSettings) -> Adapted:
    """A base with a new adapter, whose updates are zero; the first factor of each is drawn from torch's generator."""
    adapters.require_peft()
    if not base.logits_of_lm_head:
        what = f"{base.name} changes the logits of its LM head, by a scale, a soft cap or a layer before it"
        why = "stage 2 computes its losses from hidden states and LM head"
        raise TreeoptError(Code.MODEL_INVALID, what, why=why, fix="--stage 1, which does not train the base")
    from peft import LoraConfig, get_peft_model

    model = _sharing_copy(base.model)
    adapters.untie(model)
    # Of every linear layer, the LM head among them; GPT-2 has layers of the class `Conv1D`.
    names = {name for name, layer in model.named_modules() if isinstance(layer, (nn.Linear, Conv1D))}
    config = LoraConfig(
        r=settings.rank, lora_alpha=settings.alpha, lora_dropout=settings.dropout, target_modules=sorted(names)
    )
    try:
        with warnings.catch_warnings(action="ignore"):  # peft calls deprecated names of transformers
            joined = get_peft_model(model, config).eval()
    except ValueError as error:
        taken = tuple(f".{name}" for name in config.target_modules)  # of many names peft keeps common endings
        lacking = {name for name in names if not f".{name}".endswith(taken)}
        raise _not_adaptable(base, lacking, first_line(error)) from error
    found = {name for name, layer in model.named_modules() if hasattr(layer, "lora_A")}
    others = sorted(found - names) + adapters.odd_settings(config.to_dict())
    if found != names or others:
        raise _not_adaptable(base, names - found, f"it would also adapt or set {', '.join(others)}")
    return Adapted(dataclasses.replace(base, model=model), base, joined)


def expert_share(base: Base) -> float:
    """The share of a base's weights in experts, which get no adapter."""
    kernels = {id(layer.weight) for layer in base.model.modules() if isinstance(layer, nn.Conv1d)}
    sizes = [
        (weight.ndim == 3 and id(weight) not in kernels, int(weight.numel())) for weight in base.model.parameters()
    ]
    return sum(size for stacked, size in sizes if stacked) / sum(size for _, size in sizes)


def _not_adaptable(base: Base, lacking: set[str], reason: str) -> TreeoptError:
    """E304 for a base of which peft adapts other parameters than the linear layers, such as experts."""
    what = f"peft cannot put an adapter on every linear layer of {base.name}"
    why = f"it would leave out {', '.join(sorted(lacking)[:_SHOWN])}" if lacking else reason
    return TreeoptError(Code.MODEL_INVALID, what, why=why, fix="--stage 1, which does not train the base")


def _sharing_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of the modules, with frozen parameters that share the memory of the model's."""
    known: dict[int, Tensor] = {id(buffer): buffer for buffer in model.buffers()}
    for parameter in model.parameters():
        # Quantised parameters are of other classes, have more attributes, and are frozen.
        plain = type(parameter) is nn.Parameter
        known[id(parameter)] = nn.Parameter(parameter.detach(), requires_grad=False) if plain else parameter
    return copy.deepcopy(model, known)


def heads_weight(settings: JointSettings, step: int, steps: int) -> float:
    """lambda_0, the weight of the heads' loss, at a step from 0: constant, or rising by a quarter of a sine."""
    peak = settings.heads_weight
    assert peak is not None, "settings are those that were chosen"
    return peak * math.sin(math.pi / 2 * step / steps) if settings.heads_schedule == SINE else peak


@dataclass(frozen=True)
class BaseScore:
    """The base's next-token scores on texts, in nats."""

    loss: float  # mean cross-entropy with the adapter
    original_loss: float  # without the adapter
    divergence: float  # mean KL(p_original || p)
    trials: int  # number of tokens


class JointModel(HeadsOnBase):
    """Heads and adapter as the Trainer's model; the base is neither trained nor saved."""

    def __init__(self, adapted: Adapted, heads: MedusaHeads, settings: JointSettings) -> None:
        super().__init__(adapted.base, heads)
        self.adapter = nn.ParameterList(adapted.weights)
        self.dropouts = nn.ModuleList(adapted.dropouts)  # follow `train` and `eval` of this module
        self.heads_weight = self.heads_learning_rate = 0.0  # lambda_0 and rate, changed before each step
        self._adapted = (adapted,)
        self.settings = settings

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

    def _lm_loss(self, adapted: Adapted, ids: Tensor, rows: Tensor, hidden: Tensor, following: Tensor) -> Tensor:
        """L_LM, which is counted; in evaluation all of cross-entropy, divergence and original loss are counted."""
        lm_head, original = adapted.base.lm_head, adapted.original
        loss = divergence = original_loss = torch.zeros((), device=hidden.device)
        if self.settings.self_distill or not self.training:
            with torch.no_grad():
                _, states = original.forward(ids, use_cache=False, logits_to_keep=1)
            divergence = kl_loss(lm_head, original.lm_head, hidden, states[rows])
        if not self.training:
            original_loss = lm_loss(original.lm_head, states[rows], following).detach()
        if not (self.settings.self_distill and self.training):
            loss = lm_loss(lm_head, hidden, following)
        counted = torch.stack([loss.detach(), divergence.detach(), original_loss, torch.ones_like(original_loss)])
        self.tally[-1, :4] += counted * len(following)
        return divergence if self.settings.self_distill else loss


class JointTrainer(HeadsTrainer):
    """A Trainer of heads and adapter, with a learning rate for each."""

    base_score: BaseScore | None = None

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """AdamW with groups for the adapter (first: its rate is the one that the Trainer logs) and the heads."""
        if getattr(self, "optimizer", None) is None:
            trained = self.accelerator.unwrap_model(self.model)
            kind, options = self.get_optimizer_cls_and_kwargs(self.args, trained)
            heads = dict(trained.heads.named_parameters())
            biases, rate, decay = [heads.pop("bias")], self.args.learning_rate, self.args.weight_decay
            heads_rate = trained.settings.heads_rate * rate
            groups: list[dict[str, Any]] = [
                {"params": list(trained.adapter), "lr": rate, "weight_decay": decay},
                {"params": list(heads.values()), "lr": heads_rate, "weight_decay": decay},
                {"params": biases, "lr": heads_rate, "weight_decay": 0.0},
            ]
            self.optimizer: torch.optim.Optimizer = kind(groups, **options)
        return self.optimizer

    def training_step(self, *given: Any, **options: Any) -> Tensor:
        model = self.accelerator.unwrap_model(self.model)
        model.heads_weight = heads_weight(model.settings, self.state.global_step, self.state.max_steps)
        model.heads_learning_rate = float(self.optimizer.param_groups[-1]["lr"])
        return super().training_step(*given, **options)

    def add_base(self, logs: dict[str, float], *sums: float) -> None:
        model = self.accelerator.unwrap_model(self.model)
        *totals, trials = sums
        loss, divergence, original_loss = (total / trials for total in totals)
        if not math.isfinite(loss + divergence):
            what = f"the base's loss is not finite at step {self.state.global_step}"
            raise TreeoptError(Code.NOT_FINITE, what, fix="lower --learning-rate, or check the base model")
        prefix = prefix_of(logs)
        if prefix:
            self.base_score = BaseScore(loss, original_loss, divergence, int(trials))
            found = {"lm_loss": loss, "original_lm_loss": original_loss, "kl": divergence}
            logs |= {prefix + name: value for name, value in found.items()}
        else:
            logs |= {"kl": divergence} if model.settings.self_distill else {"lm_loss": loss}
            logs |= {"heads_weight": model.heads_weight, "heads_learning_rate": model.heads_learning_rate}

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        model = self.accelerator.unwrap_model(self.model)
        model.heads_weight = model.settings.heads_weight  # that of the end of the run
        return super().evaluate(*args, **kwargs)


@dataclass(frozen=True)
class JointlyTrained(Trained):
    """The result of `train_jointly`."""

    adapter: Path  # its folder, for `load_base(..., adapter=)`
    base_score: BaseScore | None  # of the base on the texts held out; None where there are none


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
    """Train heads and a LoRA adapter of their base (Medusa-2); both are written to a folder.

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
    set_seed(chosen.short_seed)  # by which the adapter's first factors are drawn
    joined = adapted(base, chosen)
    job = run.job_of(
        base,
        as_training_texts(base, texts, length=chosen.length),
        place,
        chosen,
        trained=weights_of(base, chosen) + sum(weight.numel() for weight in joined.weights),
        more={"heads": None if first is None else first.fingerprint},
    )
    if first is None:
        begun = new_heads(base, chosen.num_heads, blocks=chosen.blocks, shared_lm_head=chosen.shared_lm_head)
    else:
        begun = copy.deepcopy(first.heads).to(base.device).float().train()
    trainer = run.run_job(
        job,
        JointModel(joined, begun, chosen),
        progress,
        functools.partial(_save, job, joined, begun, overwrite=overwrite or resume),
        kind=JointTrainer,
        resume=resume,
        overwrite=overwrite,
    )
    found = begun.eval(), trainer.scores, trainer.state.global_step
    return JointlyTrained(*found, place / adapters.ADAPTER_FOLDER, trainer.base_score)


def _check_all_tokens(heads: LoadedHeads | None) -> None:
    """Raise E212 for heads that draft only the tokens of a map: losses and files are of LM heads with all tokens."""
    if heads is None or heads.heads.token_map is None:
        return
    mapped, vocab_size = len(heads.heads.token_map), heads.heads.vocab_size
    what = f"the heads {heads.name} draft only the {mapped} of {vocab_size} tokens in their token_map"
    why = "heads are trained on all tokens, and the layout of trained heads has no token_map"
    raise TreeoptError(Code.HEADS_MISMATCH, what, why=why, fix="train heads of stage 1, or start with new ones")


def check_outputs(folder: Path, inputs: Sequence[str], *, resume: bool, overwrite: bool) -> None:
    """Check, before any work, that peft is installed, and a run of stage 2 can begin or continue in a folder."""
    adapters.require_peft()
    run.check_outputs(folder, inputs, resume=resume, overwrite=overwrite)
    adapters.check_adapter_writable(folder / adapters.ADAPTER_FOLDER, overwrite=overwrite or resume)


def _save(job: run.TrainingRun, joined: Adapted, heads: MedusaHeads, *, overwrite: bool) -> None:
    """Write the adapter and the heads: all files, or none."""
    heads_id = fingerprint(copy.deepcopy(heads).to(job.base.dtype))
    adapter = joined.files(job.folder / adapters.ADAPTER_FOLDER, heads_id)
    save_trained(heads, job, {"method": JOINT_METHOD}, also=adapter, overwrite=overwrite)
