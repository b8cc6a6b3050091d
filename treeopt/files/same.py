"""Whether a file and one that its command made again are the same but for the clock, the machine and names of files."""

import hashlib
import json
from pathlib import Path
from typing import Any

from treeopt.files.configurations import KEY

# Parts that follow from the clock, in what these commands write; from the machine; and from names of files.
_MEASURE = ("validate", "compare", "generate", "demo", "calibrate", "learn", "profile")
_CLOCK = {"tokens_per_second", "prefill_seconds", "overhead", "speedup", "speedup_vs_autoregressive", "quartiles"}
_CLOCK |= {"seconds", "recommended", "warnings", *(f"{one}_{end}" for one in _CLOCK for end in ("low", "high"))}
_CLOCK |= {"plan", "cost_ratio", "best_drafts", "best_replayed_drafts", "replayed_speedup", "drafting", "low", "high"}
_MACHINE = {"made_by", "versions", "device", "dtype", "threads", "attention"}
_NAMES = {"output", "csv", "chart", "command", "files", "file", "work", "adapter", "drafter", "sha256", KEY}
_COMMENTS = ("<!-- treeopt ", "// treeopt ", "# ")  # configurations and marks
_FASTEST = "fastest size"  # ends the methods of compare that are chosen by seconds


def compare_files(old: Path, new: Path, command: str) -> tuple[str, dict[str, Any] | None]:
    """`identical`, `equal` or `differs`, and the first place with other values, of two files or folders."""
    if _bytes(old) == _bytes(new):
        return "identical", None
    one, other = content_of(old), content_of(new)
    left_out = _MACHINE | _NAMES | (_CLOCK if command in _MEASURE else set())
    for place in dict.fromkeys([*one, *other]):
        if one.get(place) != other.get(place) and not left_out & set(place.split(".")):
            return "differs", {"place": place, "old": one.get(place), "new": other.get(place)}
    return "equal", None


def content_of(path: Path) -> dict[str, Any]:
    """The values of a file, or of the files of a folder, by their place with dots."""
    return _flat({name: _values(path / name, raw) for name, raw in _bytes(path).items()})


def _bytes(path: Path) -> dict[str, bytes]:
    """The files of a folder, or a file alone, by their names in it."""
    files = sorted(one for one in path.rglob("*") if one.is_file()) if path.is_dir() else [path]
    return {"" if one == path else str(one.relative_to(path)): one.read_bytes() for one in files}


def _values(path: Path, raw: bytes) -> Any:
    """The data of a file; of arrays their forms and a hash, and of a text its lines."""
    try:
        if raw[8:9] == b"{":
            end = 8 + int.from_bytes(raw[:8], "little")
            header = json.loads(raw[8:end])
            ours = json.loads(header.pop("__metadata__", {}).get("treeopt", "{}"))
            return {**ours, **header, "arrays": hashlib.sha256(raw[end:]).hexdigest()}
        if path.suffix in (".yaml", ".yml"):
            from treeopt.files import strict_yaml

            return strict_yaml.parse(path, raw).data
        if path.suffix == ".json":
            return json.loads(raw)
        return [line for line in raw.decode().splitlines() if not line.startswith(_COMMENTS)]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):  # another format
        return {"bytes": hashlib.sha256(raw).hexdigest()}


def _flat(data: Any, place: str = "") -> dict[str, Any]:
    """The values of nested data by their place; rows of compare that are chosen by seconds are left out."""
    if isinstance(data, dict) and str(data.get("method", "")).endswith(_FASTEST):
        return {}
    parts = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else None
    if parts is None:
        return {place: data}
    return {
        key: part for name, one in parts for key, part in _flat(one, f"{place}.{name}" if place else str(name)).items()
    }
