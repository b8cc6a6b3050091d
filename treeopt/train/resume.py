"""What a run that is resumed must have in common with the one that was broken off."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from treeopt.errors import Code, TreeoptError


def begun_otherwise(place: Path, begun: Mapping[str, Any], now: Mapping[str, Any]) -> TreeoptError:
    """E205, with every setting in which the two differ."""
    what = f"{place} was begun with other settings"
    at = "\n".join(_differences(begun, now, ""))
    return TreeoptError(Code.RESUME_INVALID, what, at=at, fix="give the same again, or --force in place of --resume")


def damaged(place: Path, what: str, *, at: str = "", fix: str = "") -> TreeoptError:
    """E205 for a file of a run that was broken off which that run cannot have left so."""
    why = "what is not known to be of this run is neither continued nor dropped"
    fix = fix or f"put {place.name} back as it was; --force in place of --resume begins anew and drops what was begun"
    return TreeoptError(Code.RESUME_INVALID, f"{place} {what}", at=at or str(place), why=why, fix=fix)


def _differences(begun: Mapping[str, Any], now: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for key in dict.fromkeys([*begun, *now]):
        one, other = begun.get(key), now.get(key)
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            yield from _differences(one, other, f"{prefix}{key}.")
        elif one != other:
            yield f"{prefix}{key}: begun with {json.dumps(one)}, now {json.dumps(other)}"
