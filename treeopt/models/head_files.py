"""The files of heads checkpoints: which one has the weights, and the tensors of the heads in it.

Tensors of a base model in the same checkpoint are not read. An index of shards is followed, inside its folder.
"""

from __future__ import annotations

import functools
import json
import os
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from treeopt.errors import Code, TreeoptError
from treeopt.files.atomic import check_folder, check_writable, make_folder, write_files
from treeopt.files.bundled import POCKET
from treeopt.files.configurations import with_stored
from treeopt.files.read import is_regular, read_head
from treeopt.models.checkpoint import check_shards, read_config, refused_name
from treeopt.models.head_layouts import MEDUSA, NOT_YET, HeadsLayout, detect, invalid, listed
from treeopt.models.head_layouts import expected_keys as expected_keys
from treeopt.models.heads import MedusaHeads
from treeopt.models.hub import built_in, find_heads, here
from treeopt.models.tensors import MAGIC, SAM_DECODING, UNKNOWN, fingerprint, ordinary, refused_pickle, unpacked_size

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
    layout: HeadsLayout
    state: State
    with_base: bool


def find_head_files(name: str) -> Path:
    """The folder or file of heads: a local path, the built-in heads, or a repository with the files that heads need."""
    first = (*_HEADS_ONLY, "*.index.json")
    path = find_heads(name, first)
    if here(name) is not None or not path.is_dir() or any((path / file).is_file() for file in _HEADS_ONLY):
        return path
    index = next((path / file for file in _WITH_BASE if file.endswith(".json") and (path / file).is_file()), None)
    shards = (VLLM_FILE, "pytorch_model.bin") if index is None else tuple(sorted(set(_heads_in(index).values())))
    return find_heads(name, (*first, *shards))


def read_head_tensors(path: Path) -> HeadTensors:
    """The tensors of the heads in a folder or file."""
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


_SCALE = "_scale"  # of a weight: weight_scale
_EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True)
class PlainHeads:
    """Tensors of heads in one form, by the names of their layout.

    Args:
        state: as in the description of this file.
        token_map: int64 [T], the token of each row of the LM heads; None where row v is of token v.
        vocab_size: V with a token map, else None.
        notes: warnings for the user.
    """

    state: State
    token_map: Tensor | None
    vocab_size: int | None
    notes: tuple[str, ...]


def plain_heads(found: HeadTensors, config: Mapping[str, Any]) -> PlainHeads:
    """The tensors of heads, with what their layout leaves out."""
    layout, name = found.layout, str(found.file)
    state, notes = _scaled(found.state, config, name)
    if layout.name != "vllm":
        return PlainHeads(state, None, None, tuple(notes))
    token_map = state.pop(f"{layout.prefix}token_map", None)
    state = _with_biases(_with_lm_heads(state, layout, config, notes), layout, config, notes)
    vocab_size = config.get("vocab_size")
    if token_map is None:
        return PlainHeads(state, None, None, tuple(notes))
    if config.get("truncated_vocab_size", vocab_size) == vocab_size:
        notes.append("token_map is not used: truncated_vocab_size is vocab_size in config.json, or absent")
        return PlainHeads(state, None, None, tuple(notes))
    if type(vocab_size) is not int:
        raise invalid(name, "has a token_map, and its config.json has no vocab_size")
    _check_token_map(token_map, vocab_size, name)
    for key, tensor in state.items():
        if layout.lm_head_pattern.fullmatch(key) and tensor.ndim == 2:
            # vLLM takes the rows of the map where the checkpoint has those of all tokens.
            state[key] = tensor[token_map.long()] if len(tensor) == vocab_size else tensor
            if len(state[key]) != len(token_map):
                raise invalid(name, f"has {len(tensor)} rows in {key} and {len(token_map)} tokens in its token_map")
    return PlainHeads(state, token_map.long(), vocab_size, tuple(notes))


