"""Files that were made to do harm: sizes, repeated keys, names that lead elsewhere, arrays, Parquet, patterns."""

from __future__ import annotations

import dataclasses
import json
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hostile_seeds as seeds
import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
from damage import joined, split
from hostile_readers import READERS, folder_of
from looped import looped
from refusals import refusal_of

from treeopt.calibrate.results import merge_calibrations
from treeopt.errors import Code
from treeopt.export.acceptance import read_acceptance
from treeopt.files import read, strict_yaml
from treeopt.files.calibrations import load_calibration
from treeopt.files.read import read_bytes
from treeopt.files.results import ValidationResult, load_result
from treeopt.files.trees import load_tree
from treeopt.models.head_files import load_heads
from treeopt.texts import prompts
from treeopt.texts.prompts import load_prompts

pytestmark = pytest.mark.slow

GIGABYTE = 1 << 30
PEAK = 50_000_000  # bytes that refusing a gigabyte may take


@looped(
    "name",
    [
        *(
            "tree",
            "policy",
            "profile",
            "prompt set",
            "--config",
            "result of validate",
            "acceptance",
        ),
        *("config of heads", "adapter's note", "generation config", "config of a model"),
        *("note of a work folder", "note of a training", "mark of a checkpoint", "growmap (.pt)"),
    ],
)
def test_a_gigabyte_is_refused_before_it_is_read(name: str, tmp_path: Path) -> None:
    """A file of 1 GB in place of a small one is refused by its size, in little memory."""
    reader = READERS[name]
    path = folder_of(name, tmp_path) / reader.file
    start = b"PK\x03\x04" if name == "growmap (.pt)" else b""
    path.write_bytes(start)
    os.truncate(path, GIGABYTE)
    tracemalloc.start()
    try:
        error = refusal_of(reader.read, path)
        assert tracemalloc.get_traced_memory()[1] < PEAK
    finally:
        tracemalloc.stop()
    assert error.code in (Code.FILE_INVALID, Code.RESUME_INVALID, Code.ENGINE_FILE_INVALID)


def validation(path: Path) -> ValidationResult:
    """The result of `treeopt validate`."""
    return load_result(path, ValidationResult)


def test_a_file_larger_than_the_free_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that does not fit into the free memory is E403, and is not read."""
    file = tmp_path / "c.safetensors"
    file.touch()
    os.truncate(file, 1 << 33)
    memory = dataclasses.make_dataclass("Memory", ["available"])(1 << 32)
    monkeypatch.setattr("psutil.virtual_memory", lambda: memory)
    assert refusal_of(load_calibration, file).code is Code.OUT_OF_MEMORY
    memory.available = 1 << 40
    os.truncate(file, read.MOST_BYTES + 1)
    assert "at most 17,179,869,184 are read" in refusal_of(load_calibration, file).what


def test_a_pipe_ends_at_the_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes from a device without an end is read to the bound; a pipe without a writer is refused."""
    monkeypatch.setattr(read, "_MOST_PIPED", 1000)
    monkeypatch.setattr(read, "_WAIT_MS", 1)
    assert "at most" in refusal_of(read_bytes, "/dev/zero", 100).what
    assert len(read_bytes("/dev/zero")) == 1001
    os.mkfifo(tmp_path / "pipe")
    assert "nobody writes to this pipe" in refusal_of(read_bytes, tmp_path / "pipe").what
    assert read_bytes("/dev/null") == b""


@looped("name", ["a\0b", "\ud800", "x" * 5000, "loop", "."])
def test_names_that_no_file_can_have(name: str, tmp_path: Path) -> None:
    """Zero bytes, lone surrogates, long names and links to themselves are one error each."""
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert refusal_of(read_bytes, str(tmp_path / name)).code is Code.FILE_INVALID


def test_yaml_values_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values are counted before they take memory: 8 MB of commas would take two gigabytes."""
    file = tmp_path / "t.yaml"
    file.write_text("schema: treeopt.tree/1\nnodes: [" + "a," * 500 + "]")
    monkeypatch.setattr(strict_yaml, "MAX_VALUES", 100)
    assert "has more than 100 values" in refusal_of(load_tree, file).what
    assert strict_yaml.MAX_BYTES // 4 <= 1 << 21  # a path of a tree has ten values or fewer in 40 characters


def bomb(levels: int) -> str:
    """Nine aliases of nine aliases of ...: 9**levels values."""
    lines = ["a0: &a0 [x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, levels)]
    return "\n".join(lines)


@pytest.mark.quick
@looped("text", [bomb(20), "a: " + "[" * 5000, "a: " + "{b: " * 5000, "&a [*a]", "- " * 5000 + "x"])
def test_yaml_bombs(text: str, tmp_path: Path) -> None:
    """Aliases that multiply and deep nesting are refused by the parser's events."""
    (tmp_path / "l.yaml").write_text(text)
    error = refusal_of(READERS["profile"].read, tmp_path / "l.yaml")
    assert "alias" in error.what or "nested" in error.what


