"""The parts of damaged files: one error with a number."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from treeopt.errors import Code, TreeoptError
from treeopt.files.parts import parts_of


@pytest.mark.parametrize(
    "header",
    [
        {"a": {"dtype": "F32", "shape": [1]}},
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}},
        {"a": {"dtype": [], "shape": [1], "data_offsets": [0, 4]}},
        {"a": 5},
        {"__metadata__": []},
    ],
    ids=["no offsets", "another shape", "no type", "a number", "a list"],
)
def test_damaged_headers_are_refused(header: dict[str, Any], tmp_path: Path) -> None:
    """An array file whose header does not describe its content is E203."""
    raw = json.dumps(header).encode()
    file = tmp_path / "a.safetensors"
    file.write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(4))
    with pytest.raises(TreeoptError, match="is damaged") as caught:
        parts_of(file)
    assert caught.value.code is Code.FILE_INVALID
