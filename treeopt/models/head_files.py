"""The files of heads checkpoints: which one has the weights, and the tensors of the heads in it.

Tensors of a base model in the same checkpoint are not read. An index of shards is followed, inside its folder.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from treeopt.errors import Code, TreeoptError
from treeopt.files.read import is_regular, read_head
from treeopt.models.checkpoint import check_shards, read_config, refused_name
from treeopt.models.head_layouts import NOT_YET, Layout, detect, invalid, listed
from treeopt.models.hub import find_heads, here
from treeopt.models.pickles import MAGIC, SAM_DECODING, UNKNOWN, ordinary, refused_pickle, unpacked_size

State = dict[str, Tensor]

WEIGHT_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
NXDI_FILE = "medusa_heads.pt"  # in the folder of the base model
VLLM_FILE = "model.safetensors"
CONFIG_FILE = "config.json"
_HEADS_ONLY = (*WEIGHT_FILES, NXDI_FILE)
_INDEX_SUFFIXES = (".safetensors.index.json", ".bin.index.json")
_WITH_BASE = ("model.safetensors.index.json", VLLM_FILE, "pytorch_model.bin.index.json", "pytorch_model.bin")

_Loaders = Mapping[str, Callable[[], Tensor]]


@dataclass(frozen=True)
class HeadTensors:
    """The tensors of the heads in a checkpoint.

    Args:
        file: the weights, or the index of their shards.
        layout: of their names.
        state: the tensors by name.
        with_base: whether the checkpoint has other tensors too, those of the base model.
    """

    file: Path
    layout: Layout
    state: State
    with_base: bool


def find_head_files(name: str) -> Path:
    """The folder or file of heads: a local path, the built-in heads, or a repository with the files that heads need.

    Raises:
        TreeoptError: as `find_heads`.
    """
    first = (*_HEADS_ONLY, "*.index.json")
    path = find_heads(name, first)
    if here(name) is not None or not path.is_dir() or any((path / file).is_file() for file in _HEADS_ONLY):
        return path
    index = next((path / file for file in _WITH_BASE if file.endswith(".json") and (path / file).is_file()), None)
    shards = (VLLM_FILE, "pytorch_model.bin") if index is None else tuple(sorted(set(_heads_in(index).values())))
    return find_heads(name, (*first, *shards))


def read_head_tensors(path: Path) -> HeadTensors:
    """The tensors of the heads in a folder or file.

    Raises:
        TreeoptError: E201 where there is no file of weights, E203 where a file is damaged or an index names files
            outside its folder, E210 where a pickle is not plain tensors, E211 where the names are of no known layout.
    """
    file = _weights_file(path)
    check_shards(file.parent)
    sharded = file.name.endswith(_INDEX_SUFFIXES)
    loaders = _sharded(file) if sharded else _single(file)
    layout = detect(loaders, str(file))
    heads = [key for key in loaders if key.startswith(layout.prefix)]
    state = {key: loaders[key]() for key in heads}
    return HeadTensors(file, layout, state, len(heads) < len(loaders))


def _weights_file(path: Path) -> Path:
    if path.is_file():
        return path
    for name in (*_HEADS_ONLY, *_WITH_BASE):
        if (path / name).is_file():
            return path / name
    what = f"{path} has neither {' nor '.join(WEIGHT_FILES)}, {NXDI_FILE}, {VLLM_FILE} or pytorch_model.bin"
    raise TreeoptError(Code.FILE_MISSING, what)


def _heads_in(index: Path) -> dict[str, str]:
    """The shard of each tensor of heads in an index; the index is checked for names outside its folder."""
    check_shards(index.parent)
    shards: dict[str, str] = read_config(index)["weight_map"]
    prefix = detect(shards, str(index)).prefix
    return {key: shard for key, shard in shards.items() if key.startswith(prefix)}


def _sharded(index: Path) -> _Loaders:
    """Loaders of all tensors in an index; only shards with heads are opened."""
    loaders: dict[str, Callable[[], Tensor]] = dict.fromkeys(read_config(index)["weight_map"], _not_read)
    opened: dict[str, _Loaders] = {}
    for key, shard in _heads_in(index).items():
        if shard not in opened:
            opened[shard] = _single(index.parent / shard)
        if key not in opened[shard]:
            raise TreeoptError(Code.FILE_INVALID, f"{index} names {key} in {shard}, which does not have it")
        loaders[key] = opened[shard][key]
    return loaders


def _not_read() -> Tensor:
    raise AssertionError("a tensor of the base model is read")


def _single(file: Path) -> _Loaders:
    """Loaders of the tensors in one file, which read nothing before they are called where the format allows it."""
    if os.path.lexists(file) and not is_regular(file):
        raise TreeoptError(Code.FILE_INVALID, f"{file} is not a file, but a folder, a pipe, a device or a broken link")
    if file.suffix == ".safetensors":
        try:
            opened: Any = safe_open(file, framework="pt")
            return {key: functools.partial(_tensor, opened, key, file) for key in opened.keys()}  # noqa: SIM118
        except FileNotFoundError as error:
            raise TreeoptError(Code.FILE_MISSING, f"there is no file {file}") from error
        except (SafetensorError, OSError, ValueError) as error:  # ValueError: names that no file can have
            raise _damaged(file, error) from error
    return {key: functools.partial(_given, tensor) for key, tensor in _unpickled(file).items()}


def _tensor(opened: Any, key: str, file: Path) -> Tensor:
    try:
        tensor: Tensor = opened.get_tensor(key)
    except (SafetensorError, OSError) as error:
        raise _damaged(file, error) from error
    return tensor


def _given(tensor: Tensor) -> Tensor:
    return tensor


def _damaged(file: Path, error: Exception) -> TreeoptError:
    return TreeoptError(Code.FILE_INVALID, f"{file} is damaged or not a safetensors file: {error}")


def _refused(file: Path, kind: str) -> TreeoptError:
    what = f"{file} was refused: it is not plain tensors ({kind})"
    fix = NOT_YET if kind == SAM_DECODING else f"use {WEIGHT_FILES[0]}"
    return TreeoptError(Code.PICKLE_REFUSED, what, fix=fix)


def _unpickled(file: Path) -> State:
    if not is_regular(file):
        raise TreeoptError(Code.FILE_MISSING, f"there is no file {file}")
    if not read_head(file, 4).startswith(MAGIC):
        raise TreeoptError(Code.FILE_INVALID, f"{file} is damaged, or not a checkpoint of PyTorch")
    kind = refused_pickle(file)
    if kind is not None:
        raise _refused(file, kind)
    unpacked = unpacked_size(file)
    if unpacked == UNKNOWN:
        raise TreeoptError(Code.FILE_INVALID, f"{file} is damaged, or not a checkpoint of PyTorch")
    if unpacked > file.stat().st_size:
        raise invalid(str(file), f"unpacks to {unpacked:,} bytes, more than it has; PyTorch writes no compressed files")
    try:
        with warnings.catch_warnings(action="ignore"):  # torch's of pickles that it refuses next
            loaded = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # the types that torch.load raises vary
        # The message of torch on a refused pickle proposes weights_only=False, which would run code of the file.
        refused = refused_name(error)
        if refused is not None:
            raise _refused(file, refused) from error
        raise TreeoptError(Code.FILE_INVALID, f"{file} is damaged, or not a checkpoint of PyTorch") from error
    if not isinstance(loaded, dict):
        raise invalid(str(file), "is not a dictionary of tensors")
    others = [str(key) for key, value in loaded.items() if not isinstance(value, Tensor)]
    if others:
        raise invalid(str(file), f"is not a dictionary of tensors: {listed(others)}")
    odd = [str(key) for key, value in loaded.items() if not ordinary(value)]
    if odd:
        raise invalid(str(file), f"has tensors that are not plain arrays in memory: {listed(odd)}")
    return {str(key): value for key, value in loaded.items()}
