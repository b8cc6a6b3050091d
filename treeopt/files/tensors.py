"""Arrays on disk: safetensors with one metadata key of canonical JSON, so that equal content gives equal bytes.

(With two metadata keys the format's writer orders them differently from process to process.)
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from treeopt.errors import Code, TreeoptError
from treeopt.files.atomic import read_bytes, write_bytes

_KEY = "treeopt"


def canonical_json(data: Any) -> str:
    """One ASCII text for equal data: sorted keys, no spaces, no NaN."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)


def write_arrays(
    path: str | os.PathLike[str],
    arrays: Mapping[str, NDArray[Any]],
    header: Mapping[str, Any],
    *,
    overwrite: bool,
) -> None:
    """Write arrays and a JSON header, whole or not at all."""
    kept = {name: np.ascontiguousarray(arrays[name]) for name in sorted(arrays)}
    write_bytes(path, save(kept, metadata={_KEY: canonical_json(dict(header))}), overwrite=overwrite)


def read_arrays(path: str | os.PathLike[str], schema: str) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """Arrays and header of a file that `write_arrays` wrote with `header["schema"] == schema`.

    Raises:
        TreeoptError: E201 where it is missing, E203 where it is damaged or of another kind.
    """
    raw = read_bytes(path)
    try:
        arrays = load(raw)
        header_length = int.from_bytes(raw[:8], "little")
        metadata = json.loads(raw[8 : 8 + header_length]).get("__metadata__", {})
        header = json.loads(metadata[_KEY])
    except SafetensorError as error:
        raise TreeoptError(Code.FILE_INVALID, f"{path} is damaged or not a safetensors file: {error}") from error
    except (KeyError, ValueError, RecursionError) as error:
        raise TreeoptError(
            Code.FILE_INVALID, f"{path} was not written by treeopt: it has no {_KEY!r} header"
        ) from error
    found = header.get("schema") if isinstance(header, dict) else None
    if found != schema:
        raise TreeoptError(Code.FILE_INVALID, f"{path} holds {found!r}, but {schema!r} is needed here")
    return arrays, header
