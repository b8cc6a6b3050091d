"""The content of any file of treeopt as parts: values and arrays by their place, so that two files can be compared."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from treeopt.errors import Code, TreeoptError, first_line
from treeopt.files.configurations import KEY, stored_configuration
from treeopt.files.read import read_bytes

Place = tuple[str | int, ...]
_CHECKSUM = "sha256"  # of a header; it changes with every other part
_COMMENTS = ("<!-- treeopt ", "// treeopt ", "# ")  # configurations and marks; comments of YAML


def parts_of(path: Path) -> dict[Place, Any]:
    """Every value and array of a file, or of the files of a folder, by its place.

    Values are those of JSON; a list of such values is one part. Cells of CSV are numbers where they can be. Arrays are
    numpy's. The lines of a text, such as SVG, are parts. The stored configuration is at `configuration`, wherever the
    file has it; checksums are left out.

    Raises:
        TreeoptError: E201 where the file is missing, E203 where it cannot be read.
    """
    try:
        return _content(path)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, csv.Error) as error:
        raise TreeoptError(Code.FILE_INVALID, f"{path} is damaged: {first_line(error)}") from error


def _content(path: Path) -> dict[Place, Any]:
    if path.is_dir():
        files = sorted(one for one in path.rglob("*") if one.is_file())
        found = {(str(one.relative_to(path)), *place): part for one in files for place, part in _parts(one)}
    else:
        found = dict(_parts(path))
    content = {place: part for place, part in found.items() if KEY not in place}
    try:
        stored = stored_configuration(path)
    except TreeoptError:
        stored = {}
    return content | {(KEY, *place): part for place, part in _flat(stored)}


def data_of(path: Path) -> dict[str, Any] | None:
    """The JSON object of a result of `--json`; None for any other file."""
    raw = read_bytes(path) if path.is_file() else b""
    if raw.lstrip()[:1] != b"{":
        return None
    try:
        data = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) and isinstance(data.get(KEY), dict) else None


def _parts(path: Path) -> Iterator[tuple[Place, Any]]:
    """The parts of one file, by its format."""
    raw = read_bytes(path)
    length = int.from_bytes(raw[:8], "little")
    if raw[8:9] == b"{" and length <= len(raw):
        yield from _safetensors(raw, length)
        return
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        yield ("content",), raw
        return
    suffix = path.suffix.lower()
    if suffix == ".csv":
        for i, row in enumerate(csv.DictReader(io.StringIO(text))):
            yield from (((i, name), _cell(value)) for name, value in row.items())
    elif suffix in (".json", ".jsonl"):
        lines = text.splitlines() if suffix == ".jsonl" else [text]
        rows = [_json(line) for line in lines]
        yield from _flat(rows if suffix == ".jsonl" else rows[0])
    elif suffix in (".yaml", ".yml"):
        from treeopt.files import strict_yaml

        yield from _flat(strict_yaml.load(path).data)
    else:
        kept = [line for line in text.splitlines() if not line.startswith(_COMMENTS)]
        yield from (((f"line {i}",), line) for i, line in enumerate(kept, start=1))


def _safetensors(raw: bytes, length: int) -> Iterator[tuple[Place, Any]]:
    """Arrays, as they are stored, and the header of treeopt."""
    import numpy as np

    header = json.loads(raw[8 : 8 + length])
    metadata = header.pop("__metadata__", {})
    for name, one in sorted(header.items()):
        begin, end = one["data_offsets"]
        content = raw[8 + length + begin : 8 + length + end]
        dtype = _DTYPES.get(one["dtype"], "u1")
        array = np.frombuffer(content, dtype)
        yield (name,), array.reshape(one["shape"]) if one["dtype"] in _DTYPES else array
    ours = _json(metadata.get("treeopt", "{}"))
    if isinstance(ours, dict):
        ours.pop(_CHECKSUM, None)
    yield from _flat(ours)


# Of safetensors, as numpy's; numpy has no bfloat16, whose bytes are compared.
_DTYPES = {
    **{"F64": "f8", "F32": "f4", "F16": "f2", "BOOL": "?"},
    **{
        f"{ours}{bits}": f"{theirs}{bits // 8}" for ours, theirs in (("I", "i"), ("U", "u")) for bits in (8, 16, 32, 64)
    },
}


def _cell(value: Any) -> Any:
    """The number in a cell of CSV; any other cell as it is."""
    for number in (int, float):
        with contextlib.suppress(ValueError, TypeError):
            found = number(value)
            return found if math.isfinite(found) else value
    return value


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _flat(data: Any, place: Place = ()) -> Iterator[tuple[Place, Any]]:
    """Every value of nested mappings and lists by its place; a list of plain values is one."""
    if isinstance(data, dict):
        for key, value in data.items():
            yield from _flat(value, (*place, key))
    elif isinstance(data, list) and any(isinstance(one, (dict, list)) for one in data):
        for i, one in enumerate(data):
            yield from _flat(one, (*place, i))
    else:
        yield place, data
