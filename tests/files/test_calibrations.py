"""Calibration files: what is written comes back equal, and what is no calibration is one clear error."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import helpers
import numpy as np
import pytest
from helpers import make_calibration, random_calibration, without_checksum
from looped import looped
from per_step_traces import traced as traced_steps
from per_step_traces import with_paths
from refusals import refusal_of
from sampled_traces import sampled

import treeopt
from treeopt.calibration import Calibration, Provenance
from treeopt.defaults import CALIBRATION_FILE, STEP_SIZES
from treeopt.errors import Code, TreeoptError
from treeopt.files import trees
from treeopt.files.calibrations import SCHEMA, content_of, load_calibration, save_calibration
from treeopt.files.tensors import read_arrays, write_arrays
from treeopt.files.trees import load_tree, save_tree
from treeopt.traces import NONE, StepTraces
from treeopt.tree import Tree

WRITER = """
import dataclasses, sys
from helpers import random_calibration
from treeopt.files.calibrations import save_calibration
calibration = random_calibration(5)
names = {"torch", "device", "transformers", "dtype"}  # a set: its order follows the hash seed
provenance = dataclasses.replace(calibration.provenance, made_by={name: name for name in names})
save_calibration(dataclasses.replace(calibration, provenance=provenance), sys.argv[1])
"""


def check_equal(one: Calibration, other: Calibration) -> None:
    """Compare every field."""
    assert one.ranks.dtype == other.ranks.dtype == np.uint8
    assert one.offsets.dtype == other.offsets.dtype == np.int64
    assert one.ranks.tolist() == other.ranks.tolist()
    assert one.offsets.tolist() == other.offsets.tolist()
    assert one.prompt_ids == other.prompt_ids
    assert one.token_hashes == other.token_hashes
    assert one.top_k == other.top_k
    assert one.provenance == other.provenance


def refusal(path: Path) -> TreeoptError:
    """The error with which a file is refused."""
    return refusal_of(load_calibration, path)


@pytest.mark.slow
def test_bytes_do_not_depend_on_the_hash_seed(tmp_path: Path) -> None:
    """Two processes that hash differently write the same bytes."""
    places = [str(Path(treeopt.__file__).parents[1]), str(Path(helpers.__file__).parent)]
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(places)}
        subprocess.run([sys.executable, "-c", WRITER, str(tmp_path / seed)], env=environment, check=True)
    assert (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes()
    assert load_calibration(tmp_path / "1").ranks.tolist() == random_calibration(5).ranks.tolist()


@looped("seed", range(3))
def test_round_trip(tmp_path: Path, seed: int) -> None:
    """A calibration comes back equal in every field, and can be written again to the byte."""
    calibration = random_calibration(seed, heads=1 + seed, top_k=3 + seed)
    save_calibration(calibration, tmp_path / "one")
    loaded = load_calibration(tmp_path / "one")
    check_equal(loaded, calibration)
    save_calibration(loaded, tmp_path / "other")
    assert (tmp_path / "one").read_bytes() == (tmp_path / "other").read_bytes()


def test_round_trip_of_provenance(tmp_path: Path) -> None:
    """Nested settings and letters of any language come back."""
    provenance = Provenance(
        "modèle",
        "b1",
        "头",
        "h1",
        {"max_new_tokens": 64, "nested": {"a": [1, None]}},
        {"s": "a.json"},
        {"torch": "2.10"},
    )
    calibration = dataclasses.replace(random_calibration(0), provenance=provenance)
    save_calibration(calibration, tmp_path / "file")
    check_equal(load_calibration(tmp_path / "file"), calibration)


def test_drafter_is_found_by_each_name_of_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calibrations and trees name their drafter relative to the folder behind a link, and are read by both names."""
    (tmp_path / "store" / "deep").mkdir(parents=True)
    (tmp_path / "data").symlink_to("store/deep")
    (tmp_path / "d.safetensors").touch()
    monkeypatch.chdir(tmp_path)
    made = random_calibration(1)
    provenance = dataclasses.replace(made.provenance, drafter="d.safetensors", drafter_id="d1")
    save_calibration(dataclasses.replace(made, provenance=provenance), "data/c.safetensors")
    save_tree(Tree(((0,),), drafter="d1", source={"drafter": "d.safetensors"}), "data/t.yaml")
    for folder in ("data", "store/deep", "data/../deep"):
        for found in (
            load_calibration(f"{folder}/c.safetensors").provenance.drafter,
            load_tree(f"{folder}/t.yaml").source["drafter"],
        ):
            assert os.path.samefile(found, "d.safetensors"), (folder, found)
    monkeypatch.chdir("data")
    assert os.path.samefile(load_tree("t.yaml").source["drafter"], tmp_path / "d.safetensors")


