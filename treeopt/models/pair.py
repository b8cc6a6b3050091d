"""Loading heads together with their base model, which their config names."""

from __future__ import annotations

from treeopt.errors import Code, TreeoptError
from treeopt.models.base import Base, check_heads_fit, load_base
from treeopt.models.layouts import LoadedHeads, load_heads


def load_pair(heads: str, model: str | None, *, dtype: str = "auto", device: str = "auto") -> tuple[Base, LoadedHeads]:
    """Load heads and their base model, on one device and in one dtype.

    Args:
        heads: folder, weights file or hub name of the heads.
        model: folder or hub name of the base; None is the one in the heads' config.
        dtype: as `load_base`.
        device: as `load_base`.

    Raises:
        TreeoptError: as `load_heads` and `load_base`; E211 where the base model is unknown, E212 where they do not fit.
    """
    loaded = load_heads(heads)
    name = model or loaded.base
    if name is None:
        what = f"{heads} has no config.json with the name of its base model"
        raise TreeoptError(Code.HEADS_INVALID, what, fix="name the base model with --model")
    base = load_base(name, dtype=dtype, device=device)
    check_heads_fit(base, loaded.heads, loaded.name)
    loaded.heads.to(base.device, base.dtype)
    return base, loaded