def _check_token_map(token_map: Tensor, vocab_size: int, name: str) -> None:
    whole = not token_map.is_floating_point() and token_map.dtype != torch.bool and not token_map.is_complex()
    if not whole or token_map.ndim != 1 or not len(token_map):
        raise invalid(name, f"has a token_map of {token_map.dtype} {list(token_map.shape)}, not of token ids")
    ids = token_map.long()  # torch has no minimum of some unsigned types; those beyond int64 become negative
    if ids.min() < 0 or ids.max() >= vocab_size or len(set(ids.tolist())) < len(ids):
        raise invalid(name, f"has a token_map that is not of distinct token ids below {vocab_size}")


def _with_lm_heads(state: State, layout: HeadsLayout, config: Mapping[str, Any], notes: list[str]) -> State:
    """The state with an LM head for each head, where it has one for all; a note where vLLM keeps one of several."""
    shared, first = f"{layout.prefix}lm_head.weight", layout.lm_head.format(h=0)
    present = [key for key in state if layout.lm_head_pattern.fullmatch(key)]
    if len(present) > 1 and config.get("original_lm_head") is True:
        notes.append(f"vLLM keeps one of these {len(present)} LM heads: original_lm_head is true in config.json")
    if shared in state and not present:
        source = shared
    elif present == [first] and config.get("original_lm_head") is True:
        source = first
    else:
        return state
    numbers = [int(match[1]) for match in map(layout.block_pattern.fullmatch, state) if match]
    if max(numbers, default=0) > len(state):  # refused later; the time of this grows with it
        return state
    rest = {key: tensor for key, tensor in state.items() if key != source}
    return rest | {layout.lm_head.format(h=h): state[source] for h in range(1 + max(numbers, default=0))}


def _with_biases(state: State, layout: HeadsLayout, config: Mapping[str, Any], notes: list[str]) -> State:
    """The state with biases of 0, where it has none; a note where vLLM drops those that it has."""
    found = [match for match in map(layout.block_pattern.fullmatch, state) if match]
    if any(match[3] == "bias" for match in found):
        if config.get("medusa_fc_bias") is not True:
            notes.append("vLLM drops the biases of these heads: medusa_fc_bias is not true in config.json")
        return state
    biases = {
        layout.block.format(h=match[1], l=match[2], part="bias"): state[match[0]].new_zeros(state[match[0]].shape[:1])
        for match in found
    }
    return state | biases


def _scaled(state: State, config: Mapping[str, Any], name: str) -> tuple[State, list[str]]:
    """The state with 8-bit weights multiplied by their scales, in the type of the other tensors."""
    quantised = {key for key, tensor in state.items() if tensor.dtype in _EIGHT_BITS}
    scales = {key for key in state if key.endswith(_SCALE)}
    if not quantised and not scales:
        return dict(state), []
    unused = sorted(key for key in scales if key.removesuffix(_SCALE) not in quantised and "input" not in key)
    lacking = sorted(key for key in quantised if key + _SCALE not in state)
    if unused or lacking:
        raise invalid(name, f"has weights that are not FP8 with a weight_scale: {listed(unused + lacking)}")
    plain = [tensor.dtype for key, tensor in state.items() if key not in quantised | scales]
    dtype = plain[0] if plain else _named_dtype(config)
    result = {key: tensor for key, tensor in state.items() if key not in scales}
    for key in quantised:
        scale = state[key + _SCALE].float()
        if scale.numel() not in (1, len(state[key])):
            raise invalid(name, f"has a {key + _SCALE} of {list(scale.shape)}, neither one value nor one for each row")
        result[key] = (state[key].float() * scale.reshape(-1, 1)).to(dtype)
    return result, [f"FP8 weights are multiplied by their scales, in {str(dtype).removeprefix('torch.')}"]


def _named_dtype(config: Mapping[str, Any]) -> torch.dtype:
    """The floating-point type in a config; bfloat16 where there is none."""
    names = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
    return names.get(str(config.get("dtype") or config.get("torch_dtype")), torch.bfloat16)


JOINT_METHOD = "Medusa-2"  # in the config of heads that were trained with an adapter of their base
# File names of weights and tokenizers of base models in transformers.
_BASE_FILE = re.compile(
    r"(pytorch_)?model.*\.(safetensors|bin)(\.index\.json)?|tokenizer.*|vocab\..*|merges\.txt|spiece\.model"
)
_SHOWN_CHARACTERS = 6  # characters of a wrong number


