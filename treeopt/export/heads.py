"""Medusa heads in the layouts of the programs that read them, each with a config that it reads rightly.

docs/develop/formats.md gives the versions and what each of them does with the files.
"""

import io
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from treeopt.errors import Code, TreeoptError
from treeopt.files.atomic import check_writable, make_folder, write_files
from treeopt.files.configurations import with_stored
from treeopt.models import head_files
from treeopt.models.base import Base, load_base
from treeopt.models.compatibility import check_heads_fit
from treeopt.models.devices import weight_of
from treeopt.models.head_layouts import MEDUSA, NXDI, VLLM, state_of
from treeopt.models.heads import MedusaHeads
from treeopt.models.tensors import State

SAFETENSORS, PICKLE = head_files.WEIGHT_FILES
_VLLM_MARK = "medusa_fc_bias"  # in the config of heads for vLLM, and in none of a base model


@dataclass(frozen=True)
class ConvertedHeads:
    """Files of heads for an engine."""

    files: tuple[Path, ...]  # those written, the weights first
    notes: tuple[str, ...]  # what was written beside the given tensors


def refusal(heads: MedusaHeads, to: str, *, with_lm_heads: bool = False) -> str:
    """Why a layout cannot hold these heads; empty where it can."""
    blocks = heads.bias.shape[0]
    if heads.token_map is not None and to != "vllm":
        return f"they draft only {len(heads.token_map)} of {heads.vocab_size} tokens, which vLLM's layout alone can say"
    if to == "tgi" and heads.lm_head is None and blocks != 1 and not with_lm_heads:
        return f"TGI reads heads without LM heads of 1 block only, and these have {blocks}"
    if to == "nxdi" and blocks != 1:
        return f"NxD Inference reads heads of 1 block only, and these have {blocks}"
    return ""


def _check_output(to: str, folder: str | os.PathLike[str], *, own: bool, overwrite: bool) -> None:
    """E204 where a folder has a base model or heads in another file, which would be read; E202 where it has heads."""
    place = Path(folder)
    if to == "nxdi":
        if place.exists():
            check_writable(place / head_files.NXDI_FILE, overwrite=overwrite)
    elif to == "vllm":
        head_files.check_heads_writable(place, overwrite=overwrite, names=(head_files.VLLM_FILE,), mark=_VLLM_MARK)
    else:
        head_files.check_heads_writable(place, overwrite=overwrite)
        other = SAFETENSORS if to == "medusa" and own else PICKLE
        if (place / other).exists():
            what = f"{place} has {other}, and programs would read either it or the new file"
            raise TreeoptError(Code.FILE_UNWRITABLE, what, at=str(place / other), fix="another folder for the heads")


def convert_heads(
    heads: MedusaHeads,
    to: str,
    folder: str | os.PathLike[str],
    *,
    base: Base | str | os.PathLike[str] | None,
    with_lm_heads: bool = False,
    overwrite: bool = False,
) -> ConvertedHeads:
    """Write heads in the layout of an engine; their tensors are not changed.

    Args:
        heads: written in their type.
        to: one of `treeopt.engines.HEAD_READERS`.
        folder: made where it is missing. For `nxdi` only the weights are written: the engine reads them in the folder
            of the base model.
        base: the base model or its name, for the config; None where it is not known. Where the layout stores LM heads
            that these heads share with it, that of a name is loaded.
        with_lm_heads: write an LM head for each head, where they share that of the base.
        overwrite: replace existing heads.

    Raises:
        TreeoptError: E215 where the layout cannot hold the heads, or their base model is needed and not known; E212
            where the base does not fit; E202 and E204 where the folder has heads or a base model; as `load_base`.
    """
    why = refusal(heads, to, with_lm_heads=with_lm_heads)
    if why:
        fix = "--with-lm-heads" if to == "tgi" and heads.lm_head is None else "another engine in --for"
        raise TreeoptError(Code.HEADS_NOT_EXPORTABLE, f"these heads cannot be written for {to}", why=why, fix=fix)
    if to in ("medusa", "tgi") and base is None:
        what = f"the config for {to} names the base model, which the heads' own config does not"
        raise TreeoptError(Code.HEADS_NOT_EXPORTABLE, what, fix="name the base model with --model")
    _check_output(to, folder, own=with_lm_heads or heads.lm_head is not None, overwrite=overwrite)
    notes: list[str] = []
    if heads.lm_head is None and (to in ("vllm", "nxdi") or with_lm_heads):
        heads = _with_lm_heads(heads, base, notes)
    place = make_folder(folder)
    name, state = _weights(heads, to)
    content = {name: _saved(name, state)}
    if to != "nxdi":
        config = _vllm_config(heads, state) if to == "vllm" else head_files.medusa_numbers(heads)
        config |= {"num_medusa_heads": heads.num_heads} if to == "medusa" else {}  # TensorRT-LLM's name
        config |= {"treeopt": origin} if (origin := with_stored({})) else {}
        content[head_files.CONFIG_FILE] = (json.dumps(_named(base) | config, indent=1) + "\n").encode()
    write_files({place / file: raw for file, raw in content.items()})
    return ConvertedHeads(tuple(place / file for file in content), tuple(notes))


