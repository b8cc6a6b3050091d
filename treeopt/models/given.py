"""Conversion of models and heads from any accepted form: objects of transformers or treeopt, folders and hub names."""

import dataclasses
import os
import warnings
from pathlib import Path
from typing import Any, TypeAlias

from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from treeopt.errors import Code, TreeoptError
from treeopt.models.base import Base, load_base, shown_name
from treeopt.models.compatibility import check_draft, heads_like, tokenizer_beside
from treeopt.models.devices import DeviceMap
from treeopt.models.draft_files import load_draft
from treeopt.models.head_files import LoadedHeads, load_heads
from treeopt.models.heads import MedusaHeads
from treeopt.models.tensors import fingerprint

GivenModel: TypeAlias = Base | PreTrainedModel | str | os.PathLike[str]
GivenHeads: TypeAlias = MedusaHeads | LoadedHeads | str | os.PathLike[str]

_GIVEN = "given"  # the name of heads passed as an object


def as_base(model: GivenModel, tokenizer: PreTrainedTokenizerBase | None = None, *, dtype: str = "auto") -> Base:
    """A `Base` from any accepted form of a model."""
    if tokenizer is not None and not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise TypeError(f"a tokenizer is one of transformers, not {_kind(tokenizer)}")
    if isinstance(model, (str, os.PathLike)):
        model = load_base(os.fspath(model), dtype=dtype)
        _warn(model)
    if isinstance(model, Base):
        return model if tokenizer is None else dataclasses.replace(model, tokenizer=tokenizer)
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            "a model is a causal language model of transformers, a folder, a hub name, or what treeopt.load_base "
            f"gives, not {_kind(model)}"
        )
    _check_model(model)
    return Base(model, tokenizer or tokenizer_beside(model.config.name_or_path), shown_name(model))


def _warn(model: Base) -> None:
    for note in model.notes:
        warnings.warn(note.removeprefix("warning: "), stacklevel=4)


def name_of(model: GivenModel) -> tuple[str, ...]:
    """The folder or hub name of a model; empty where it was made in Python."""
    if isinstance(model, (str, os.PathLike)):
        return (os.fspath(model),)
    name = model.name if isinstance(model, Base) else getattr(getattr(model, "config", None), "name_or_path", "")
    return (name,) if name else ()


def as_heads(heads: GivenHeads) -> LoadedHeads:
    """`LoadedHeads` from any accepted form: `MedusaHeads`, what `load_heads` gives, a folder, a file or a hub name."""
    if isinstance(heads, LoadedHeads):
        return heads
    if isinstance(heads, MedusaHeads):
        return LoadedHeads(heads, _GIVEN, Path(_GIVEN), None, fingerprint(heads), ())
    if isinstance(heads, (str, os.PathLike)):
        return load_heads(heads)
    raise TypeError(
        "heads are treeopt.MedusaHeads, what treeopt.load_heads gives, a folder, a file or a hub name, "
        f"not {_kind(heads)}"
    )


def _check_model(model: PreTrainedModel) -> None:
    name = type(model).__name__
    if model.config.is_encoder_decoder or not isinstance(model.get_output_embeddings(), nn.Linear):
        what = f"{name} is not a causal language model with an LM head"
        raise TreeoptError(Code.MODEL_INVALID, what, fix="load it with transformers.AutoModelForCausalLM")
    if model.training:
        what = f"the model ({name}) is in training mode"
        why = "dropout would change its outputs"
        raise TreeoptError(Code.MODEL_INVALID, what, why=why, fix="call model.eval() first")


def _kind(given: Any) -> str:
    return f"an object of type {type(given).__name__}"


def as_draft(model: GivenModel | None, base: Base) -> Base | None:
    """The draft model or module from any accepted form, after checks that it fits; None stays None."""
    if model is None:
        return None
    if isinstance(model, (str, os.PathLike)):
        draft = load_draft(os.fspath(model), base, dtype=base.dtype_name, device=str(base.device))
        _warn(draft)
        return draft
    draft = as_base(model, dtype=base.dtype_name)
    check_draft(base, draft)
    return draft


def load_pair(
    heads: str,
    model: str | None,
    *,
    dtype: str = "auto",
    device: str = "auto",
    device_map: DeviceMap | None = None,
    adapter: str | None = None,
) -> tuple[Base, LoadedHeads]:
    """Load heads and their base model in one dtype, with the heads on the device of the base's inputs and outputs."""
    loaded = load_heads(heads)
    name = model or loaded.base
    if name is None:
        what = f"{heads} has no config.json with the name of its base model"
        raise TreeoptError(Code.HEADS_INVALID, what, fix="name the base model with --model")
    base = load_base(name, dtype=dtype, device=device, device_map=device_map, adapter=adapter)
    loaded = dataclasses.replace(loaded, heads=heads_like(base, loaded.heads, loaded.name))
    if base.adapter is not None and base.adapter.heads_id != loaded.fingerprint:
        what = f"the adapter {base.adapter.name} was trained with other heads than {loaded.name}"
        at = f"these heads are {loaded.fingerprint}, the adapter's are {base.adapter.heads_id}"
        fix = "--heads and --adapter of one run: the adapter is in the folder of its heads"
        raise TreeoptError(Code.ADAPTER_MISMATCH, what, at=at, fix=fix)
    if base.adapter is None and loaded.joint_base == base.fingerprint:
        note = f"warning: {loaded.name} was trained with an adapter of its base, which is not used (--adapter)"
        base = dataclasses.replace(base, notes=(*base.notes, note))
    return base, loaded