@dataclass(frozen=True)
class LoadedHeads:
    """Heads with the data of their checkpoint.

    Args:
        heads: the heads.
        name: folder, file or hub name, as given by the user.
        file: of the weights.
        base: name or folder of the base model in the checkpoint's config; None where it has none.
        fingerprint: of the weights.
        notes: warnings for the user, such as a config that disagrees with the weights.
        joint_base: fingerprint of the base without its adapter, of heads trained with an adapter; None for others.
        layout: title of the layout of the checkpoint; empty where heads were made in Python.
    """

    heads: MedusaHeads
    name: str
    file: Path
    base: str | None
    fingerprint: str
    notes: tuple[str, ...]
    joint_base: str | None = None
    layout: str = ""


def load_heads(path: str | os.PathLike[str]) -> LoadedHeads:
    """Heads from a folder, a weights file, or a hub repository, in any layout of `head_layouts.py`.

    Raises:
        TreeoptError: E201 where nothing is found, E203 where a file is damaged or names files outside its folder, E210
            where a .pt is not plain tensors, E211 where names or shapes are of no known layout, E301 where a hub
            repository cannot be reached, E504 where values are not finite.
    """
    found = read_head_tensors(find_head_files(str(path)))
    file = found.file
    config = read_config(file.parent / CONFIG_FILE)
    plain = plain_heads(found, config)
    heads = from_state(plain.state, str(file), found.layout, token_map=plain.token_map, vocab_size=plain.vocab_size)
    notes = list(plain.notes)
    claimed = _claimed_heads(config)
    if claimed is not None and claimed != heads.num_heads:
        shown = str(claimed)[:_SHOWN_CHARACTERS]
        notes.append(f"config.json has {shown} heads, the weights have {heads.num_heads}, which is used")
    base = POCKET if built_in(str(path)) else _base_of(found, config, str(path))
    known = fingerprint(heads), tuple(notes), _joint_base(config), _title(found, heads)
    return LoadedHeads(heads.eval(), str(path), file, base, *known)


def _joint_base(config: dict[str, Any]) -> str | None:
    """The base's fingerprint in the config of heads of Medusa-2; None for others."""
    made_by = config.get("treeopt")
    if not isinstance(made_by, dict) or made_by.get("method") != JOINT_METHOD:
        return None
    return str(made_by.get("base"))


def from_state(
    state: State,
    name: str,
    layout: HeadsLayout = MEDUSA,
    *,
    token_map: Tensor | None = None,
    vocab_size: int | None = None,
) -> MedusaHeads:
    """Heads from tensors in a layout, all blocks with biases."""
    blocks_of = [match for match in map(layout.block_pattern.fullmatch, state) if match]
    heads_of = [match for match in map(layout.lm_head_pattern.fullmatch, state) if match]
    unknown = [key for key in state if not layout.fits(key)]
    if unknown or not state:
        raise invalid(name, f"has keys of another layout: {listed(unknown) or 'no tensors'}")
    num_heads = 1 + max((int(match[1]) for match in (*blocks_of, *heads_of)), default=0)
    blocks = max((1 + int(match[2]) for match in blocks_of), default=0)
    if max(num_heads, blocks) > len(state):  # checked first: the time of the rest grows with these numbers
        raise invalid(name, f"has a key of head {num_heads - 1} but {len(state)} tensors")
    weights, biases, lm_heads = keys = expected_keys(num_heads, blocks, bool(heads_of), layout)
    _check_keys(state, keys, name)
    _check_values(state, name)
    _check_shapes(state, weights, biases, lm_heads, name)
    hidden = state[lm_heads[0]].shape[1] if lm_heads else state[weights[0][0]].shape[0]
    dtype = next(iter(state.values())).dtype
    empty = torch.zeros(0, num_heads, hidden, hidden, dtype=dtype), torch.zeros(0, num_heads, hidden, dtype=dtype)
    return MedusaHeads.from_tensors(
        _stack(state, weights) if blocks else empty[0],
        _stack(state, biases) if blocks else empty[1],
        torch.stack([state[key] for key in lm_heads]) if lm_heads else None,
        token_map,
        vocab_size,
    )


