"""A base with a LoRA adapter on all of its linear layers, to be trained (arXiv:2401.10774, appendix B).

The model with the adapter is a copy that shares the tensors of the given one. So the given model does not change, is
the base without the adapter at any time, and takes no memory twice.
"""

import copy
import dataclasses
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from treeopt.errors import Code, TreeoptError, first_line
from treeopt.models.adapters import adapter_files, odd_settings, require_peft, untie
from treeopt.models.base import Base
from treeopt.train.settings import JointSettings

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
        return adapter_files(folder, config, weights, base=self.original.model, heads_id=heads_id)


def adapted(base: Base, settings: JointSettings) -> Adapted:
    """A base with a new adapter, whose updates are zero; the first factor of each is drawn from torch's generator."""
    require_peft()
    if not base.logits_of_lm_head:
        what = f"{base.name} changes the logits of its LM head, by a scale, a soft cap or a layer before it"
        why = "stage 2 computes its losses from hidden states and LM head"
        raise TreeoptError(Code.MODEL_INVALID, what, why=why, fix="--stage 1, which does not train the base")
    from peft import LoraConfig, get_peft_model

    model = _sharing_copy(base.model)
    untie(model)
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
    others = sorted(found - names) + odd_settings(config.to_dict())
    if found != names or others:
        raise _not_adaptable(base, names - found, f"it would also adapt or set {', '.join(others)}")
    return Adapted(dataclasses.replace(base, model=model), base, joined)


def expert_share(base: Base) -> float:
    """The share of a base's weights in experts, which get no adapter."""
    sizes = [(weight.ndim == 3, int(weight.numel())) for weight in base.model.parameters()]
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
