"""Heads checkpoints in the original Medusa layout.

    {h}.{l}.linear.weight [d, d], {h}.{l}.linear.bias [d]   block l of head h, both from 0
    {h}.{L}.weight [V, d]                                   the head's LM head; absent where the base's is shared

in `medusa_lm_head.safetensors` or `medusa_lm_head.pt`, with a `config.json` that names the base model. The number of
heads is taken from the keys: published configs are wrong about it.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from treeopt.errors import Code, TreeoptError
from treeopt.files.atomic import check_folder, check_writable, make_folder, read_bytes, write_bytes
from treeopt.files.bundled import POCKET
from treeopt.models.checkpoint import check_shards, read_config, refused_name
from treeopt.models.fingerprint import fingerprint
from treeopt.models.heads import MedusaHeads
from treeopt.models.hub import built_in, find_heads

WEIGHT_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
CONFIG_FILE = "config.json"
JOINT_METHOD = "Medusa-2"  # in the config of heads that were trained with an adapter of their base
_BLOCK = re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)")
_LM_HEAD = re.compile(r"(\d+)\.(\d+)\.weight")
# File names of weights and tokenizers of base models in transformers.
_BASE_FILE = re.compile(
    r"(pytorch_)?model.*\.(safetensors|bin)(\.index\.json)?|tokenizer.*|vocab\..*|merges\.txt|spiece\.model"
)
_SHOWN = 6  # keys shown in an error

State = dict[str, Tensor]


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
    """

    heads: MedusaHeads
    name: str
    file: Path
    base: str | None
    fingerprint: str
    notes: tuple[str, ...]
    joint_base: str | None = None


def load_heads(path: str | os.PathLike[str]) -> LoadedHeads:
    """Heads from a folder, a weights file, or a hub repository.

    Raises:
        TreeoptError: E201 where nothing is found, E203 where a file is damaged or names files outside its folder, E210
            where a .pt is not plain tensors, E211 where keys or shapes are not those of the Medusa layout, E301 where
            a hub repository cannot be reached.
    """
    file = _weights_file(find_heads(str(path), WEIGHT_FILES))
    check_shards(file.parent)
    heads = from_state(_read_state(file), str(file)).eval()
    config = read_config(file.parent / CONFIG_FILE)
    notes = []
    claimed = config.get("medusa_num_heads")
    if claimed is not None and claimed != heads.num_heads:
        shown = str(claimed)[:_SHOWN]
        notes.append(f"config.json has {shown} heads, the weights have {heads.num_heads}, which is used")
    base = POCKET if built_in(str(path)) else _base_of(config, file.parent)
    return LoadedHeads(heads, str(path), file, base, fingerprint(heads), tuple(notes), _joint_base(config))


def _joint_base(config: dict[str, Any]) -> str | None:
    """The base's fingerprint in the config of heads of Medusa-2; None for others."""
    made_by = config.get("treeopt")
    if not isinstance(made_by, dict) or made_by.get("method") != JOINT_METHOD:
        return None
    return str(made_by.get("base"))