@pytest.mark.quick
def test_keys_twice(tmp_path: Path) -> None:
    """A key that is in an object twice is refused, not decided by the parser."""
    result = seeds.validations()[0].replace(b"{", b'{"tokens": 7, ', 1)
    (tmp_path / "v.json").write_bytes(result)
    assert "has the key 'tokens' twice" in refusal_of(validation, tmp_path / "v.json").what
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b", "prompt": "c"}\n')
    error = refusal_of(load_prompts, tmp_path / "p.jsonl")
    assert "'prompt' twice" in error.what
    assert error.at.endswith("p.jsonl:2:1")
    (tmp_path / "m.json").write_text('{"acceptance_histogram": [1, 2], "acceptance_histogram": [9]}')
    assert "twice" in refusal_of(read_acceptance, tmp_path / "m.json").what
    header, data = split(seeds.calibrations()[0])
    text = header["__metadata__"]["treeopt"].replace("{", '{"top_k": 9, ', 1)
    (tmp_path / "c.safetensors").write_bytes(joined(header | {"__metadata__": {"treeopt": text}}, data))
    assert refusal_of(load_calibration, tmp_path / "c.safetensors").code is Code.FILE_INVALID


@looped("value", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", '"5"'])
def test_numbers_of_results(value: str, tmp_path: Path) -> None:
    """Numbers that are not finite are refused in any field of a result, also in those that are not read."""
    for key in ("tokens_per_step", "unused"):
        data = json.loads(seeds.validations()[0]) | {key: "HERE"}
        (tmp_path / "v.json").write_text(json.dumps(data).replace('"HERE"', value))
        if key == "unused" and value == '"5"':
            validation(tmp_path / "v.json")
        elif value != '"5"':
            assert refusal_of(validation, tmp_path / "v.json").code is Code.FILE_INVALID


def test_counts_beyond_floats(tmp_path: Path) -> None:
    """Counts whose ratio is no float are refused."""
    (tmp_path / "m.json").write_text(json.dumps({"acceptance_histogram": [1, 10**400]}))
    assert "not a list of counts" in refusal_of(read_acceptance, tmp_path / "m.json").what


HEADERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "overlapping": lambda header: header | {"x": dict(header["ranks"])},
    "beyond the end": lambda header: header | {"ranks": header["ranks"] | {"data_offsets": [0, 1 << 40]}},
    "descending": lambda header: header | {"ranks": header["ranks"] | {"data_offsets": [8, 0]}},
    "negative": lambda header: header | {"ranks": header["ranks"] | {"data_offsets": [-8, 16]}},
    "product overflows": lambda header: header | {"ranks": header["ranks"] | {"shape": [1 << 33, 1 << 33]}},
    "more than the data": lambda header: header | {"ranks": header["ranks"] | {"shape": [1 << 40, 3]}},
    "unknown dtype": lambda header: header | {"ranks": header["ranks"] | {"dtype": "F3"}},
    "a hole": lambda header: header | {"ranks": header["ranks"] | {"data_offsets": [1, 25]}},
    "a list": lambda _header: [],
}


@looped("name", HEADERS)
def test_headers_of_arrays(name: str, tmp_path: Path) -> None:
    """Offsets, shapes and types of a header are compared with the data before memory is taken."""
    header, data = split(seeds.calibrations()[0])
    (tmp_path / "c.safetensors").write_bytes(joined(HEADERS[name](header), data))
    tracemalloc.start()
    try:
        assert refusal_of(load_calibration, tmp_path / "c.safetensors").code is Code.FILE_INVALID
        assert tracemalloc.get_traced_memory()[1] < PEAK
    finally:
        tracemalloc.stop()


@pytest.mark.quick
@looped("length", [2**63, 2**64 - 1, 100_000_001, 5, 0])
def test_lengths_of_headers(length: int, tmp_path: Path) -> None:
    """The stated length of a header is compared with the file."""
    header, data = split(seeds.heads()[0])
    for name, load in {"medusa_lm_head.safetensors": load_heads, "c.safetensors": load_calibration}.items():
        (tmp_path / name).write_bytes(joined(header, data, length))
        assert refusal_of(load, tmp_path / name).code is Code.FILE_INVALID