def test_drafter_with_a_name_that_no_file_has(tmp_path: Path) -> None:
    """A hostile file names one with a null byte or half a surrogate pair: it is read, and written again."""
    for name in ("../x\0y/d", "d\0", "../\ud800"):
        provenance = dataclasses.replace(random_calibration(1).provenance, drafter=name, drafter_id="d1")
        written = content_of(dataclasses.replace(random_calibration(1), provenance=provenance), tmp_path / "c")[1]
        assert written["provenance"]["drafter"]
        line = trees.DrafterLine(id="d1", file=name)
        assert trees.drafter_fields(line, tmp_path / "t.yaml", {})["source"]["drafter"]


def test_round_trip_of_target_probabilities(tmp_path: Path) -> None:
    """Probabilities of sampled texts come back, with places in per-step trees or without; so does the temperature."""
    calibration = sampled(3)
    static = dataclasses.replace(calibration, steps=None, target=dataclasses.replace(calibration.target, places=None))
    for made in (calibration, static):
        save_calibration(made, tmp_path / "file", overwrite=True)
        loaded = load_calibration(tmp_path / "file")
        check_equal(loaded, made)
        assert loaded.temperature == 0.7
        assert made.target is not None
        assert loaded.target is not None
        np.testing.assert_array_equal(loaded.target.probability, made.target.probability)
        assert loaded.target.probability.dtype == np.float16
        np.testing.assert_array_equal(loaded.target.places, made.target.places)


def test_round_trip_of_traces_by_path_tokens(tmp_path: Path) -> None:
    """They come back with the others; files without them have none."""
    for made in (with_paths(traced_steps(1)), traced_steps(1)):
        save_calibration(made, tmp_path / "file", overwrite=True)
        found = load_calibration(tmp_path / "file").steps
        assert found is not None
        assert made.steps is not None
        for name, array in vars(made.steps).items():
            assert (getattr(found, name) is None) == (array is None)
            np.testing.assert_array_equal(getattr(found, name), array)


def test_round_trip_without_text(tmp_path: Path) -> None:
    """Prompts that got no answer at all are a calibration."""
    calibration = make_calibration([np.zeros((0, 3)), np.zeros((0, 3))])
    save_calibration(calibration, tmp_path / "file")
    check_equal(load_calibration(tmp_path / "file"), calibration)


def test_loaded_arrays_are_read_only(tmp_path: Path) -> None:
    """A loaded record is as fixed as a made one."""
    save_calibration(random_calibration(0), tmp_path / "file")
    with pytest.raises(ValueError, match="read-only"):
        load_calibration(tmp_path / "file").ranks[0, 0] = 1


def test_missing_file_says_how_to_make_it(tmp_path: Path) -> None:
    """E201 gives the command that makes a calibration, with the name that was asked for."""
    path = tmp_path / "mine.safetensors"
    error = refusal(path)
    assert error.code is Code.FILE_MISSING
    assert error.fix.startswith("treeopt calibrate ")
    assert error.fix.endswith(f"-o {path}")


