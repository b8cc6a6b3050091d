"""The shape of a model by name: a known name, a folder or a config.json, or a repository of the hub.

Known names need neither files nor torch; `treeopt.models.config_shapes` reads the others.
"""

from __future__ import annotations

import os

from treeopt.models.hub import built_in, find_base, here
from treeopt.models.named_shapes import NAMED, named_shape
from treeopt.shape import ModelShape

_CONFIG = "config.json"


def model_shape(name: str | os.PathLike[str]) -> ModelShape:
    """The shape of a model, without its weights.

    Args:
        name: a folder with a config.json or that file, a known name such as `llama-7b` (`treeopt plan --presets`), a
            built-in model, or a repository of the hub. An existing path has precedence.

    Raises:
        TreeoptError: E240 for an unknown name, and models whose arithmetic is not that of a transformer; E201, E203,
            E301 where the config is missing, damaged or not reachable.
    """
    text = os.fspath(name)
    path = here(text)
    if path is None and built_in(text) is None and (text.lower() in NAMED or _no_path(text)):
        return named_shape(text)  # raises for an unknown name, with similar ones
    from treeopt.models.config_shapes import config_shape

    folder = path if path is not None else find_base(text)
    return config_shape(folder / _CONFIG if folder.is_dir() else folder, text)


def _no_path(name: str) -> bool:
    """Whether a name can be neither a path nor a repository `owner/name`."""
    return os.sep not in name and not name.endswith(".json")
