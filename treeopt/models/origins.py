"""What a file was made with, beside what it is used with: the ids of both, and the texts of warnings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from treeopt.calibration import Calibration
from treeopt.drafter import Drafter
from treeopt.latency import LatencyProfile

if TYPE_CHECKING:
    from treeopt.models.base import Base
    from treeopt.models.head_files import LoadedHeads

_FLOAT32 = "float32"  # the dtype of older files, which do not state it


def models_ids(base: Base, heads: LoadedHeads | None, draft: Base | None = None) -> dict[str, str]:
    """What a result of these models is made with; the id of what is absent is empty."""
    return {
        "model": base.name,
        "model_id": base.fingerprint,
        "dtype": base.dtype_name,
        "heads_id": "" if heads is None else heads.fingerprint,
        "draft_id": "" if draft is None else draft.fingerprint,
    }


def traced_ids(calibration: Calibration) -> dict[str, str]:
    """The same of the models that were traced."""
    traced = calibration.provenance
    return {"model_id": traced.model_id, "dtype": traced.settings.get("dtype", _FLOAT32), "heads_id": traced.heads_id}


def made_for_others(name: str, source: Mapping[str, Any], here: Mapping[str, str]) -> Iterator[str]:
    """A warning where the ids in `source` are not those `here`: of the base, in one dtype alone, and of the heads."""
    others = []
    if source.get("dtype", _FLOAT32) == here["dtype"] and source.get("model_id") not in (None, "", here["model_id"]):
        others.append(f"another base model ({source['model_id']}, this is {here['model_id']})")
    heads_id = here["heads_id"]  # empty: without heads
    made_for = source.get("heads_id", heads_id)
    if made_for != heads_id:
        these = f"these are {heads_id}" if heads_id else "there are none here"
        others.append(f"other heads ({made_for}, {these})" if made_for else f"no heads ({these})")
    if others:
        yield f"warning: {name} was made for {' and '.join(others)}"


def drafter_for_others(drafter: Drafter | None, here: Mapping[str, str]) -> Iterator[str]:
    """A warning where a drafter was learned with another base or other heads, and with another draft model."""
    if drafter is None:
        return
    yield from made_for_others("the drafter", drafter.source, here)
    draft_id = here["draft_id"]
    if draft_id and drafter.source.get("dtype", _FLOAT32) == here["dtype"] and drafter.draft != draft_id:
        yield f"warning: the drafter was made for another draft model ({drafter.draft}, this is {draft_id})"


def timed_for_others(drafter: Drafter, base: Base) -> Iterator[str]:
    """A warning where the recommended tree of a drafter was chosen by steps that are not those of this model."""
    timed, dtype = drafter.timed_dtype, base.dtype_name
    if timed not in ("", dtype):
        yield (
            f"warning: the drafter's tree is the fastest in {timed}; the model is in {dtype}, where another "
            f"size may be faster, or none (--dtype {timed}, or treeopt learn --dtype {dtype})"
        )
    elif drafter.timed_compiled and not base.compile:
        yield "warning: the drafter's tree was timed with --compile, and is the fastest with it"


def profile_for_others(profile: LatencyProfile | None, calibration: Calibration) -> Iterator[str]:
    """Warnings where a profile was not measured, or was measured with other models than those that were traced."""
    if profile is None:
        return
    made = profile.provenance
    if made.get("modelled"):
        model = f"{made.get('model')} on {made.get('device')}"
        traced = calibration.provenance.model
        yield f"warning: the seconds are modelled ({model}), not measured; the traces are of {traced}"
    yield from made_for_others("the profile", made, traced_ids(calibration))
