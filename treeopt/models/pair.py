"""Loading heads together with their base model, which their config names."""

from __future__ import annotations

import dataclasses

from treeopt.errors import Code, TreeoptError
from treeopt.models.base import Base, load_base
from treeopt.models.fit import check_heads_fit
from treeopt.models.layouts import LoadedHeads, load_heads
from treeopt.models.placement import DeviceMap


def load_pair(
    heads: str,
    model: str | None,
    *,
    dtype: str = "auto",
    device: str = "auto",
    device_map: DeviceMap | None = None,
    adapter: str | None = None,
) -> tuple[Base, LoadedHeads]:
    """Load heads and their base model in one dtype, with the heads on the device of the base's inputs and outputs.

    Args:
        heads: folder, weights file or hub name of the heads.
        model: folder or hub name of the base; None is the one in the heads' config.
        dtype: as `load_base`.
        device: as `load_base`.
        device_map: as `load_base`.
        adapter: as `load_base`; None is the base alone, with a warning where the heads were trained with an adapter.

    Raises:
        TreeoptError: as `load_heads` and `load_base`; E211 where the base model is unknown, E212 where they do not fit,
            E214 where the adapter was trained with other heads.
    """
    loaded = load_heads(heads)
    name = model or loaded.base
    if name is None:
        what = f"{heads} has no config.json with the name of its base model"
        raise TreeoptError(Code.HEADS_INVALID, what, fix="name the base model with --model")
    base = load_base(name, dtype=dtype, device=device, device_map=device_map, adapter=adapter)
    check_heads_fit(base, loaded.heads, loaded.name)
    if base.adapter is not None and base.adapter.heads_id != loaded.fingerprint:
        what = f"the adapter {base.adapter.name} was trained with other heads than {loaded.name}"
        at = f"these heads are {loaded.fingerprint}, the adapter's are {base.adapter.heads_id}"
        fix = "--heads and --adapter of one run: the adapter is in the folder of its heads"
        raise TreeoptError(Code.ADAPTER_MISMATCH, what, at=at, fix=fix)
    if base.adapter is None and loaded.joint_base == base.fingerprint:
        note = f"warning: {loaded.name} was trained with an adapter of its base, which is not used (--adapter)"
        base = dataclasses.replace(base, notes=(*base.notes, note))
    loaded.heads.to(base.device, base.dtype)
    return base, loaded
