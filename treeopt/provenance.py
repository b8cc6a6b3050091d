"""The provenance record: how a calibration was measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_VERSIONS = "made-by"  # the entry of a configuration that may differ among parts of one run


@dataclass(frozen=True)
class Provenance:
    """How a calibration was measured, so that it can be repeated.

    `model_id` and `heads_id` are fingerprints of the weights, `drafter_id` is that of the drafter (empty for the
    `heads` drafter). Calibrations with equal ids and `settings` can be merged. `drafter` is the drafter's file,
    `prompts` has the name of each prompt file by its SHA-256, `made_by` the versions and the device.
    `configuration` are the options of the command, see `treeopt.files.configurations`; empty where none wrote it, and
    where calibrations of different options or prompts were merged.
    """

    model: str
    model_id: str
    heads: str
    heads_id: str
    settings: Mapping[str, Any]
    prompts: Mapping[str, str] = field(default_factory=dict)  # SHA-256 of the file, its name
    made_by: Mapping[str, Any] = field(default_factory=dict)
    drafter_id: str = ""
    drafter: str = ""
    configuration: Mapping[str, Any] = field(default_factory=dict)

    def mergeable(self) -> dict[str, Any]:
        """The entries that two calibrations must have in common."""
        ids = {"model_id": self.model_id, "heads_id": self.heads_id, "drafter_id": self.drafter_id}
        return {**ids, "settings": dict(self.settings)}


def merged(one: Provenance, other: Provenance) -> Provenance:
    """The provenance of a merged calibration; differing values are sorted, so the order of merging is irrelevant."""
    made_by = {
        key: _both(one.made_by.get(key), other.made_by.get(key)) for key in sorted({*one.made_by, *other.made_by})
    }
    names = sorted({*one.prompts.items(), *other.prompts.items()})
    return Provenance(
        model=min(one.model, other.model),
        model_id=one.model_id,
        heads=min(one.heads, other.heads),
        heads_id=one.heads_id,
        settings=one.settings,
        prompts=dict(sorted(dict(reversed(names)).items())),  # one name for each file, the first in order
        made_by=made_by,
        drafter_id=one.drafter_id,
        drafter=min(one.drafter, other.drafter),
        configuration=_common_configuration(one, other),
    )


def _common_configuration(one: Provenance, other: Provenance) -> dict[str, Any]:
    """The options of both, with the versions of both; none where no one command makes the merged calibration again."""
    parts = [dict(each.configuration) for each in (one, other)]
    first, second = (each.pop(_VERSIONS, {}) for each in parts)
    if parts[0] != parts[1] or set(one.prompts) != set(other.prompts):
        return {}
    versions = {key: _both(first.get(key), second.get(key)) for key in sorted({*first, *second})}
    return parts[0] | ({_VERSIONS: versions} if versions else {})


def _both(one: Any, other: Any) -> Any:
    parts = {str(part) for value in (one, other) if value is not None for part in str(value).split(" | ")}
    return one if one == other else " | ".join(sorted(parts))
