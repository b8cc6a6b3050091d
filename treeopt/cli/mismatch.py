"""Warnings for trees, profiles and drafters made with another base model or other heads, and for edited trees."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treeopt.cli.console import Console
from treeopt.files.outputs import is_edited

if TYPE_CHECKING:
    from treeopt.calibration import Calibration
    from treeopt.drafter import Drafter
    from treeopt.latency import LatencyProfile
    from treeopt.models.base import Base
    from treeopt.models.head_files import LoadedHeads
    from treeopt.policy import Plan

_FLOAT32 = "float32"  # the dtype of older files, which do not state it


def warn_edited(console: Console, *names: str | None) -> None:
    """Warn of each tree file that was edited by hand: its figures are not those that treeopt wrote."""
    for name in names:
        if name is not None and is_edited(Path(name)):
            console.warn(f"warning: {name} was edited by hand, so its figures may not be those of its calibration")


def warn_other_heads(console: Console, calibration: Calibration, profile: LatencyProfile | None) -> None:
    """Warn where a profile was measured with another base or other heads than a calibration, or was not measured."""
    if profile is None:
        return
    source = calibration.provenance
    made = profile.provenance
    if made.get("modelled"):
        console.warn(
            f"warning: the seconds are modelled ({made.get('model')} on {made.get('device')}), not measured; "
            f"the traces are of {source.model}"
        )
    dtype = source.settings.get("dtype", _FLOAT32)
    _warn_made_for_other(console, "the profile", profile.provenance, source.model_id, dtype, source.heads_id)


def warn_other_traces(console: Console, name: str, tree: Plan, calibration: Calibration) -> None:
    """Warn where a tree was built for another base or other heads than those of a calibration."""
    traced = calibration.provenance
    dtype = traced.settings.get("dtype", _FLOAT32)
    source = tree.source.get("calibration") or {}
    _warn_made_for_other(console, name, source, traced.model_id, dtype, traced.heads_id)


def warn_other_tree(console: Console, name: str, tree: Plan, base: Base, loaded: LoadedHeads | None) -> None:
    """Warn where a tree was built for another base or other heads than these."""
    source = tree.source.get("calibration") or {}
    _warn_made_for_other(console, name, source, base.fingerprint, base.dtype_name, _id_of(loaded))


def warn_other_drafter(
    console: Console, drafter: Drafter | None, base: Base, loaded: LoadedHeads | None, draft: Base | None = None
) -> None:
    """Warn where a drafter was learned with another base, other heads or another draft model than these."""
    if drafter is None:
        return
    source = drafter.source
    _warn_made_for_other(console, "the drafter", source, base.fingerprint, base.dtype_name, _id_of(loaded))
    same_dtype = draft is not None and source.get("dtype", _FLOAT32) == draft.dtype_name
    if draft is not None and same_dtype and drafter.draft != draft.fingerprint:
        console.warn(
            f"warning: the drafter was made for another draft model ({drafter.draft}, this is {draft.fingerprint})"
        )


def warn_other_dtype(console: Console, drafter: Drafter | None, base: Base) -> None:
    """Warn where the recommended tree of a drafter was chosen by steps in another dtype than the base's."""
    timed = "" if drafter is None else drafter.timed_dtype
    if timed not in ("", base.dtype_name):
        console.warn(
            f"warning: the drafter's tree is the fastest in {timed}; the model is in {base.dtype_name}, where another "
            f"size may be faster, or none (--dtype {timed}, or treeopt learn --dtype {base.dtype_name})"
        )
    elif drafter is not None and drafter.timed_compiled and not base.compile:
        console.note("the drafter's tree was timed with --compile, and is the fastest with it")


def _id_of(loaded: LoadedHeads | None) -> str:
    """The id of heads; empty where there are none."""
    return "" if loaded is None else loaded.fingerprint


def _warn_made_for_other(
    console: Console, name: str, source: Mapping[str, Any], model_id: str, dtype: str, heads_id: str
) -> None:
    """Warn where the ids in `source` are not those of the base and the heads.

    The id of a base is computed from its weights in the dtype they are loaded in, so only ids of the same dtype are
    compared. The id of heads is computed from their file.
    """
    others = []
    if source.get("dtype", _FLOAT32) == dtype and source.get("model_id") not in (None, "", model_id):
        others.append(f"another base model ({source['model_id']}, this is {model_id})")
    made_for = source.get("heads_id", heads_id)  # empty: without heads
    if made_for != heads_id:
        here = f"these are {heads_id}" if heads_id else "there are none here"
        others.append(f"other heads ({made_for}, {here})" if made_for else f"no heads ({here})")
    if others:
        console.warn(f"warning: {name} was made for {' and '.join(others)}")
