"""What a checkpoint must be before it is loaded, and what its loading must have given."""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from treeopt.errors import Code, TreeoptError, first_line, out_of_memory
from treeopt.files.atomic import read_bytes

_SETTINGS = ("config.json", "generation_config.json")  # the second is passed over by transformers where it is damaged
_INDEX = ("*.safetensors.index.json", "*.bin.index.json")  # files that say which shard holds which weight
_SHOWN = 6  # weights shown in a message
_WEIGHTS_A_BYTE = 8  # no quantisation packs more into one
_SMALL = 1 << 28  # weights; so many fit into memory, and loading says by name which are missing
# Words of advice that would run a checkpoint's code, and of a report that is not shown.
_ADVICE = re.compile(r"weights_only|trust_remote_code|above report|ignore_mismatched_sizes")


def read_config(file: Path) -> dict[str, Any]:
    """A foreign file of settings: what is needed is taken, the rest ignored; none is fine.

    Raises:
        TreeoptError: E203 where it holds no JSON object.
    """
    if not file.exists():
        return {}
    try:
        config = json.loads(read_bytes(file))
    except (ValueError, RecursionError) as error:
        raise TreeoptError(Code.FILE_INVALID, f"{file} is not JSON: {first_line(error)}") from error
    if not isinstance(config, dict):
        raise TreeoptError(Code.FILE_INVALID, f"{file} holds no object, but {type(config).__name__}")
    return config


def check_shards(folder: Path) -> None:
    """Raise E203 where an index file of weights names a file outside its folder; nothing is opened.

    Links are not followed: the hub's cache keeps its files elsewhere and links to them.
    """
    for file in sorted(found for pattern in _INDEX for found in folder.glob(pattern)):
        shards = read_config(file).get("weight_map")
        if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
            raise TreeoptError(Code.FILE_INVALID, f"{file} has no weight_map from weights to files")
        outside = next((name for name in shards.values() if _leaves_folder(name)), None)
        if outside is not None:
            what = f"{file} names weights in {outside!r}, which is not in its folder"
            why = "a checkpoint's index may name only files of the checkpoint"
            raise TreeoptError(Code.FILE_INVALID, what, why=why)


def check_files(name: str, folder: Path) -> None:
    """What can be known of a base model before it is loaded, by its files.

    Raises:
        TreeoptError: E203 where a settings file is damaged or an index names files elsewhere, E304 as `check_size`.
    """
    for settings in _SETTINGS:
        read_config(folder / settings)
    check_shards(folder)
    check_size(name, folder)


