"""Array files: equal content gives equal bytes, and damage is one clear error."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from looped import looped
from refusals import refusal_of
from safetensors.numpy import save
from safetensors.torch import save as save_weights

import treeopt
from treeopt.errors import Code, TreeoptError
from treeopt.files.tensors import canonical_json, read_arrays, write_arrays

HEADER = {"schema": "test/1", "names": ["tree", "Bäume"], "nested": {"b": 1, "a": [0.5, None, True]}}
WRITER = """
import sys
import numpy as np
from treeopt.files.tensors import write_arrays
names = {"one", "two", "three", "four", "five", "six"}  # a set: its order follows the hash seed
arrays = {name: np.arange(len(name)) for name in names}
write_arrays(sys.argv[1], arrays, {"schema": "test/1", **{name: len(name) for name in names}}, overwrite=False)
"""


def arrays() -> dict[str, Any]:
    """One array of each kind that is used."""
    return {"ranks": np.arange(12, dtype=np.uint8).reshape(4, 3), "offsets": np.array([0, 4]), "half": np.ones(3, "f2")}


def refusal(path: Path, schema: str = "test/1") -> TreeoptError:
    """The error with which a file is refused."""
    return refusal_of(read_arrays, path, schema)


def test_bytes_do_not_depend_on_the_hash_seed(tmp_path: Path) -> None:
    """Two processes that hash differently write the same bytes."""
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(treeopt.__file__).parents[1])}
        subprocess.run([sys.executable, "-c", WRITER, str(tmp_path / seed)], env=environment, check=True)
    assert (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes()
    assert read_arrays(tmp_path / "1", "test/1")[0]["three"].tolist() == [0, 1, 2, 3, 4]


def test_arrays_and_names_in_any_order(tmp_path: Path) -> None:
    """Names are sets, and what counts of an array is its numbers, not how it lies in memory."""
    write_arrays(tmp_path / "one", arrays(), HEADER, overwrite=False)
    backwards = dict(reversed(arrays().items()))
    write_arrays(tmp_path / "other", backwards, dict(reversed(HEADER.items())), overwrite=False)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "other").read_bytes()
    array = np.arange(6).reshape(2, 3).T
    write_arrays(tmp_path / "file", {"a": array}, {"schema": "test/1"}, overwrite=False)
    assert read_arrays(tmp_path / "file", "test/1")[0]["a"].tolist() == [[0, 3], [1, 4], [2, 5]]


def test_round_trip(tmp_path: Path) -> None:
    """Arrays come back with their types and shapes, the header with its values."""
    write_arrays(tmp_path / "file", arrays(), HEADER, overwrite=False)
    found, header = read_arrays(tmp_path / "file", "test/1")
    assert header == HEADER
    assert sorted(found) == ["half", "offsets", "ranks"]
    for name, array in arrays().items():
        assert found[name].dtype == array.dtype
        assert found[name].tolist() == array.tolist()


@looped("shape", [(0, 4), (0,), (1, 1)])
def test_round_trip_of_empty_and_tiny_arrays(tmp_path: Path, shape: tuple[int, ...]) -> None:
    """An array without elements keeps its shape."""
    write_arrays(tmp_path / "file", {"a": np.zeros(shape, np.uint8)}, {"schema": "test/1"}, overwrite=False)
    assert read_arrays(tmp_path / "file", "test/1")[0]["a"].shape == shape


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    """A file that was cut anywhere is E203."""
    write_arrays(tmp_path / "file", arrays(), HEADER, overwrite=False)
    whole = (tmp_path / "file").read_bytes()
    for length in range(len(whole)):
        (tmp_path / "cut").write_bytes(whole[:length])
        assert refusal(tmp_path / "cut").code is Code.FILE_INVALID
    (tmp_path / "long").write_bytes(whole + b"\0")
    assert refusal(tmp_path / "long").code is Code.FILE_INVALID


@pytest.mark.slow
def test_every_damaged_byte_is_read_or_refused(tmp_path: Path) -> None:
    """Damage anywhere ends in arrays or in one of our errors, never in another exception."""
    write_arrays(tmp_path / "file", arrays(), {"schema": "test/1"}, overwrite=False)
    whole = (tmp_path / "file").read_bytes()
    refused: list[TreeoptError] = []
    for position in range(len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 0x15
        (tmp_path / "damaged").write_bytes(damaged)
        try:
            read_arrays(tmp_path / "damaged", "test/1")
        except TreeoptError as error:
            refused.append(error)
    assert len(refused) > 100
    assert {error.code for error in refused} == {Code.FILE_INVALID}


@looped(
    "content",
    [
        b"",
        b"PK\x03\x04 a zip file, as torch.save writes",
        b"schema: treeopt.tree/1\n",
        b"\0" * 100,
        b"\xff" * 100,
        save({"a": np.zeros(2)}),
        save({"a": np.zeros(2)}, metadata={"format": "pt"}),
        save_weights({"a": torch.zeros(2, dtype=torch.bfloat16)}),
        save({"a": np.zeros(2)}, metadata={"treeopt": "{"}),
        save({"a": np.zeros(2)}, metadata={"treeopt": "[]"}),
        save({"a": np.zeros(2)}, metadata={"treeopt": "{}"}),
        (22).to_bytes(8, "little") + b'{"__metadata__": null}',
    ],
)
def test_foreign_file_is_refused(tmp_path: Path, content: bytes) -> None:
    """A file that treeopt did not write is E203 and is named."""
    (tmp_path / "foreign").write_bytes(content)
    error = refusal(tmp_path / "foreign")
    assert error.code is Code.FILE_INVALID
    assert str(tmp_path / "foreign") in error.what


def test_another_schema_is_refused(tmp_path: Path) -> None:
    """E203 names the schema found and the one needed."""
    write_arrays(tmp_path / "file", arrays(), HEADER, overwrite=False)
    error = refusal(tmp_path / "file", "test/2")
    assert error.code is Code.FILE_INVALID
    assert "'test/1'" in error.what
    assert "'test/2'" in error.what


def test_canonical_json() -> None:
    """Keys are sorted, nothing is spaced, all is ASCII, also a file name that is no text."""
    assert canonical_json({"b": [1, 2.5], "a": "ä"}) == '{"a":"\\u00e4","b":[1,2.5]}'
    assert canonical_json("\udce9") == '"\\udce9"'
    assert canonical_json({"b": 1, "a": 2}) == canonical_json({"a": 2, "b": 1})
    with pytest.raises(ValueError, match="JSON"):
        canonical_json(float("nan"))
