"""Drafter files: round trip, and damage of every kind refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import without_checksum

from treeopt.drafter import MAX_MATCH, Drafter, Level
from treeopt.drafting.ngram_counts import NgramCounts
from treeopt.errors import Code, TreeoptError
from treeopt.files.drafters import SCHEMA, load_drafter, save_drafter
from treeopt.files.tensors import read_arrays, write_arrays


def with_table() -> Drafter:
    """A drafter with a small n-gram table and a calibration map."""
    counts = NgramCounts(5)
    counts.add([1, 2, 3, 1, 2], [2, 3, 1, 2, 4])
    level = Level(0.5, 0.25, 1 / 3, tuple(0.1 * n for n in range(MAX_MATCH)), -3.0, ((-1.0, -2.0), (0.5, 0.25)))
    return Drafter((level, Level(), level), 2, 3, 16, counts.table(), {"prompts": {"sha": "p.json"}, "n": 1})


@pytest.mark.parametrize("drafter", [with_table(), Drafter.heads_only(2, 7)])
def test_round_trip(tmp_path: Path, drafter: Drafter) -> None:
    """Numbers, table and source come back with the same id; equal content gives equal bytes."""
    for name in ("a", "b"):
        save_drafter(drafter, tmp_path / name)
    found = load_drafter(tmp_path / "a")
    assert found.id == drafter.id
    assert (found.levels, found.num_heads, found.top, found.window) == (
        drafter.levels,
        drafter.num_heads,
        drafter.top,
        drafter.window,
    )
    assert found.source == drafter.source
    assert (found.ngram_table is None) == (drafter.ngram_table is None)
    if found.ngram_table is not None and drafter.ngram_table is not None:
        assert found.ngram_table.num_tokens == drafter.ngram_table.num_tokens
        for name, array in drafter.ngram_table.arrays().items():
            np.testing.assert_array_equal(found.ngram_table.arrays()[name], array)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_existing_file_is_kept(tmp_path: Path) -> None:
    """What takes long to learn is overwritten only when that is asked for."""
    save_drafter(with_table(), tmp_path / "d")
    with pytest.raises(TreeoptError) as caught:
        save_drafter(Drafter.heads_only(1, 1), tmp_path / "d")
    assert caught.value.code is Code.FILE_EXISTS
    save_drafter(Drafter.heads_only(1, 1), tmp_path / "d", overwrite=True)
    assert load_drafter(tmp_path / "d").depth == 1


def test_missing_file_says_how_to_make_it(tmp_path: Path) -> None:
    """E201 with the command."""
    with pytest.raises(TreeoptError) as caught:
        load_drafter(tmp_path / "none")
    assert caught.value.code is Code.FILE_MISSING
    assert "treeopt learn" in caught.value.fix


def test_every_damaged_byte_is_refused(tmp_path: Path) -> None:
    """No damage is read as a drafter of the same id, also in files without a checksum; no other exception leaves."""
    save_drafter(with_table(), tmp_path / "d")
    whole, known = without_checksum(tmp_path / "d"), with_table()
    codes = set()
    for position in range(len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 0x15
        (tmp_path / "damaged").write_bytes(damaged)
        try:
            found = load_drafter(tmp_path / "damaged")
        except TreeoptError as error:
            codes.add(error.code)
        else:  # the source, and how many tokens were counted, do not change the drafts
            assert found.id == known.id
    assert codes == {Code.FILE_INVALID, Code.DRAFTER_INVALID}


CHANGES: dict[str, dict[str, Any]] = {
    "another number": {"top": 2},
    "a table left out": {"num_tokens": None},
    "levels of another kind": {"levels": [1]},
    "a pair of three": {
        "levels": [{**vars(Level()), "prompt_lookup": [0.0] * MAX_MATCH, "calibration_map": [[1.0, 2.0, 3.0]]}]
    },
    "too few levels": {"levels": []},
    "unknown key": {"width": 3},
}


@pytest.mark.parametrize("name", CHANGES)
def test_changed_header_is_refused(tmp_path: Path, name: str) -> None:
    """A header that was changed breaks a rule, or its hash."""
    save_drafter(with_table(), tmp_path / "d")
    arrays, header = read_arrays(tmp_path / "d", SCHEMA)
    write_arrays(tmp_path / "x", arrays, {**header, **CHANGES[name]}, overwrite=False)
    with pytest.raises(TreeoptError, match="x") as caught:
        load_drafter(tmp_path / "x")
    assert caught.value.code in (Code.FILE_INVALID, Code.DRAFTER_INVALID)


@pytest.mark.parametrize("name", ["keys", "tokens", "ratios", "backoff", "unigram"])
@pytest.mark.parametrize("change", ["gone", "scalar", "float64", "other"])
def test_changed_array_is_refused(tmp_path: Path, name: str, change: str) -> None:
    """An array that is missing, of another shape or type, or of other content."""
    save_drafter(with_table(), tmp_path / "d")
    arrays, header = read_arrays(tmp_path / "d", SCHEMA)
    own = arrays.pop(name)
    changed = {"scalar": np.zeros((), own.dtype), "float64": own.astype(np.float64), "other": own + own.dtype.type(1)}
    if change != "gone":
        arrays[name] = changed[change]
    write_arrays(tmp_path / "x", arrays, header, overwrite=False)
    with pytest.raises(TreeoptError) as caught:
        load_drafter(tmp_path / "x")
    assert caught.value.code in (Code.FILE_INVALID, Code.DRAFTER_INVALID)


def test_names_of_0_x_are_read(tmp_path: Path) -> None:
    """A file with the names `transition`, `copied`, `outside`, `odds` and `seen` loads as the same drafter."""
    save_drafter(with_table(), tmp_path / "new")
    arrays, header = read_arrays(tmp_path / "new", SCHEMA)
    header["seen"] = header.pop("num_tokens")
    old = {"ngram": "transition", "prompt_lookup": "copied", "other_logit": "outside", "calibration_map": "odds"}
    header["levels"] = [{old.get(name, name): value for name, value in level.items()} for level in header["levels"]]
    write_arrays(tmp_path / "old", arrays, header, overwrite=False)
    save_drafter(load_drafter(tmp_path / "old"), tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == (tmp_path / "new").read_bytes()


@pytest.mark.parametrize(("before", "now"), [("plain", "heads"), ("corrected", "heads+ngram")])
def test_kinds_of_0_x_are_named(before: str, now: str) -> None:
    """An old value of --drafter is taken for a file; the error names its new value."""
    with pytest.raises(TreeoptError) as caught:
        load_drafter(before)
    assert caught.value.fix.startswith(f"--drafter {now},")
