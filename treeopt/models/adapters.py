"""LoRA adapters (arXiv:2106.09685) in peft's format: reading, checks, and merging into the weights of a base.

An adapter's folder holds peft's `adapter_config.json` and `adapter_model.safetensors`, and `treeopt.json` with the
fingerprints of the base and the heads that it was trained with. Only adapters with that file are read, since peft's
files do not identify the base.
"""

import hashlib
import importlib.util
import json
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from treeopt.errors import Code, TreeoptError, first_line, out_of_memory
from treeopt.files.atomic import check_folder, check_writable, make_folder
from treeopt.files.configurations import with_stored
from treeopt.files.read import read_bytes
from treeopt.models.devices import is_offloaded
from treeopt.models.tensors import fingerprints, read_config

ADAPTER_FOLDER = "adapter"  # inside the folder of heads
CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
NOTE_FILE = "treeopt.json"
# Of peft's settings, those in which adapters of treeopt differ.
_SETTINGS = {"r", "lora_alpha", "lora_dropout", "target_modules", "base_model_name_or_path", "inference_mode"}
_SETTINGS |= {"peft_version", "fan_in_fan_out"}
_WHOLE = "a device_map of accelerators alone, or a base that was merged on a machine that holds it (docs/training.md)"
_TRAINING = "treeopt train --stage 2 writes adapters"


@dataclass(frozen=True)
class Adapter:
    """An adapter that was read."""

    name: str  # of its folder, as given by the user
    base_ids: Mapping[str, str]  # fingerprints of the base that it was trained on, by precision
    heads_id: str  # fingerprint of the heads that were trained with it
    kind: str  # the class of the base's model


def require_peft() -> None:
    """Raise E401 where the package peft is not installed."""
    if importlib.util.find_spec("peft") is None:
        what = "LoRA adapters need the package peft, which is not installed"
        raise TreeoptError(Code.PROGRAM_MISSING, what, fix="pip install peft")


def read_adapter(folder: str | os.PathLike[str]) -> Adapter:
    """The note of an adapter, after checking that its files are complete."""
    require_peft()
    place = Path(os.path.expanduser(folder))
    if not (place / CONFIG_FILE).is_file():
        inside = place / ADAPTER_FOLDER
        fix = f"--adapter {inside}" if (inside / CONFIG_FILE).is_file() else _TRAINING
        at = f"{place / CONFIG_FILE} is missing"
        raise TreeoptError(Code.FILE_MISSING, f"there is no adapter {folder}", at=at, fix=fix)
    for name in (NOTE_FILE, WEIGHTS_FILE):
        if not (place / name).is_file():
            what = f"{folder} is not an adapter of treeopt: {name} is missing"
            fix = "merge other adapters into a copy of their base by peft's merge_and_unload; --model names the copy"
            raise TreeoptError(Code.FILE_MISSING, what, fix=fix)
    _check_config(place / CONFIG_FILE, place / WEIGHTS_FILE)
    note = read_config(place / NOTE_FILE)
    ids = note.get("base")
    texts = [*map(note.get, ("heads", "model", "sha256")), *(ids.values() if isinstance(ids, dict) else [None])]
    if not all(isinstance(text, str) for text in texts):
        raise TreeoptError(Code.FILE_INVALID, f"{place / NOTE_FILE} is not what treeopt train wrote", fix=_TRAINING)
    if _digest(read_bytes(place / WEIGHTS_FILE), read_bytes(place / CONFIG_FILE)) != note["sha256"]:
        what = f"{place} is damaged: {WEIGHTS_FILE} or {CONFIG_FILE} differs from what was saved"
        raise TreeoptError(Code.FILE_INVALID, what, fix="restore it, or train again with --force")
    return Adapter(os.fspath(folder), note["base"], note["heads"], note["model"])


def _check_config(file: Path, weights: Path) -> None:
    """Raise E203 unless a config is one of LoRA with the settings that treeopt uses, and the rank of its weights.

    Other settings of peft import modules, read other files, or take memory that the weights do not state.
    """
    config = read_config(file)
    odd = odd_settings(config)
    if odd:
        what = f"{file} has settings that treeopt does not use: {', '.join(odd)[:200]}"
        raise TreeoptError(Code.FILE_INVALID, what, fix=_TRAINING)
    layers = config.get("target_modules")
    if not isinstance(layers, list) or not all(isinstance(layer, str) for layer in layers):
        raise TreeoptError(Code.FILE_INVALID, f"{file} has no list of names as target_modules", fix=_TRAINING)
    try:
        with safetensors.safe_open(weights, framework="pt") as opened:
            shapes = {key: opened.get_slice(key).get_shape() for key in opened.keys()}  # noqa: SIM118 - no mapping
    except (safetensors.SafetensorError, OSError) as error:
        raise TreeoptError(Code.FILE_INVALID, f"{weights} is damaged or not a safetensors file: {error}") from error
    rank = config.get("r")
    if not shapes or any(shape[:1] != [rank] for key, shape in shapes.items() if ".lora_A." in key):
        raise TreeoptError(Code.FILE_INVALID, f"{file} has rank {rank!r}, and the weights have another", fix=_TRAINING)


