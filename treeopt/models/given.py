"""Conversion of models and heads from any accepted form: objects of transformers or treeopt, folders and hub names."""

from __future__ import annotations

import dataclasses
import os
import warnings
from pathlib import Path
from typing import Any, TypeAlias

from torch import nn
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from treeopt.errors import Code, TreeoptError
from treeopt.models.base import Base, load_base, shown_name
from treeopt.models.fingerprint import fingerprint
from treeopt.models.heads import MedusaHeads
from treeopt.models.layouts import LoadedHeads, load_heads

GivenModel: TypeAlias = Base | PreTrainedModel | str | os.PathLike[str]
GivenHeads: TypeAlias = MedusaHeads | LoadedHeads | str | os.PathLike[str]

_GIVEN = "given"  # the name of heads passed as an object


def as_base(model: GivenModel, tokenizer: PreTrainedTokenizerBase | None = None, *, dtype: str = "auto") -> Base:
    """A `Base` from any accepted form of a model.

    Args:
        model: a causal language model of transformers, a folder or hub name (`pocket` is the built-in model), or what
            `load_base` gives.
        tokenizer: the model's; by default the one in the folder of its weights, or in the hub's cache.
        dtype: of a model that is loaded here, as in `load_base`.

    Raises:
        TreeoptError: E304 where the model has no LM head, has an encoder, or is in training mode; as `load_base`.
        TypeError: where it has another type.
    """
    if tokenizer is not None and not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise TypeError(f"a tokenizer is one of transformers, not {_kind(tokenizer)}")
    if isinstance(model, (str, os.PathLike)):
        model = load_base(os.fspath(model), dtype=dtype)
        for note in model.notes:
            warnings.warn(note.removeprefix("warning: "), stacklevel=3)
    if isinstance(model, Base):
        return model if tokenizer is None else dataclasses.replace(model, tokenizer=tokenizer)
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            "a model is a causal language model of transformers, a folder, a hub name, or what treeopt.load_base "
            f"gives, not {_kind(model)}"
        )
    _check_model(model)
    return Base(model, tokenizer or tokenizer_beside(model.config.name_or_path), shown_name(model))


def name_of(model: GivenModel) -> tuple[str, ...]:
    """The folder or hub name of a model; empty where it was made in Python."""
    if isinstance(model, (str, os.PathLike)):
        return (os.fspath(model),)
    name = model.name if isinstance(model, Base) else getattr(getattr(model, "config", None), "name_or_path", "")
    return (name,) if name else ()


def as_heads(heads: GivenHeads) -> LoadedHeads:
    """`LoadedHeads` from any accepted form: `MedusaHeads`, what `load_heads` gives, a folder, a file or a hub name.

    Raises:
        TreeoptError: as `load_heads`.
        TypeError: where it has another type.
    """
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
        raise TreeoptError(
            Code.MODEL_INVALID, what, why="dropout would change its outputs", fix="call model.eval() before"
        )


def tokenizer_beside(name: str) -> PreTrainedTokenizerBase | None:
    """The tokenizer of the folder or cached repository of a model; None where there is none."""
    if not name:
        return None
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            name, local_files_only=True, trust_remote_code=False
        )
    except Exception:  # the types that tokenizers raise vary
        return None
    return tokenizer


def _kind(given: Any) -> str:
    return f"an object of type {type(given).__name__}"
