"""Shards that are written by hand, without a model, and what joins or refuses them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import make_calibration
from looped import looped

from treeopt.calibrate.results import CalibrationShard, Shard, merge_calibrations, merge_shards, save_shard
from treeopt.calibration import Calibration
from treeopt.errors import Code, TreeoptError
from treeopt.files.calibrations import save_calibration
from treeopt.texts.prompts import Skipped

SETTINGS = {"batch_size": 2, "eos": [1]}


def traced(number: int, **configuration: Any) -> Calibration:
    """A calibration of one text of two tokens."""
    made = make_calibration([np.array([[number], [0]])], ids=[f"set:{number:08}"])
    return dataclasses.replace(made, provenance=dataclasses.replace(made.provenance, configuration=configuration))


def part(index: int, count: int, *, batches: int = 2, settings: Any = None, **configuration: Any) -> CalibrationShard:
    """A shard with one text, in which one later turn was left out."""
    skipped = (Skipped("set:long", 900, "too long"),)
    turns = (Skipped(f"set:{index:08}.1", 800, "turn"),)
    shard = Shard(index, count)
    return CalibrationShard(traced(index, **configuration), shard, batches, settings or SETTINGS, 1, 4, skipped, turns)


def refusal(parts: list[CalibrationShard]) -> TreeoptError:
    """Why shards, whose files are a, b, c, ..., are not joined."""
    with pytest.raises(TreeoptError) as caught:
        merge_shards(list(zip("abcdefghijklmnop", parts, strict=False)))
    return caught.value


def test_shards_are_joined_by_their_number() -> None:
    """Texts by id; prompts that were left out once, and the turns of each shard in the order of the shards."""
    run = merge_shards([("x", part(1, 2)), ("y", part(0, 2))])
    assert run.calibration.prompt_ids == ("set:00000000", "set:00000001")
    assert run.calibration.ranks[:, 0].tolist() == [0, 255, 1, 255]
    names = ["set:long", "set:00000000.1", "set:00000001.1"]
    assert [(one.prompt_id, one.tokens) for one in run.skipped] == list(zip(names, (900, 800, 800), strict=True))
    assert (run.answers_cut, run.heads, run.learned) == (4, 1, None)


def test_shards_of_other_runs_are_refused() -> None:
    """E221 names the settings that differ, with both values; the options in files among them."""
    error = refusal([part(0, 2), part(1, 2, settings={**SETTINGS, "eos": [1, 2]})])
    assert error.code is Code.CALIBRATION_MISMATCH
    assert error.what == "the shards a and b differ in eos"
    assert error.at == "eos: [1] and [1, 2]"
    assert refusal([part(0, 2), part(1, 2, batches=3)]).at == "batches: 2 and 3"
    assert refusal([part(0, 2), part(1, 2, settings={"batch_size": 2})]).at == "eos: [1] and null"
    error = refusal([part(0, 2, calibrate={"seed": 1}), part(1, 2, calibrate={"seed": 2})])
    assert error.at == "--seed: 1 and 2"
    error = refusal([part(0, 2, defaults={"seed": 1}), part(1, 2, defaults={"seed": 2})])
    assert error.at == "--seed (default): 1 and 2"
    error = refusal([part(0, 2), part(1, 3)])
    assert (error.code, error.what) == (Code.SHARDS_INCOMPLETE, "a is one of 2 shards, and b one of 3")


@looped("given, count, what", [
    ([0, 1, 1], 3, "shard 1/3 is given twice: b and c"),
    ([1, 1, 0, 0], 3, "shard 0/3 is given twice: c and d"),
    ([0], 2, "1 of 2 shards are given; 1/2 is missing"),
    ([1], 3, "1 of 3 shards are given; 0/3, 2/3 are missing"),
    ([0], 9, "1 of 9 shards are given; 1/9, 2/9, 3/9, 4/9, 5/9, 6/9, 7/9, 8/9 are missing"),
    ([0, 2], 11, "2 of 11 shards are given; 1/11, 3/11, 4/11, 5/11, 6/11, 7/11, 8/11, 9/11 and 1 more are missing"),
])  # fmt: skip
def test_shards_that_are_not_whole_are_refused(given: list[int], count: int, what: str) -> None:
    """E224 names the shard that is there twice, or at most eight of those that are missing."""
    error = refusal([part(index, count) for index in given])
    assert (error.code, error.what) == (Code.SHARDS_INCOMPLETE, what)
    missing = next((i for i in range(count) if i not in given), None)
    assert error.fix == (
        f"leave out {what[-1]}"
        if "twice" in what
        else f"the same treeopt calibrate command with --shard {missing}/{count}"
    )


def test_files_of_several_kinds(tmp_path: Path) -> None:
    """Calibrations are joined, shards are joined; both together are refused with what to do."""
    one, other, shard = (tmp_path / name for name in ("a", "b", "c"))
    save_calibration(traced(0), one)
    save_calibration(traced(1), other)
    save_shard(part(0, 1), shard)
    assert merge_calibrations([other, one]).calibration.prompt_ids == ("set:00000000", "set:00000001")
    assert (merge_calibrations([one]).heads, merge_calibrations([one]).answers_cut) == (1, 0)
    assert merge_calibrations([shard]).calibration.prompt_ids == ("set:00000000",)
    with pytest.raises(TreeoptError) as caught:
        merge_calibrations([one, shard])
    what = f"{shard} is a shard of a calibration, and {one} is not"
    assert (caught.value.code, caught.value.what) == (Code.SHARDS_INCOMPLETE, what)
    save_shard(part(0, 1), tmp_path / "b2")
    with pytest.raises(TreeoptError) as caught:
        merge_calibrations([shard, tmp_path / "b2"])
    assert caught.value.what == f"shard 0/1 is given twice: {tmp_path / 'b2'} and {shard}"
    for missing in ([tmp_path / "none"], [shard, tmp_path / "none"]):
        with pytest.raises(TreeoptError) as caught:
            merge_calibrations(missing)
        assert caught.value.code is Code.FILE_MISSING
    with pytest.raises(ValueError, match="no calibration to merge"):
        merge_calibrations([])
    drafted = traced(0)
    drafted = dataclasses.replace(drafted, provenance=dataclasses.replace(drafted.provenance, drafter_id="d"))
    save_calibration(drafted, tmp_path / "e")
    assert merge_calibrations([tmp_path / "e"]).heads == 0