def state_of(heads: MedusaHeads, layout: HeadsLayout = MEDUSA) -> State:
    """The tensors of heads by their names in a layout, without a token map: copies in the memory of the CPU."""
    blocks, num_heads = heads.bias.shape[:2]
    weights, biases, lm_heads = expected_keys(num_heads, blocks, heads.lm_head is not None, layout)
    state = {}
    for block, (names, bias_names) in enumerate(zip(weights, biases, strict=True)):
        for h in range(num_heads):
            state[names[h]], state[bias_names[h]] = heads.weight[block, h], heads.bias[block, h]
    if heads.lm_head is not None:
        state |= dict(zip(lm_heads, heads.lm_head, strict=True))
    # Views would be written with all of the memory that they share.
    return {key: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for key, tensor in state.items()}


def save_heads(
    heads: MedusaHeads,
    folder: str | os.PathLike[str],
    *,
    base: str,
    made_by: dict[str, Any] | None = None,
    also: Mapping[Path, bytes] | None = None,
    overwrite: bool = False,
) -> Path:
    """Write heads in the original layout: `medusa_lm_head.safetensors` and `config.json`.

    Args:
        heads: written in their dtype; heads that share the base's LM head are written without one.
        folder: created where it does not exist.
        base: folder or hub name of the base model; a folder is written relative to `folder`.
        made_by: settings and versions, written to config.json under `treeopt`, which other readers ignore.
        also: contents of further files, such as those of an adapter; all are written, or none.
        overwrite: replace existing heads.

    Returns:
        The file of the weights.

    Raises:
        TreeoptError: E202 where the folder has heads, E204 where it cannot be written.
    """
    file = check_heads_writable(make_folder(folder), overwrite=overwrite)
    place, state = file.parent, state_of(heads)
    local = Path(base).expanduser()
    config: dict[str, Any] = {
        "base_model_name_or_path": os.path.relpath(local, place) if local.is_dir() else base,
        **medusa_numbers(heads),
    }
    config |= {"treeopt": origin} if (origin := with_stored(made_by or {})) else {}
    weights: bytes = safetensors.torch.save(state, metadata={"format": "pt"})
    described = (json.dumps(config, indent=1) + "\n").encode()
    write_files({**(also or {}), place / CONFIG_FILE: described, file: weights})  # weights end a run: they come last
    return file


def check_heads_writable(
    folder: str | os.PathLike[str],
    *,
    overwrite: bool,
    names: tuple[str, ...] = WEIGHT_FILES,
    mark: str = "medusa_num_heads",
) -> Path:
    """The file of weights that will be written to a folder, by default by `save_heads`; called before long work."""
    place = check_folder(folder)
    file = place / names[0]
    if not place.exists():
        return file
    found = _of_a_base(place, names, mark)
    if found is not None:
        what = f"{place} has a base model, or another file that heads would replace: {found}"
        why = "heads and base model both have a config.json, so they need different folders"
        raise TreeoptError(
            Code.FILE_UNWRITABLE, what, at=str(place / found), why=why, fix="another folder for the heads"
        )
    for name in names:
        if (place / name).exists():
            check_writable(place / name, overwrite=overwrite)
    check_writable(place / CONFIG_FILE, overwrite=True)
    return check_writable(file, overwrite=overwrite)


def _of_a_base(folder: Path, names: tuple[str, ...], mark: str) -> str | None:
    """The name of a file of a base model, or of a config that is not of heads; None where there is none."""
    files = sorted(path.name for path in folder.iterdir() if path.name not in names)
    found = next((name for name in files if _BASE_FILE.fullmatch(name)), None)
    if found is not None or not (folder / CONFIG_FILE).is_file():
        return found
    try:
        config = read_config(folder / CONFIG_FILE)
    except TreeoptError:
        return CONFIG_FILE
    return None if mark in config else CONFIG_FILE


def medusa_numbers(heads: MedusaHeads) -> dict[str, Any]:
    """The entries of a config of the original layout that describe the heads."""
    numbers: dict[str, Any] = {"medusa_num_heads": heads.num_heads, "medusa_num_layers": heads.bias.shape[0]}
    # The name of heads without LM heads in other readers of the layout.
    return numbers | ({"version": "2"} if heads.lm_head is None else {})


