"""merge: all shards of a run or calibrations of other prompts; what does not belong together is named."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from helpers import random_calibration, stretches
from looped import looped
from program import error_number, error_of, treeopt, treeopt_json

from treeopt.calibrate.results import CalibrationShard, Shard, save_shard
from treeopt.calibration import Calibration
from treeopt.files.calibrations import load_calibration, save_calibration

SETTINGS = {"model_id": "m", "batch_size": 2, "answers": "greedy", "rows": [0, 59]}


def write(index: int, count: int, name: str = "", **fields: Any) -> str:
    """Write a shard of the sixty texts: every count-th text."""
    whole: Calibration = stretches(1)
    part = whole.select(list(range(index, whole.sequences, count)))
    file = name or f"{index}.safetensors"
    save_shard(
        CalibrationShard(part, Shard(index, count), **{"batches": 60, "settings": SETTINGS, "heads": 3, **fields}), file
    )
    return file


def test_merge_writes_the_calibration() -> None:
    """Three shards give the file of the whole; standard output has its accuracies."""
    save_calibration(stretches(1), "whole.safetensors")
    files = [write(index, 3) for index in (2, 0, 1)]
    result = treeopt("merge", *files)
    assert Path("calibration.safetensors").read_bytes() == Path("whole.safetensors").read_bytes()
    assert "60 texts, 60 distinct" in result.stdout
    assert error_number(treeopt("merge", *files, status=3)) == "E202"
    assert treeopt_json("merge", *files, "--force")["prompts"] == 60


def test_wrong_shards_are_named() -> None:
    """A missing shard is E224 with its command; one given twice, and one beside a calibration, are named."""
    result = error_of(
        "E224", "merge", write(1, 4, "a.safetensors"), write(3, 4, "b.safetensors"), "-o", "out.safetensors"
    )
    assert "0/4, 2/4 are missing" in result
    assert "--shard 0/4" in result
    assert not Path("out.safetensors").exists()
    assert "shard 1/2 is given twice: 1.safetensors and again.safetensors" in error_of(
        "E224", "merge", write(0, 2), write(1, 2), write(1, 2, "again.safetensors")
    )
    assert error_number(treeopt("merge", "0.safetensors", "0.safetensors", "1.safetensors", status=3)) == "E224"
    save_calibration(stretches(1), "whole.safetensors")
    assert "merge all shards of the run first" in error_of("E224", "merge", "0.safetensors", "whole.safetensors")


@looped(
    ("fields", "line"),
    [
        ({"settings": {**SETTINGS, "batch_size": 4}}, "batch_size: 2 and 4"),
        ({"settings": {**SETTINGS, "answers": "given"}}, 'answers: "greedy" and "given"'),
        ({"settings": {**SETTINGS, "rows": [0, 9]}}, "rows: [0, 59] and [0, 9]"),
        ({"settings": {**SETTINGS, "torch": "9"}}, 'torch: null and "9"'),
        ({"settings": {**SETTINGS, "threads": 4}}, "threads: null and 4"),
        ({"batches": 61}, "batches: 60 and 61"),
    ],
)
def test_other_settings_are_named(fields: dict[str, Any], line: str) -> None:
    """Shards of runs with other settings are E221 with the setting and both values."""
    assert line in error_of("E221", "merge", write(0, 2), write(1, 2, **fields))


def test_damaged_or_missing_file_beside_a_shard() -> None:
    """A shard that is missing, cut or empty is named as such, and not as a file of another kind."""
    shard, whole = write(0, 2), Path(write(1, 2)).read_bytes()
    for name, content, number in (("cut", whole[:700], "E203"), ("empty", b"", "E203"), ("nowhere", None, "E201")):
        if content is not None:
            Path(name).write_bytes(content)
        result = treeopt("merge", shard, name, status=3)
        assert error_number(result) == number, name
        assert name in result.stderr


def test_calibrations_of_other_prompts() -> None:
    """Calibrations are joined by prompt, in any order; other settings are E221."""
    one, two = random_calibration(1, sequences=5), random_calibration(2, sequences=4)
    ids = tuple(f"other:{i:08}" for i in range(4))
    save_calibration(one, "one.safetensors")
    save_calibration(dataclasses.replace(two, prompt_ids=ids), "two.safetensors")
    treeopt("merge", "one.safetensors", "two.safetensors", "-o", "a.safetensors")
    treeopt("merge", "two.safetensors", "one.safetensors", "-o", "b.safetensors")
    assert Path("a.safetensors").read_bytes() == Path("b.safetensors").read_bytes()
    merged = load_calibration("a.safetensors")
    assert merged.sequences == 9
    assert merged.positions == one.positions + two.positions
    settings = dataclasses.replace(two.provenance, settings={"answers": "given"})
    save_calibration(dataclasses.replace(two, provenance=settings), "other.safetensors")
    assert error_number(treeopt("merge", "one.safetensors", "other.safetensors", status=3)) == "E221"


def test_build_refuses_a_shard() -> None:
    """A shard is no calibration: the error names the command that makes one."""
    assert "treeopt merge" in error_of("E203", "build", "--nodes", "4", "--calibration", write(0, 2), "-o", "tree.yaml")


@looped("value", ["1", "1/1", "-1/2", "2/2", "0/0", "a/b", "1/2/3"])
@pytest.mark.usefixtures("unloaded")
def test_wrong_shards_are_usage_errors(value: str) -> None:
    """--shard is i/n with i from 0 to n - 1."""
    treeopt("calibrate", "--shard", value, status=2)


@looped(
    "chosen",
    ["--drafter heads+ngram", "--model x --prompts p.jsonl", "--kind dynamic", "--drafter ngram --responses a.jsonl"],
)
@pytest.mark.usefixtures("unloaded")
def test_no_drafter_is_learned_from_a_shard(chosen: str) -> None:
    """A usage error, before anything is loaded, says to learn the drafter first."""
    result = treeopt("calibrate", *chosen.split(), "--shard", "0/2", status=2)
    assert "treeopt learn, then calibrate --drafter FILE --shard i/n" in " ".join(result.stderr.split())


def folder(name: str, monkeypatch: pytest.MonkeyPatch, top: Path) -> Path:
    """Go to a folder of its own, so that two runs have outputs of one name."""
    (top / name).mkdir()
    monkeypatch.chdir(top / name)
    return top / name


def test_shards_on_other_devices_give_the_file_of_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file of `merge` has the bytes of the one command, configuration and all, whatever --device was typed."""
    common = ["calibrate", "--limit", "5", "--max-new-tokens", "6", "--batch-size", "2", "-q"]
    whole = folder("whole", monkeypatch, tmp_path)
    treeopt(*common)
    parts = folder("parts", monkeypatch, tmp_path)
    treeopt(*common, "--shard", "0/2", "--device", "cpu")
    treeopt(*common, "--shard", "1/2")
    treeopt("merge", "calibration.1-of-2.safetensors", "calibration.0-of-2.safetensors", "-q")
    name = "calibration.safetensors"
    assert (parts / name).read_bytes() == (whole / name).read_bytes()
    assert load_calibration(name).provenance.configuration["calibrate"]["limit"] == 5


def test_other_options_are_named() -> None:
    """Shards whose options differ beside the settings, such as the name of the model, are E221 with the option."""
    whole = stretches(1)
    files = []
    for i, (given, others) in enumerate([({"model": "a"}, {"seed": 0}), ({"model": "b", "seed": 0}, {})]):
        part = whole.select(range(i, whole.sequences, 2))
        made = dataclasses.replace(part.provenance, configuration={"calibrate": given, "defaults": others})
        shard = CalibrationShard(dataclasses.replace(part, provenance=made), Shard(i, 2), 60, SETTINGS, 3)
        files.append(f"{i}.safetensors")
        save_shard(shard, files[-1])
    result = error_of("E221", "merge", *files)
    for line in ('--model: "a" and "b"', "--seed: null and 0", "--seed (default): 0 and null"):
        assert line in result