def test_no_checksum_hides_no_fault(tmp_path: Path) -> None:
    """A header that JSON cannot write is a fault of the file, with a checksum or without one."""
    header, data = split(seeds.calibrations()[0])
    for value in ("NaN", "1e999"):
        text = header["__metadata__"]["treeopt"].replace('"top_k":8', f'"top_k":{value}')
        (tmp_path / "c.safetensors").write_bytes(joined(header | {"__metadata__": {"treeopt": text}}, data))
        assert refusal_of(load_calibration, tmp_path / "c.safetensors").code is Code.FILE_INVALID


def test_chunk_without_rows(tmp_path: Path) -> None:
    """A chunk of a work folder without data, or with lengths that are not those of its numbers, is E205."""
    reader = READERS["chunk"]
    path = folder_of("chunk", tmp_path) / reader.file
    rows = {"numbers": np.arange(3), "lengths": np.array([2, 2])}
    for header, arrays in (({"data": {}}, rows), ({"data": {}}, {}), ({}, rows | {"lengths": np.array([2, 1])})):
        text = json.dumps({"schema": "treeopt.chunk/1", **header})
        path.write_bytes(safetensors.numpy.save(arrays, metadata={"treeopt": text}))
        assert refusal_of(reader.read, path).code is Code.RESUME_INVALID


def test_shards_of_a_run_without_number(tmp_path: Path) -> None:
    """The missing shards of two billion are counted, not listed."""
    file = tmp_path / "s.safetensors"
    header, data = split(seeds.shards()[1])
    stored = json.loads(header["__metadata__"]["treeopt"])
    del stored["sha256"]
    text = json.dumps(stored | {"shards": 2**31 + 1})
    file.write_bytes(joined(header | {"__metadata__": {"treeopt": text}}, data))
    error = refusal_of(merge_calibrations, [file])
    assert error.code is Code.SHARDS_INCOMPLETE
    assert "and 2147483640 more are missing" in error.what


def test_parquet_of_many_equal_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal values are stored once, so a small file can have any number of rows: they are counted while they come."""
    import pyarrow
    from pyarrow import parquet

    file = tmp_path / "p.parquet"
    parquet.write_table(pyarrow.table({"text": ["a" * 1000] * 5000}), file)
    assert file.stat().st_size < 10_000
    assert len(load_prompts(file).prompts) == 5000
    monkeypatch.setattr(prompts, "_MOST_ROWS", 4000)
    assert "more than 4,000 rows" in refusal_of(load_prompts, file).what
    monkeypatch.setattr(prompts, "_MOST_ROWS", 10_000)
    monkeypatch.setattr(prompts, "MOST_TEXT", 1_000_000)
    assert "1,000,000 bytes when it is unpacked" in refusal_of(load_prompts, file).what


def test_parquet_of_text_that_is_not_utf8(tmp_path: Path) -> None:
    """Parquet does not check its texts; Python does."""
    import pyarrow
    from pyarrow import parquet

    broken = pyarrow.StringArray.from_buffers(
        1, pyarrow.py_buffer(np.array([0, 1], np.int32)), pyarrow.py_buffer(b"\xff")
    )
    parquet.write_table(pyarrow.table({"text": broken}), tmp_path / "p.parquet")
    assert refusal_of(load_prompts, tmp_path / "p.parquet").code is Code.FILE_INVALID


def test_prompts_may_have_numbers_that_are_not_finite(tmp_path: Path) -> None:
    """Programs that write data sets give NaN for missing values in columns that are not used."""
    (tmp_path / "p.jsonl").write_text('{"prompt": "a", "score": NaN}\n')
    assert load_prompts(tmp_path / "p.jsonl").prompts[0].messages == ({"role": "user", "content": "a"},)


LONG = {
    "choices": lambda n: "mc = [" + "#" * n,
    "spaces": lambda n: " " * n + "mc = [[0]]x",
    "names": lambda n: "a" * n + " : " + "[" + "a" * 9,
    "quotes": lambda n: "['" * (n // 2),
}


@looped("name", LONG)
def test_patterns_take_linear_time(name: str, tmp_path: Path) -> None:
    """A megabyte that a pattern almost matches is refused; a pattern of quadratic time would take hours."""
    file = tmp_path / "t.txt"
    file.write_text(LONG[name](1_000_000))
    for load in (load_tree, READERS["tree of an engine"].read):
        assert refusal_of(load, file).code in (Code.FILE_INVALID, Code.ENGINE_FILE_INVALID)
    metrics = tmp_path / "m.txt"
    for line in ("a{" + "} x " * 250_000, "a" + " " * 1_000_000 + "b c d", "a{" + ',position="1"' * 70_000):
        metrics.write_text(f"vllm:spec_decode_{line}\n")
        assert refusal_of(read_acceptance, metrics).code is Code.FILE_INVALID