def _check_keys(state: State, keys: tuple[list[list[str]], list[list[str]], list[str]], name: str) -> None:
    weights, biases, lm_heads = keys
    expected = {key for row in (*weights, *biases) for key in row} | set(lm_heads)
    missing, extra = expected - set(state), set(state) - expected
    parts = [f"{word} {listed(found)}" for word, found in (("lacks", missing), ("has also", extra)) if found]
    if parts:
        num_heads = len(lm_heads) or len(weights[0])
        raise invalid(name, f"has {num_heads} heads of {len(weights)} blocks but {' and '.join(parts)}")


def _check_values(state: State, name: str) -> None:
    kinds = {str(tensor.dtype) for tensor in state.values()}
    if len(kinds) > 1 or not next(iter(state.values())).is_floating_point():
        raise invalid(name, f"has tensors of {', '.join(sorted(kinds))}, not of one floating-point type")
    broken = next((key for key, tensor in state.items() if not torch.isfinite(tensor).all()), None)
    if broken is not None:
        what = f"the heads {name} have values in {broken} that are not finite"
        raise TreeoptError(Code.NOT_FINITE, what, why="their weights are damaged", fix="another copy of the heads")


def _check_shapes(
    state: State, weights: list[list[str]], biases: list[list[str]], lm_heads: list[str], name: str
) -> None:
    for keys in ([key for row in weights for key in row], [key for row in biases for key in row], lm_heads):
        shapes = {tuple(state[key].shape) for key in keys}
        if len(shapes) > 1:
            raise invalid(name, f"has {keys[0].split('.', 2)[-1]} tensors of different shapes: {sorted(shapes)}")
    first = state[weights[0][0] if weights else lm_heads[0]].shape
    hidden = first[-1] if first else 0
    faults = [
        f"{key} has shape {list(state[key].shape)}, not {list(shape)}"
        for row, shape in ((weights[:1], (hidden, hidden)), (biases[:1], (hidden,)))
        for key in [key for part in row for key in part]
        if tuple(state[key].shape) != shape
    ]
    if lm_heads and (state[lm_heads[0]].ndim != 2 or state[lm_heads[0]].shape[1] != hidden):
        faults.append(f"{lm_heads[0]} has shape {list(state[lm_heads[0]].shape)}, not [V, {hidden}]")
    if faults:
        raise invalid(name, faults[0])


def _stack(state: State, keys: list[list[str]]) -> Tensor:
    return torch.stack([torch.stack([state[key] for key in row]) for row in keys])


def _claimed_heads(config: Mapping[str, Any]) -> Any:
    """The number of heads in a config, by its name in any layout; None where there is none."""
    nested = config.get("medusa")  # of ModelOpt
    inner = nested.get("num_medusa_heads") if isinstance(nested, dict) else None
    return next((found for found in (config.get("medusa_num_heads"), inner, config.get("num_heads")) if found), None)


def _title(found: HeadTensors, heads: MedusaHeads) -> str:
    """The layout as users know it."""
    if found.layout is not MEDUSA:
        return found.layout.title
    return "Medusa v2, with the base's LM head" if heads.lm_head is None else "Medusa v1, with LM heads"


def _base_of(found: HeadTensors, config: Mapping[str, Any], name: str) -> str | None:
    """The base model of heads: their own checkpoint where it has one, else that in their config.

    A folder in the config is relative to that of the heads, which has precedence over other names.
    """
    folder = found.file.parent
    beside = found.file.name == NXDI_FILE and config.get("model_type") is not None
    if found.with_base or beside:
        return str(folder) if os.path.exists(os.path.expanduser(name)) else name
    base = config.get("base_model_name_or_path")
    if base is not None and not isinstance(base, str):
        what = f"{folder / 'config.json'} has a base_model_name_or_path of type {type(base).__name__}, not a name"
        raise TreeoptError(Code.FILE_INVALID, what, fix="set it to the name of the base model, or remove it")
    relative = os.path.join(folder, base or "")
    return os.path.normpath(relative) if base and os.path.isdir(relative) else base or None
