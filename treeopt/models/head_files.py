"""Heads checkpoints: finding and reading their files in all layouts of `head_layouts.py`, writing the original one.

The original layout is `medusa_lm_head.safetensors` or `medusa_lm_head.pt`, with a `config.json` that names the base
model. The number of heads is taken from the names of tensors: published configs are wrong about it.
"""

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch

from treeopt.errors import Code, TreeoptError
from treeopt.files.atomic import check_folder, check_writable, make_folder, write_files
from treeopt.files.bundled import POCKET
from treeopt.files.configurations import with_stored
from treeopt.files.read import path_beside
from treeopt.models.head_layouts import MEDUSA, HeadsLayout, detect, heads_of, state_of
from treeopt.models.heads import MedusaHeads
from treeopt.models.hub import built_in, find_heads, here
from treeopt.models.tensors import fingerprint, invalid, read_config, shards_of, tensor_loaders

WEIGHT_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
NXDI_FILE = "medusa_heads.pt"  # in the folder of the base model
VLLM_FILE = "model.safetensors"
CONFIG_FILE = "config.json"
JOINT_METHOD = "Medusa-2"  # in the config of heads that were trained with an adapter of their base
_HEADS_ONLY = (*WEIGHT_FILES, NXDI_FILE)
_WITH_BASE = ("model.safetensors.index.json", VLLM_FILE, "pytorch_model.bin.index.json", "pytorch_model.bin")
# File names of weights and tokenizers of base models in transformers.
_BASE_FILE = re.compile(
    r"(pytorch_)?model.*\.(safetensors|bin)(\.index\.json)?|tokenizer.*|vocab\..*|merges\.txt|spiece\.model"
)


@dataclass(frozen=True)
class LoadedHeads:
    """Heads with the data of their checkpoint."""

    heads: MedusaHeads  # the heads
    name: str  # folder, file or hub name, as given by the user
    file: Path  # of the weights
    base: str | None  # name or folder of the base model in the checkpoint's config; None where it has none
    fingerprint: str  # of the weights
    notes: tuple[str, ...]  # warnings for the user, such as what vLLM does with these heads
    # fingerprint of the base without its adapter, of heads trained with an adapter; None for others
    joint_base: str | None = None
    layout: str = ""  # title of the layout of the checkpoint; empty where heads were made in Python


def load_heads(path: str | os.PathLike[str]) -> LoadedHeads:
    """Heads from a folder, a weights file or the hub, in any layout of `head_layouts.py`; `pocket` is built in.

    Raises:
        TreeoptError: E201 where nothing is found, E203 where a file is damaged or names files outside its folder, E210
            where a .pt is not plain tensors, E211 where names or shapes are of no known layout, E301 where a hub
            repository cannot be reached, E504 where values are not finite.

    Examples:
        >>> import treeopt
        >>> heads = treeopt.load_heads("pocket")
        >>> heads.heads.num_heads, heads.base
        (5, 'pocket')
    """
    name = str(path)
    file = _weights_file(_find(name))
    loaders = tensor_loaders(file, _names_of_heads)
    layout = detect(loaders, str(file))
    state = {key: load() for key, load in loaders.items() if key.startswith(layout.prefix)}
    config = read_config(file.parent / CONFIG_FILE)
    heads, notes = heads_of(state, layout, config, str(file))
    if built_in(name):
        base: str | None = POCKET
    elif len(state) < len(loaders) or (file.name == NXDI_FILE and config.get("model_type") is not None):
        base = str(file.parent) if os.path.exists(os.path.expanduser(name)) else name  # the checkpoint has its base
    else:
        base = _base_of(config, file.parent)
    made_by: Any = made if isinstance(made := config.get("treeopt"), dict) else {}
    joint_base = str(made_by.get("base")) if made_by.get("method") == JOINT_METHOD else None
    known = fingerprint(heads), tuple(notes), joint_base, _title(layout, heads)
    return LoadedHeads(heads.eval(), name, file, base, *known)


def _find(name: str) -> Path:
    """The folder or file of heads: a local path, the built-in heads, or a repository with the files that heads need."""
    first = (*_HEADS_ONLY, "*.index.json")
    path = find_heads(name, first)
    if here(name) is not None or not path.is_dir() or any((path / file).is_file() for file in _HEADS_ONLY):
        return path
    index = next((path / file for file in _WITH_BASE if file.endswith(".json") and (path / file).is_file()), None)
    found = (VLLM_FILE, "pytorch_model.bin") if index is None else sorted({*shards_of(index, _names_of_heads).values()})
    return find_heads(name, (*first, *found))


def _weights_file(path: Path) -> Path:
    if path.is_file():
        return path
    for name in (*_HEADS_ONLY, *_WITH_BASE):
        if (path / name).is_file():
            return path / name
    what = f"{path} has neither {' nor '.join(WEIGHT_FILES)}, {NXDI_FILE}, {VLLM_FILE} or pytorch_model.bin"
    raise TreeoptError(Code.FILE_MISSING, what)


def _names_of_heads(index: Path, names: Iterable[str]) -> list[str]:
    """The names of heads among those of an index of shards."""
    prefix = detect(names, str(index)).prefix
    return [name for name in names if name.startswith(prefix)]


def _title(layout: HeadsLayout, heads: MedusaHeads) -> str:
    if layout is not MEDUSA:
        return layout.title
    return "Medusa v2, with the base's LM head" if heads.lm_head is None else "Medusa v1, with LM heads"


def _base_of(config: Mapping[str, Any], folder: Path) -> str | None:
    """The base model in a config; a folder there is relative to that of the heads, and comes before other names."""
    base = config.get("base_model_name_or_path")
    if base is not None and not isinstance(base, str):
        what = f"{folder / CONFIG_FILE} has a base_model_name_or_path of type {type(base).__name__}, not a name"
        raise TreeoptError(Code.FILE_INVALID, what, fix="set it to the name of the base model, or remove it")
    return path_beside(folder, base) if base and os.path.isdir(os.path.join(folder, base)) else base or None


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
        TreeoptError: E202 where the folder has heads, E204 where it cannot be written, E211 for heads of some tokens.
    """
    if heads.token_map is not None:
        raise invalid("the heads", "draft a part of the tokens, which vLLM's layout alone can say (heads convert)")
    file = check_heads_writable(make_folder(folder), overwrite=overwrite)
    place, state = file.parent, state_of(heads)
    local = Path(os.path.expanduser(base))
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
        fix = "another folder for the heads"
        raise TreeoptError(Code.FILE_UNWRITABLE, what, at=str(place / found), why=why, fix=fix)
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