def from_state(state: State, name: str) -> MedusaHeads:
    """Heads from tensors in the original layout.

    Raises:
        TreeoptError: E211 naming the keys or shapes that do not fit.
    """
    unknown = [key for key in state if not _BLOCK.fullmatch(key) and not _LM_HEAD.fullmatch(key)]
    if unknown or not state:
        found = ", ".join(sorted(unknown)[:_SHOWN]) or "no tensors"
        raise _invalid(name, f"has keys of another layout: {found}")
    num_heads = 1 + max(int(key.split(".")[0]) for key in state)
    blocks = max((1 + int(match[2]) for match in map(_BLOCK.fullmatch, state) if match), default=0)
    if max(num_heads, blocks) > len(state):  # checked first: the time of the rest grows with these numbers
        raise _invalid(name, f"has a key of head {num_heads - 1} but {len(state)} tensors")
    has_lm_head = any(_LM_HEAD.fullmatch(key) for key in state)
    weights, biases, lm_heads = expected_keys(num_heads, blocks, has_lm_head)
    expected = {key for row in (*weights, *biases) for key in row} | set(lm_heads)
    if expected != set(state):
        missing, extra = sorted(expected - set(state)), sorted(set(state) - expected)
        parts = [
            f"{word} {', '.join(keys[:_SHOWN])}" for word, keys in (("lacks", missing), ("has also", extra)) if keys
        ]
        raise _invalid(name, f"has {num_heads} heads of {blocks} blocks but {' and '.join(parts)}")
    broken = next((key for key, tensor in state.items() if not torch.isfinite(tensor).all()), None)
    if broken is not None:
        raise _invalid(name, f"has values in {broken} that are not finite")
    kinds = {str(tensor.dtype) for tensor in state.values()}
    if len(kinds) > 1 or not next(iter(state.values())).is_floating_point():
        raise _invalid(name, f"has tensors of {', '.join(sorted(kinds))}, not of one floating-point type")
    _check_shapes(state, weights, biases, lm_heads, name)
    hidden = state[lm_heads[0]].shape[1] if has_lm_head else state[weights[0][0]].shape[0]
    dtype = next(iter(state.values())).dtype
    empty = torch.zeros(0, num_heads, hidden, hidden, dtype=dtype), torch.zeros(0, num_heads, hidden, dtype=dtype)
    return MedusaHeads.from_tensors(
        _stack(state, weights) if blocks else empty[0],
        _stack(state, biases) if blocks else empty[1],
        torch.stack([state[key] for key in lm_heads]) if has_lm_head else None,
    )


def save_heads(
    heads: MedusaHeads,
    folder: str | os.PathLike[str],
    *,
    base: str,
    made_by: dict[str, Any] | None = None,
    overwrite: bool = False,
) -> Path:
    """Write heads in the original layout: `medusa_lm_head.safetensors` and `config.json`.

    Args:
        heads: written in their dtype; heads that share the base's LM head are written without one.
        folder: created where it does not exist.
        base: folder or hub name of the base model; a folder is written relative to `folder`.
        made_by: settings and versions, written to config.json under `treeopt`, which other readers ignore.
        overwrite: replace existing heads.

    Returns:
        The file of the weights.

    Raises:
        TreeoptError: E202 where the folder has heads, E204 where it cannot be written.
    """
    file = check_heads_writable(make_folder(folder), overwrite=overwrite)
    place = file.parent
    blocks, num_heads = heads.bias.shape[:2]
    weights, biases, lm_heads = expected_keys(num_heads, blocks, heads.lm_head is not None)
    state = {}
    for layer, (names, bias_names) in enumerate(zip(weights, biases, strict=True)):
        for h in range(num_heads):
            state[names[h]], state[bias_names[h]] = heads.weight[layer, h], heads.bias[layer, h]
    if heads.lm_head is not None:
        state |= dict(zip(lm_heads, heads.lm_head, strict=True))
    state = {key: tensor.detach().cpu().contiguous() for key, tensor in state.items()}
    local = Path(base).expanduser()
    config: dict[str, Any] = {
        "base_model_name_or_path": os.path.relpath(local, place) if local.is_dir() else base,
        "medusa_num_heads": num_heads,
        "medusa_num_layers": blocks,
    }
    if heads.lm_head is None:
        config["version"] = "2"  # the name of heads without LM heads in other readers of the layout
    if made_by:
        config["treeopt"] = made_by
    write_bytes(file, safetensors.torch.save(state, metadata={"format": "pt"}), overwrite=overwrite)
    write_bytes(place / CONFIG_FILE, (json.dumps(config, indent=1) + "\n").encode())
    return file


def check_heads_writable(folder: str | os.PathLike[str], *, overwrite: bool) -> Path:
    """The file that `save_heads` will write; called before long work.

    Raises:
        TreeoptError: E204 where the folder has a base model, even with `overwrite`, or cannot be written; E202 where it
            has heads.
    """
    place = check_folder(folder)
    file = place / WEIGHT_FILES[0]
    if not place.exists():
        return file
    found = _of_a_base(place)
    if found is not None:
        what = f"{place} has a base model, or another file that heads would replace: {found}"
        why = "heads and base model both have a config.json, so they need different folders"
        raise TreeoptError(
            Code.FILE_UNWRITABLE, what, at=str(place / found), why=why, fix="another folder for the heads"
        )
    for name in WEIGHT_FILES:
        if (place / name).exists():
            check_writable(place / name, overwrite=overwrite)
    check_writable(place / CONFIG_FILE, overwrite=True)
    return check_writable(file, overwrite=overwrite)


