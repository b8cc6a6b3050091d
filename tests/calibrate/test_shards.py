"""Shards: together they give the bytes of the whole run, whatever their number and order."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drafters import answered, learned, planted, prompts_of
from tiny import chat_base

from treeopt.calibrate.pipeline import run_calibration
from treeopt.calibrate.results import Shard, load_shard, merge_calibrations, save_shard
from treeopt.drafter import Drafter
from treeopt.drafting.learn import Learning
from treeopt.errors import Code, TreeoptError
from treeopt.evaluate.learn_drafter import learn_drafter
from treeopt.files.calibrations import load_calibration, save_calibration
from treeopt.models.base import Base
from treeopt.texts.prompts import Prompt, PromptSet

NEW = 10
# Seven dialogues of one to three turns; by the length of the first turn, and by row where equal, two make a batch.
TURNS = (("w2 w4 w6",), ("w3", "w5"), ("w9 w8",), ("w6", "w7", "w8"), ("w1 w2 w3 w4",), ("w5 w5", "w9"), ("w7",))
BATCHES = ((1, 3), (6, 2), (5, 0), (4,))  # rows, by hand


@pytest.fixture(scope="module")
def base() -> Base:
    """A model with a chat template, whose answers depend on the text before them."""
    return chat_base(disturbed=0.3)


@pytest.fixture(scope="module")
def drafter(base: Base) -> Drafter:
    """A drafter without heads for it."""
    return learned(base, None, answered(base, prompts_of(1, 12), NEW), new=NEW, levels=4).drafter


def dialogues() -> PromptSet:
    """The dialogues as a set of prompts."""
    prompts = [
        Prompt(f"set:{i:08}", ({"role": "user", "content": first},), None, None, later=later)
        for i, (first, *later) in enumerate(TURNS)
        for later in [tuple(later)]
    ]
    return PromptSet("set", "sha", tuple(prompts))


def bytes_of(path: Path, calibration: Any) -> bytes:
    """The file of a calibration."""
    save_calibration(calibration, path, overwrite=True)
    return path.read_bytes()


def shards(folder: Path, count: int, base: Base, **options: Any) -> list[Path]:
    """The files of all shards of a run."""
    files = []
    for index in range(count):
        run = run_calibration(base, None, dialogues(), max_new_tokens=NEW, shard=Shard(index, count), **options)
        assert run.part is not None
        files.append(folder / f"{index}.safetensors")
        save_shard(run.part, files[-1])
    return files


KINDS = {
    "greedy": {},
    "sampled": {"temperature": 0.8, "seed": 5},
    "per-step trees": {"steps": True},
    "sampled per-step trees": {"temperature": 0.8, "steps": True},
}


@pytest.mark.parametrize(("kind", "count"), list(zip(KINDS, (3, 2, 6, 1), strict=True)))
def test_shards_give_the_bytes_of_the_whole_run(
    tmp_path: Path, base: Base, drafter: Drafter, kind: str, count: int
) -> None:
    """For one to six shards of four batches, two of them empty, in any order."""
    options: dict[str, Any] = {"drafter": drafter, "batch_size": 2, **KINDS[kind]}
    whole = run_calibration(base, None, dialogues(), max_new_tokens=NEW, **options)
    expected = bytes_of(tmp_path / "whole.safetensors", whole.calibration)
    files = shards(tmp_path, count, base, **options)
    for order in itertools.islice(itertools.permutations(files), 6):
        merged = merge_calibrations(order)
        assert bytes_of(tmp_path / "merged.safetensors", merged.calibration) == expected
        assert (merged.skipped, merged.answers_cut) == (whole.skipped, whole.answers_cut)


def test_shards_have_the_batches_of_their_number(tmp_path: Path, base: Base, drafter: Drafter) -> None:
    """Of the batches by length, shard i of n has i, i + n, i + 2 n, with all turns of their dialogues."""
    files = shards(tmp_path, 3, base, drafter=drafter, batch_size=2)
    found = []
    for index, file in enumerate(files):
        part = load_shard(file)
        assert (part.shard, part.batches) == (Shard(index, 3), 4)
        found.append({int(prompt.split(":")[1].split(".")[0]) for prompt in part.calibration.prompt_ids})
    assert found == [{*BATCHES[0], *BATCHES[3]}, {*BATCHES[1]}, {*BATCHES[2]}]
    assert sum(load_shard(file).calibration.sequences for file in files) == sum(map(len, TURNS))


def test_heads_alone_in_shards(tmp_path: Path) -> None:
    """The heads without a drafter, with prompts that do not fit, and turns that do not."""
    base, heads = chat_base(disturbed=0.3), planted()[1]
    long = " ".join(["w3"] * 300)
    rows = [("w2", ()), ("w3", ("w4", long)), (long, ()), ("w5", (long,))]
    prompts = tuple(
        Prompt(f"set:{i:08}", ({"role": "user", "content": first},), None, None, later=later)
        for i, (first, later) in enumerate(rows)
    )
    options: dict[str, Any] = {"max_new_tokens": NEW, "batch_size": 1}
    whole = run_calibration(base, heads, PromptSet("set", "sha", prompts), **options)
    files = []
    for index in (1, 0):
        run = run_calibration(base, heads, PromptSet("set", "sha", prompts), shard=Shard(index, 2), **options)
        assert run.part is not None
        save_shard(run.part, tmp_path / f"{index}.safetensors")
        files.append(tmp_path / f"{index}.safetensors")
    merged = merge_calibrations(files)
    assert bytes_of(tmp_path / "m", merged.calibration) == bytes_of(tmp_path / "w", whole.calibration)
    assert len(whole.skipped) == 3
    assert set(merged.skipped) == set(whole.skipped)
    assert merged.heads == whole.heads == 3


def test_given_answers_in_shards(tmp_path: Path, base: Base, drafter: Drafter) -> None:
    """Answers from a file are traced in shards; the number of cut ones is that of the run."""
    rows = [{"text": f"w{i} w{i + 1}", "output": " ".join(["w4"] * (9 + i))} for i in range(1, 6)]
    options: dict[str, Any] = {"drafter": drafter, "responses": True, "max_new_tokens": NEW, "batch_size": 2}
    whole = run_calibration(base, None, rows, **options)
    files = []
    for index in range(2):
        run = run_calibration(base, None, rows, shard=Shard(index, 2), **options)
        assert run.part is not None
        save_shard(run.part, tmp_path / f"{index}.safetensors")
        files.append(tmp_path / f"{index}.safetensors")
    merged = merge_calibrations(files[::-1])
    assert bytes_of(tmp_path / "m", merged.calibration) == bytes_of(tmp_path / "w", whole.calibration)
    assert merged.answers_cut == whole.answers_cut == 4


def test_sampling_is_seeded_by_the_batch(base: Base, drafter: Drafter) -> None:
    """The state of the generator before a run does not matter, and seeds give other texts."""
    options: dict[str, Any] = {"drafter": drafter, "batch_size": 2, "temperature": 1.5, "max_new_tokens": NEW}
    one, same = (run_calibration(base, None, dialogues(), seed=1, **options).calibration for _ in range(2))
    assert one.token_hashes == same.token_hashes
    assert one.token_hashes != run_calibration(base, None, dialogues(), seed=2, **options).calibration.token_hashes


def test_shard_files_are_read_back(tmp_path: Path, base: Base, drafter: Drafter) -> None:
    """A shard is written and read with all its fields; `build` and others name the command that merges."""
    files = shards(tmp_path, 2, base, drafter=drafter, batch_size=2, steps=True)
    part = load_shard(files[1])
    save_shard(part, tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == files[1].read_bytes()
    assert part.settings["batch_size"] == 2
    assert part.settings["drafter_id"] == drafter.id
    assert np.array_equal(part.calibration.offsets[:1], [0])
    with pytest.raises(TreeoptError) as caught:
        load_calibration(files[0])
    assert caught.value.code is Code.FILE_INVALID
    assert "treeopt merge" in caught.value.fix


@pytest.mark.parametrize(("index", "count"), [(1, 1), (-1, 2), (0, 0), (3, 2)])
def test_shards_are_counted_from_0(index: int, count: int) -> None:
    """An index outside 0 to n - 1 is refused."""
    with pytest.raises(ValueError, match="counted from 0"):
        Shard(index, count)


def test_no_drafter_is_learned_from_a_shard(base: Base) -> None:
    """A drafter needs all texts, so learning in a shard is refused."""
    with pytest.raises(ValueError, match="learn a drafter of all prompts first"):
        run_calibration(base, None, dialogues(), learning=Learning(100), shard=Shard(0, 2))
    with pytest.raises(ValueError, match="learn a drafter of all prompts first"):
        learn_drafter(base, dialogues(), shard=Shard(0, 2))
