"""Heads checkpoints as records: reading all layouts of `head_layouts.py`, writing the original one.

The original layout is `medusa_lm_head.safetensors` or `medusa_lm_head.pt`, with a `config.json` that names the base
model. The number of heads is taken from the names of tensors: published configs are wrong about it.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from treeopt.errors import Code, TreeoptError
from treeopt.files.atomic import check_folder, check_writable, make_folder, write_files
from treeopt.files.bundled import POCKET
from treeopt.files.storing import with_stored
from treeopt.models.checkpoint import read_config
from treeopt.models.fingerprint import fingerprint
from treeopt.models.head_files import CONFIG_FILE as CONFIG_FILE
from treeopt.models.head_files import NXDI_FILE, HeadTensors, State, find_head_files, read_head_tensors
from treeopt.models.head_files import WEIGHT_FILES as WEIGHT_FILES
from treeopt.models.head_layouts import MEDUSA, Layout, invalid, listed
from treeopt.models.head_layouts import expected_keys as expected_keys
from treeopt.models.head_variants import plain_heads
from treeopt.models.heads import MedusaHeads
from treeopt.models.hub import built_in

JOINT_METHOD = "Medusa-2"  # in the config of heads that were trained with an adapter of their base
# File names of weights and tokenizers of base models in transformers.
_BASE_FILE = re.compile(
    r"(pytorch_)?model.*\.(safetensors|bin)(\.index\.json)?|tokenizer.*|vocab\..*|merges\.txt|spiece\.model"
)
_SHOWN = 6  # characters of a wrong number


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
        shown = str(claimed)[:_SHOWN]
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
    layout: Layout = MEDUSA,
    *,
    token_map: Tensor | None = None,
    vocab_size: int | None = None,
) -> MedusaHeads:
    """Heads from tensors in a layout, all blocks with biases.

    Raises:
        TreeoptError: E211 naming the keys or shapes that do not fit, E504 naming a key whose values are not finite.
    """
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


def state_of(heads: MedusaHeads, layout: Layout = MEDUSA) -> State:
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
    """The file of weights that will be written to a folder, by default by `save_heads`; called before long work.

    Args:
        folder: of the heads.
        overwrite: whether existing heads may be replaced.
        names: the files of weights that may be heads, the one that will be written first.
        mark: an entry that configs of such heads have, and those of base models do not.

    Raises:
        TreeoptError: E204 where the folder has a base model, even with `overwrite`, or cannot be written; E202 where it
            has heads.
    """
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