def _of_a_base(folder: Path) -> str | None:
    """The name of a file of a base model, or of a config that is not of heads; None where there is none."""
    files = sorted(path.name for path in folder.iterdir() if path.name not in WEIGHT_FILES)
    found = next((name for name in files if _BASE_FILE.fullmatch(name)), None)
    if found is not None or not (folder / CONFIG_FILE).is_file():
        return found
    try:
        config = read_config(folder / CONFIG_FILE)
    except TreeoptError:
        return CONFIG_FILE
    return None if "medusa_num_heads" in config else CONFIG_FILE


def expected_keys(num_heads: int, blocks: int, has_lm_head: bool) -> tuple[list[list[str]], list[list[str]], list[str]]:
    """The layout's keys: block weights [blocks][H], block biases [blocks][H], LM heads [H]."""
    heads = range(num_heads)
    weights = [[f"{h}.{layer}.linear.weight" for h in heads] for layer in range(blocks)]
    biases = [[f"{h}.{layer}.linear.bias" for h in heads] for layer in range(blocks)]
    return weights, biases, [f"{h}.{blocks}.weight" for h in heads] if has_lm_head else []


def _check_shapes(
    state: State, weights: list[list[str]], biases: list[list[str]], lm_heads: list[str], name: str
) -> None:
    for keys in ([key for row in weights for key in row], [key for row in biases for key in row], lm_heads):
        shapes = {tuple(state[key].shape) for key in keys}
        if len(shapes) > 1:
            raise _invalid(name, f"has {keys[0].split('.', 2)[-1]} tensors of different shapes: {sorted(shapes)}")
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
        raise _invalid(name, faults[0])


def _stack(state: State, keys: list[list[str]]) -> Tensor:
    return torch.stack([torch.stack([state[key] for key in row]) for row in keys])


def _weights_file(path: Path) -> Path:
    if path.is_file():
        return path
    for name in WEIGHT_FILES:
        if (path / name).is_file():
            return path / name
    raise TreeoptError(Code.FILE_MISSING, f"{path} has neither {' nor '.join(WEIGHT_FILES)}")


def _read_state(file: Path) -> State:
    if file.suffix == ".safetensors":
        try:
            return safetensors.torch.load(read_bytes(file))
        except SafetensorError as error:
            raise TreeoptError(Code.FILE_INVALID, f"{file} is damaged or not a safetensors file: {error}") from error
    try:
        loaded = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # the types that torch.load raises vary
        # The message of torch on a refused pickle proposes weights_only=False, which would run code of the file.
        refused = refused_name(error)
        if refused is not None:
            what = f"{file} was refused: it is not plain tensors ({refused})"
            fix = "use medusa_lm_head.safetensors"
            raise TreeoptError(Code.PICKLE_REFUSED, what, fix=fix) from error
        raise TreeoptError(Code.FILE_INVALID, f"{file} is damaged, or not a checkpoint of PyTorch") from error
    if not isinstance(loaded, dict) or not all(isinstance(value, Tensor) for value in loaded.values()):
        raise _invalid(str(file), "is not a dictionary of tensors")
    return {str(key): value for key, value in loaded.items()}


def _base_of(config: dict[str, Any], folder: Path) -> str | None:
    """The base model in the config of heads; a folder relative to that of the heads has precedence."""
    base = config.get("base_model_name_or_path")
    if base is not None and not isinstance(base, str):
        what = f"{folder / 'config.json'} has a base_model_name_or_path of type {type(base).__name__}, not a name"
        raise TreeoptError(Code.FILE_INVALID, what, fix="set it to the name of the base model, or remove it")
    relative = os.path.join(folder, base or "")
    return os.path.normpath(relative) if base and os.path.isdir(relative) else base or None


def _invalid(name: str, what: str) -> TreeoptError:
    return TreeoptError(Code.HEADS_INVALID, f"{name} {what}", fix="see the layout in treeopt/models/layouts.py")