def odd_settings(config: Mapping[str, Any]) -> list[str]:
    """The settings in a config of LoRA that treeopt does not use."""
    from peft import LoraConfig

    usual = LoraConfig().to_dict()
    return sorted(key for key, value in config.items() if key not in _SETTINGS and value and value != usual.get(key))


def merge(model: PreTrainedModel, adapter: Adapter) -> PreTrainedModel:
    """The model with the adapter's updates added to its weights: plain linear layers, in the same dtype.

    A tied LM head is untied before, since only the LM head is adapted. Layers of the model are changed in place; its
    tensors are replaced and not written to.
    """
    if is_offloaded(model):
        what = f"the adapter {adapter.name} cannot be merged into weights that are kept in host memory or on disk"
        raise TreeoptError(Code.DEVICE_UNUSABLE, what, why="they are loaded anew for each forward", fix=_WHOLE)
    found = fingerprints(model)
    if not any(found[key] == one for key, one in adapter.base_ids.items() if key in found):
        what = f"the adapter {adapter.name} was trained on another base model ({adapter.kind})"
        at = f"this base is {found['float32']}, the adapter's is {adapter.base_ids.get('float32')}"
        raise TreeoptError(Code.ADAPTER_MISMATCH, what, at=at, fix="name with --model the base that it was trained on")
    from peft import PeftModel

    untie(model)
    try:
        with warnings.catch_warnings(action="ignore"):  # peft calls deprecated names of transformers
            joined = PeftModel.from_pretrained(
                model, os.path.expanduser(adapter.name), torch_device=str(model.device), local_files_only=True
            )
            # `safe_merge` makes new tensors, where the default adds in place.
            merged: PreTrainedModel = joined.merge_and_unload(safe_merge=True)
    except Exception as error:  # peft and safetensors raise many types for damaged files
        if out_of_memory(error):
            raise
        what = f"the adapter {adapter.name} cannot be merged: its files are damaged"
        raise TreeoptError(Code.FILE_INVALID, what, why=f"{type(error).__name__}: {first_line(error)}") from error
    return merged.requires_grad_(True).eval()


def untie(model: PreTrainedModel) -> None:
    """Give a tied LM head a parameter of its own with the same values; a model with an untied one does not change."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head.weight is embedding.weight:
        head.weight = nn.Parameter(head.weight.detach().clone(), head.weight.requires_grad)
    for config in (model.config, model.config.get_text_config()):
        config.tie_word_embeddings = False


def adapter_files(
    folder: Path, config: Mapping[str, Any], weights: Mapping[str, Tensor], *, base: PreTrainedModel, heads_id: str
) -> dict[Path, bytes]:
    """The files of an adapter, for `treeopt.files.atomic.write_files`."""
    place = make_folder(folder)
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in sorted(weights.items())}
    content = safetensors.torch.save(state, metadata={"format": "pt"})
    settings = json.dumps(config, indent=1, sort_keys=True) + "\n"
    digest = _digest(content, settings.encode())
    note = {"base": fingerprints(base), "model": type(base).__name__, "heads": heads_id, "sha256": digest}
    # The note comes first: it marks the folder as ours, and its digest shows whether the weights followed.
    noted = (json.dumps(with_stored(note), indent=1) + "\n").encode()
    return {place / NOTE_FILE: noted, place / WEIGHTS_FILE: content, place / CONFIG_FILE: settings.encode()}


def _digest(weights: bytes, config: bytes) -> str:
    """Of both files: the config has the scale of the updates."""
    return hashlib.sha256(weights + config).hexdigest()


def check_adapter_writable(folder: Path, *, overwrite: bool) -> None:
    """Check that an adapter can be written to a folder: it is empty, or has one of ours that is to be replaced."""
    if not check_folder(folder).is_dir() or not any(folder.iterdir()):
        return
    if not (folder / NOTE_FILE).is_file():
        what = f"{folder} holds files that treeopt train did not write"
        raise TreeoptError(Code.FILE_UNWRITABLE, what, fix="move them away, or choose another folder with -o")
    check_writable(folder / NOTE_FILE, overwrite=overwrite)