def check_size(name: str, folder: Path) -> None:
    """Raise E304 where a config describes a model far beyond what the files hold, or weights were stored as integers.

    Loading fills what is missing with random numbers, so a wrong config could take all memory before it is found out.

    Args:
        name: what the user calls the model.
        folder: where its files are; nothing is checked where there are none yet, or where the config cannot be read.
    """
    stored, size = _stored(folder)
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        layers = config.get_text_config().num_hidden_layers
        if size and layers > (len(stored) or size):  # checked first: what follows is as long as this number is large
            raise _not_of_config(name, f"describes {layers} layers, which its files cannot hold")
        with torch.device("meta"), warnings.catch_warnings(action="ignore"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except TreeoptError:
        raise
    except Exception:  # loading will meet the same fault, and say which
        return
    weights = sum(weight.numel() for weight in model.parameters())
    if size and weights > max(_SMALL, _WEIGHTS_A_BYTE * size):
        raise _not_of_config(name, f"describes {weights:,} weights, and the files hold {size:,} bytes")
    if getattr(config, "quantization_config", None) is None:
        for key, _ in model.named_parameters():
            if not stored.get(key, "F32").startswith(("F", "BF")):
                raise _not_of_config(name, f"names no quantisation, and {key} is stored as {stored[key]}")


def check_loaded(name: str, model: nn.Module, info: Mapping[str, Any]) -> tuple[str, ...]:
    """What is worth telling a user about how a checkpoint was loaded.

    Args:
        name: what the user calls the model.
        model: as it was loaded.
        info: by `from_pretrained(..., output_loading_info=True)`: tied weights and buffers that are computed are not
            among the missing ones.

    Raises:
        TreeoptError: E304 where weights are missing or have other shapes: they were made up at random.
    """
    faults = []
    if info["missing_keys"]:
        faults.append(f"it lacks {_listed(info['missing_keys'])}")
    if info["mismatched_keys"]:
        shapes = {key: f"{key} {list(found)}, not {list(wanted)}" for key, found, wanted in info["mismatched_keys"]}
        faults.append(f"it has other shapes than its config says: {_listed(shapes, shapes)}")
    if faults:
        what = f"the checkpoint {name} does not hold all weights of {type(model).__name__}: {'; '.join(faults)}"
        why = "weights that are missing would be random numbers"
        fix = "take a whole checkpoint of this architecture, with the config.json that belongs to it"
        raise TreeoptError(Code.MODEL_INVALID, what, why=why, fix=fix)
    if not info["unexpected_keys"]:
        return ()
    unused = _listed(info["unexpected_keys"])
    return (f"warning: {name} holds weights that {type(model).__name__} does not use: {unused}",)


def plain_reason(error: BaseException) -> str:
    """What a foreign exception says of a checkpoint, in one line, without advice that treeopt does not give."""
    said = first_line(error)
    if said.endswith(":"):  # a heading: the fault is in the next line
        said = " ".join(" ".join(str(error).strip().splitlines()[:2]).split())
    if _ADVICE.search(said):
        return "its files are damaged, or do not belong together"
    return f"{type(error).__name__}: {said}" if isinstance(error, (LookupError, TypeError, AttributeError)) else said


def asked_for(error: BaseException) -> str | None:
    """The name that a pickle refused by `torch.load(..., weights_only=True)` asked for; None for any other fault."""
    asked = re.search(r"(?:GLOBAL|class|function) ([\w.]+)", str(error))
    return asked[1] if asked and "weights_only" in str(error) else None


def not_loadable(name: str, error: Exception) -> TreeoptError:
    """E304 for what a library said while loading a model; E210 where it asked to run code, E403 for want of memory."""
    if out_of_memory(error):
        fix = "--dtype bfloat16, or a smaller model"
        return TreeoptError(Code.OUT_OF_MEMORY, f"{name} does not fit into memory", fix=fix)
    if "custom code" in str(error):
        what = f"{name} needs code from its own repository, which treeopt does not run"
        return TreeoptError(Code.MODEL_INVALID, what, why="only architectures of transformers itself are loaded")
    asked = asked_for(error)
    if asked is not None:
        what = f"the weights of {name} were refused: they hold more than plain tensors ({asked})"
        return TreeoptError(Code.PICKLE_REFUSED, what, fix="ask its author for safetensors files")
    what = f"{name} is not a model that transformers can load"
    return TreeoptError(Code.MODEL_INVALID, what, why=plain_reason(error))


def _not_of_config(name: str, what: str) -> TreeoptError:
    fix = "take the config.json that belongs to these weights"
    return TreeoptError(Code.MODEL_INVALID, f"the config of {name} {what}", why="they do not belong together", fix=fix)


def _stored(folder: Path) -> tuple[dict[str, str], int]:
    """The type of each tensor in a folder's safetensors files, by name, and the bytes of all files of weights.

    Files that cannot be read are passed over: loading will say so.
    """
    kinds: dict[str, str] = {}
    size = 0
    for file in folder.glob("*"):
        if file.suffix not in (".safetensors", ".bin") or not file.is_file():
            continue
        size += file.stat().st_size
        try:
            with safe_open(file, framework="pt") as opened:
                kinds |= {key: opened.get_slice(key).get_dtype() for key in opened.keys()}  # noqa: SIM118 - no mapping
        except (SafetensorError, OSError):
            continue
    return kinds, size


def _leaves_folder(name: str) -> bool:
    """Whether a file's name, on any system, may mean a place outside the folder it is relative to."""
    kinds = (PurePosixPath(name), PureWindowsPath(name))
    return any(path.is_absolute() or path.anchor or ".." in path.parts for path in kinds) or not name.strip(os.curdir)


def _listed(keys: Iterable[str], texts: Mapping[str, str] | None = None) -> str:
    """The first keys in order, or their texts, and how many more there are."""
    known = sorted(keys)
    more = f" and {len(known) - _SHOWN} more" if len(known) > _SHOWN else ""
    return ", ".join(texts[key] if texts else key for key in known[:_SHOWN]) + more
