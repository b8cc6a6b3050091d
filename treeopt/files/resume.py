"""Errors of runs that cannot be resumed: other settings, or damaged files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from treeopt.errors import Code, TreeoptError


def other_settings(place: Path, begun: Mapping[str, Any], now: Mapping[str, Any]) -> TreeoptError:
    """E205, with the settings that differ."""
    what = f"{place} was started with other settings"
    at = "\n".join(differences(begun, now))
    return TreeoptError(
        Code.RESUME_INVALID, what, at=at, fix="give the same settings, or use --force instead of --resume"
    )


def damaged(place: Path, what: str, *, at: str = "", fix: str = "") -> TreeoptError:
    """E205 for a file that an interrupted run cannot have left in this state."""
    why = "files that this run did not write are neither continued nor deleted"
    fix = fix or f"restore {place.name}, or start again with --force, which deletes the unfinished run"
    return TreeoptError(Code.RESUME_INVALID, f"{place} {what}", at=at or str(place), why=why, fix=fix)


def damaged_part(fault: str) -> TreeoptError:
    """E205 for a stored chunk that is not what its run needs."""
    what = f"a part of the unfinished run is damaged: {fault}"
    return TreeoptError(Code.RESUME_INVALID, what, fix="start again with --force, which deletes the unfinished run")


def differences(begun: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """A line for each setting that differs."""
    for key in dict.fromkeys([*begun, *now]):
        one, other = begun.get(key), now.get(key)
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            yield from differences(one, other, f"{prefix}{key}.")
        elif one != other:
            yield f"{prefix}{key}: started with {json.dumps(one)}, now {json.dumps(other)}"
