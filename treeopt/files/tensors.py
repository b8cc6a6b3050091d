"""Arrays in safetensors files with a JSON header; equal content gives equal bytes.

The header is one metadata key, because the order of several keys differs between processes.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from treeopt.errors import Code, TreeoptError
from treeopt.files.atomic import write_bytes
from treeopt.files.read import HEADER_KEY, header_in, header_of, read_bytes
from treeopt.files.strict_yaml import OURS

_CHECKSUM = "sha256"  # of the header without it, and of the arrays


def canonical_json(data: Any) -> str:
    """JSON with sorted keys, in ASCII, without spaces or NaN: equal data give equal text."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)


def write_arrays(
    path: str | os.PathLike[str], arrays: Mapping[str, NDArray[Any]], header: Mapping[str, Any], *, overwrite: bool
) -> None:
    """Write arrays and a JSON header with a checksum of both, atomically."""
    ordered = {name: np.ascontiguousarray(arrays[name]) for name in sorted(arrays)}
    sealed = {**header, _CHECKSUM: _checksum(ordered, header)}
    write_bytes(path, save(ordered, metadata={HEADER_KEY: canonical_json(sealed)}), overwrite=overwrite)


def read_arrays(path: str | os.PathLike[str], schema: str) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """Arrays and header of a file that `write_arrays` wrote with `header["schema"] == schema`; E203 for any other."""
    raw = read_bytes(path)
    try:
        arrays = load(raw)
    except SafetensorError as error:
        raise TreeoptError(Code.FILE_INVALID, f"{path} is damaged or not a safetensors file: {error}") from error
    except KeyError as error:  # a dtype that numpy does not have
        what = f"{path} was not written by treeopt: it has tensors in {error.args[0]}, as weights of models"
        raise TreeoptError(Code.FILE_INVALID, what) from error
    header = header_in(raw)
    if not header:
        raise TreeoptError(Code.FILE_INVALID, f"{path} was not written by treeopt: it has no {HEADER_KEY!r} header")
    found = header.get("schema")
    if found != schema:
        _, use = OURS.get(str(found), ("", ""))
        raise TreeoptError(Code.FILE_INVALID, f"{path} holds {found!r}, but {schema!r} is needed here", fix=use)
    stated = header.pop(_CHECKSUM, None)  # a file without one is not compared
    if stated not in (None, _checksum(arrays, header)):
        what = f"{path} was changed since it was written: its content does not match its checksum"
        raise TreeoptError(Code.FILE_INVALID, what, fix="make the file again")
    return arrays, header


def unedited_schema(path: Path) -> str | None:
    """The schema of a file of treeopt; None for another file, without a checksum, or where it was edited."""
    try:
        header = header_of(path)  # enough to recognise a model's weights
        if not header or _CHECKSUM not in header or "schema" not in header:
            return None
        read_arrays(path, header["schema"])
        return str(header["schema"])
    except TreeoptError:
        return None


def _checksum(arrays: Mapping[str, NDArray[Any]], header: Mapping[str, Any]) -> str:
    digest = hashlib.sha256(canonical_json(dict(header)).encode())
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(f"{name} {array.dtype} {array.shape} ".encode())
        digest.update(array.reshape(-1).view(np.uint8).data)  # its bytes, without a copy
    return digest.hexdigest()