def test_default_file_is_in_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a name, calibration.safetensors of the current folder is read."""
    monkeypatch.chdir(tmp_path)
    assert CALIBRATION_FILE == "calibration.safetensors"
    assert refusal_of(load_calibration).code is Code.FILE_MISSING
    save_calibration(random_calibration(0), "calibration.safetensors")
    check_equal(load_calibration(), random_calibration(0))


def test_existing_file_is_kept(tmp_path: Path) -> None:
    """A calibration took long to make: without overwriting it is E202 and stays as it was."""
    path = tmp_path / "calibration.safetensors"
    save_calibration(random_calibration(0), path)
    before = path.read_bytes()
    error = refusal_of(save_calibration, random_calibration(1), path)
    assert error.code is Code.FILE_EXISTS
    assert path.read_bytes() == before
    save_calibration(random_calibration(1), path, overwrite=True)
    check_equal(load_calibration(path), random_calibration(1))


@looped("content", [b"", b"schema: treeopt.tree/1\nnodes: 1\npaths: []\n", b"PK\x03\x04", b"\xff" * 99])
def test_foreign_file_is_refused(tmp_path: Path, content: bytes) -> None:
    """A file of another kind is E203 and is named."""
    (tmp_path / "foreign").write_bytes(content)
    error = refusal(tmp_path / "foreign")
    assert error.code is Code.FILE_INVALID
    assert str(tmp_path / "foreign") in error.what


@looped("part", ["ranks", "offsets"])
def test_missing_array_is_refused(tmp_path: Path, part: str) -> None:
    """A file that lacks an array is E203 and names it."""
    error = altered(tmp_path, drop=part)
    assert error.code is Code.FILE_INVALID
    assert part in error.what


@looped(
    "header",
    [
        {"top_k": "16"},
        {"top_k": None},
        {"prompt_ids": None},
        {"token_hashes": 3},
        {"provenance": {}},
        {"provenance": []},
    ],
)
def test_wrong_type_in_the_header_is_refused(tmp_path: Path, header: dict[str, Any]) -> None:
    """A header part of another type is E203."""
    assert altered(tmp_path, header=header).code is Code.FILE_INVALID


@looped("dtype", [np.int32, np.float64])
def test_offsets_of_another_type_are_refused(tmp_path: Path, dtype: type) -> None:
    """Offsets are never converted in silence."""
    assert altered(tmp_path, arrays={"offsets": np.arange(21).astype(dtype)}).code is Code.FILE_INVALID


def test_broken_rule_of_the_record_is_refused(tmp_path: Path) -> None:
    """Well-formed content that breaks a rule of the record is E220."""
    error = altered(tmp_path, arrays={"ranks": np.zeros((7, 4), np.uint8)})
    assert error.code is Code.CALIBRATION_INVALID


def altered(
    folder: Path, *, header: dict[str, Any] | None = None, arrays: dict[str, Any] | None = None, drop: str = ""
) -> TreeoptError:
    """The error with which a calibration file with some parts changed or dropped is refused."""
    save_calibration(random_calibration(0), folder / "whole")
    good_arrays, good_header = read_arrays(folder / "whole", SCHEMA)
    new_arrays = {name: part for name, part in {**good_arrays, **(arrays or {})}.items() if name != drop}
    new_header = {name: part for name, part in {**good_header, **(header or {})}.items() if name != drop}
    write_arrays(folder / "altered", new_arrays, new_header, overwrite=False)
    return refusal(folder / "altered")


@pytest.mark.slow
def test_every_damaged_byte_is_refused(tmp_path: Path) -> None:
    """Damage anywhere is found by the checksum, or before it is compared."""
    save_calibration(random_calibration(0, sequences=2, length=5), tmp_path / "file")
    whole = (tmp_path / "file").read_bytes()
    for position in range(len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 0x15
        (tmp_path / "damaged").write_bytes(damaged)
        assert refusal(tmp_path / "damaged").code is Code.FILE_INVALID


@pytest.mark.slow
def test_every_damaged_byte_without_a_checksum_is_read_or_refused(tmp_path: Path) -> None:
    """In files of before, damage ends in a calibration or in one of our errors, never in another exception."""
    save_calibration(random_calibration(0, sequences=2, length=5), tmp_path / "file")
    whole = without_checksum(tmp_path / "file")
    refused: list[TreeoptError] = []
    for position in range(len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 0x15
        (tmp_path / "damaged").write_bytes(damaged)
        try:
            load_calibration(tmp_path / "damaged")
        except TreeoptError as error:
            refused.append(error)
    assert len(refused) > 100
    assert {error.code for error in refused} == {Code.FILE_INVALID, Code.CALIBRATION_INVALID}


@looped(("key", "value"), [("top_k", 16.0), ("prompt_ids", "abc"), ("provenance", {"model": 5})])
def test_damaged_header_is_one_error(tmp_path: Path, key: str, value: object) -> None:
    """A header of the wrong types is E203 and names the file."""
    target = tmp_path / "c.safetensors"
    save_calibration(random_calibration(3), target)
    arrays, header = read_arrays(target, SCHEMA)
    write_arrays(target, arrays, {**header, key: value}, overwrite=True)
    with pytest.raises(TreeoptError, match="damaged header") as caught:
        load_calibration(target)
    assert caught.value.code is Code.FILE_INVALID


def traced(drafter: str) -> Calibration:
    """A calibration with trees of steps, by a drafter in this file."""
    made = random_calibration(3)
    node_rank = np.where(made.ranks == NONE, NONE, 7).astype(np.uint8)
    expected_tokens = np.ones((made.positions, len(STEP_SIZES)), np.float32)
    steps = StepTraces(node_rank, expected_tokens, np.full(node_rank.shape, 0.5, np.float16))
    provenance = dataclasses.replace(made.provenance, drafter_id="d1", drafter=drafter)
    return dataclasses.replace(made, steps=steps, provenance=provenance)


def test_round_trip_of_steps(tmp_path: Path) -> None:
    """Trees of steps come back, and the drafter's file is found wherever both are moved."""
    (tmp_path / "a").mkdir()
    made = traced(str(tmp_path / "d.safetensors"))
    save_calibration(made, tmp_path / "a/c.safetensors")
    (tmp_path / "a").rename(tmp_path / "b")
    found = load_calibration(tmp_path / "b/c.safetensors")
    assert found.steps is not None
    assert made.steps is not None
    for name in ("node_rank", "expected_tokens", "confidence"):
        np.testing.assert_array_equal(getattr(found.steps, name), getattr(made.steps, name))
    assert (found.provenance.drafter_id, found.provenance.drafter) == ("d1", str(tmp_path / "d.safetensors"))


@looped("name", ["node_rank", "expected_tokens", "confidence"])
def test_missing_part_of_steps_is_refused(tmp_path: Path, name: str) -> None:
    """Trees of steps are there as a whole, or not at all."""
    save_calibration(traced(""), tmp_path / "whole")
    arrays, header = read_arrays(tmp_path / "whole", SCHEMA)
    del arrays[name]
    write_arrays(tmp_path / "part", arrays, header, overwrite=False)
    error = refusal(tmp_path / "part")
    assert error.code is Code.FILE_INVALID
    assert name in error.what