def _with_lm_heads(heads: MedusaHeads, base: Base | str | os.PathLike[str] | None, notes: list[str]) -> MedusaHeads:
    """The heads, each with the LM head of the base; one memory for all of them."""
    if base is None:
        what = "these heads share the LM head of their base model, which this layout stores"
        raise TreeoptError(Code.HEADS_NOT_EXPORTABLE, what, fix="name the base model with --model")
    dtype = str(heads.bias.dtype).removeprefix("torch.")
    base = base if isinstance(base, Base) else load_base(base, dtype=dtype, device="cpu")
    check_heads_fit(base, heads, "given")
    if base.lm_head.bias is not None:
        what = f"the LM head of {base.name} has a bias, and those of Medusa heads have none"
        raise TreeoptError(Code.HEADS_NOT_EXPORTABLE, what)
    weight = weight_of(base.lm_head, "weight").detach().cpu().to(heads.bias.dtype)
    notes.append(f"the LM head of {base.name} is written with the heads, in {dtype}")
    return MedusaHeads.from_tensors(
        heads.weight.detach(), heads.bias.detach(), weight.expand(heads.num_heads, *weight.shape)
    )


def _weights(heads: MedusaHeads, to: str) -> tuple[str, State]:
    """The name of the weights file, and its tensors."""
    if to == "nxdi":
        return head_files.NXDI_FILE, state_of(heads, NXDI)
    if to != "vllm":
        # The original code and TensorRT-LLM read v1 from the pickle; TGI and v2 are safetensors.
        return PICKLE if to == "medusa" and heads.lm_head is not None else SAFETENSORS, state_of(heads, MEDUSA)
    state, lm_heads = state_of(heads, VLLM), heads.lm_head
    assert lm_heads is not None
    if len(lm_heads) > 1 and all(torch.equal(one, lm_heads[0]) for one in lm_heads[1:]):
        first = state["lm_heads.0.weight"]
        state = {key: tensor for key, tensor in state.items() if not key.startswith("lm_heads.")}
        state["lm_head.weight"] = first
    if heads.token_map is not None:
        state["token_map"] = heads.token_map.cpu()
    return head_files.VLLM_FILE, state


def _saved(name: str, state: State) -> bytes:
    if not name.endswith(".pt"):
        return safetensors.torch.save(state, metadata={"format": "pt"})
    stream = io.BytesIO()
    torch.save(state, stream)
    return stream.getvalue()


def _named(base: Base | str | os.PathLike[str] | None) -> dict[str, Any]:
    """The entry that names the base model; a folder in full, because engines take it from their current folder."""
    if base is None:
        return {}
    name = base.name if isinstance(base, Base) else os.fspath(base)
    local = Path(os.path.expanduser(name))
    return {"base_model_name_or_path": str(local.resolve()) if local.is_dir() else name}


def _vllm_config(heads: MedusaHeads, state: Mapping[str, Tensor]) -> dict[str, Any]:
    """The config that vLLM reads.

    It drops biases without `medusa_fc_bias`, assumes a hidden size of 4096 where there is none, and takes any entry
    whose name has "num" and "heads" for the number of heads.
    """
    rows = heads.vocab_size if heads.token_map is None else len(heads.token_map)
    return {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": heads.hidden_size,
        "vocab_size": heads.vocab_size,
        "truncated_vocab_size": rows,
        "num_heads": heads.num_heads,
        "num_hidden_layers": heads.bias.shape[0],
        "original_lm_head": "lm_head.weight" in state,
        "medusa_fc_bias": True,
        "dtype": str(heads.bias.dtype).removeprefix("torch."),
    }
