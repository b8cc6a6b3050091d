"""A base model with its heads, by what a user names: the heads' config knows its base."""

from __future__ import annotations

from treeopt.errors import Code, TreeoptError
from treeopt.models.base import Base, check_heads_fit, load_base
from treeopt.models.layouts import LoadedHeads, load_heads


def load_pair(heads: str, model: str | None, *, dtype: str = "auto", device: str = "auto") -> tuple[Base, LoadedHeads]:
    """Load heads and their base model, on one device and in one dtype.

    Args:
        heads: folder, weights file or hub name of the heads.
        model: folder or hub name of the base; the one that the heads' config names where None.
        dtype: as `load_base`.
        device: as `load_base`.

    Raises:
        TreeoptError: as `load_heads` and `load_base`; E211 where no base model is named, E212 where the two do not fit.
    """
    loaded = load_heads(heads)
    name = model or loaded.base
    if name is None:
        what = f"{heads} has no config.json that names its base model"
        raise TreeoptError(Code.HEADS_INVALID, what, fix="name the base model with --model")
    base = load_base(name, dtype=dtype, device=device)
    check_heads_fit(base, loaded.heads, loaded.name)
    loaded.heads.to(base.device, base.dtype)
    return base, loaded
