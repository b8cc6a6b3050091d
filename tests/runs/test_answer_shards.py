"""Shards of answers: their chunks are the batches of the shard, with names that stay in the work folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from looped import looped
from refusals import refusal_of

from treeopt.calibrate.results import fill_work
from treeopt.errors import Code, TreeoptError
from treeopt.files.tensors import write_arrays
from treeopt.runs.shards import ANSWERS_SCHEMA, AnswerShard, Shard, load_answers, save_answers
from treeopt.runs.work import Work, pack_rows

SETTINGS = {"batch_size": 2}
OUTSIDE = "../evil-000001"


def crafted(path: Path, names: list[str], *, index: int = 0, count: int = 1, batches: int = 2) -> Path:
    """A file of answers with chunks of these names, as anybody can write it, with a right checksum."""
    rows, data = pack_rows([[1, 2]], prompt_ids=["p:00000000"])
    header: dict[str, Any] = {"schema": ANSWERS_SCHEMA, "shard": index, "shards": count, "batches": batches}
    header |= {"settings": SETTINGS, "chunks": dict.fromkeys(names, data)}
    write_arrays(path, {f"{name}/{key}": rows[key] for name in names for key in rows}, header, overwrite=True)
    return path


@looped(
    "name",
    [
        OUTSIDE,
        "/x/y",
        "answers-000001/../../x",
        "answers-1",
        "traces-000001",
        "answers-000001\n",
        "answers-00000\u0661",
    ],
)
def test_names_of_other_files_are_refused(tmp_path: Path, name: str) -> None:
    """A name that is not `answers-NUMBER` is E203, and nothing is written beside the file or in the folder above."""
    folder = tmp_path / "in"
    folder.mkdir()
    file = crafted(folder / "shard.safetensors", ["answers-000000", name])
    before = sorted(tmp_path.rglob("*"))
    error = refusal_of(fill_work, [file], Work(folder / "out.safetensors"))
    assert error.code is Code.FILE_INVALID
    assert "damaged header" in error.what
    assert sorted(tmp_path.rglob("*")) == before


@looped(
    ("numbers", "index", "count", "batches"),
    [
        ([0, 2], 0, 1, 2),  # a number that is not below the batches
        ([0], 0, 1, 2),  # one is missing
        ([0, 1], 0, 2, 4),  # 1 belongs to the other shard
        ([1, 3, 5], 1, 2, 4),  # one too many
        ([], 0, 3, 1),
        ([0], 0, 1, 10**15),
        ([0], 0, 1, -1),
    ],
)
def test_chunks_are_the_batches_of_the_shard(
    tmp_path: Path, numbers: list[int], index: int, count: int, batches: int
) -> None:
    """A missing batch, one of another shard and one beyond the last are E203."""
    names = [f"answers-{number:06}" for number in numbers]
    file = crafted(tmp_path / "s.safetensors", names, index=index, count=count, batches=batches)
    assert refusal_of(load_answers, file).code is Code.FILE_INVALID


def test_number_with_more_digits_is_another_name(tmp_path: Path) -> None:
    """Batch 1 has one name, so that no batch is there twice."""
    file = crafted(tmp_path / "s.safetensors", ["answers-000000", "answers-0000001"])
    with pytest.raises(TreeoptError, match="there is no answers-000001"):
        load_answers(file)


def test_whole_shards_are_read_back(tmp_path: Path) -> None:
    """Shards of three batches, one of them without any, make the work folder of a run."""
    files = []
    for index in range(4):
        chunks = {f"answers-{n:06}": pack_rows([[n]], prompt_ids=[f"p:{n:08}"]) for n in range(3) if n % 4 == index}
        files.append(tmp_path / f"{index}.safetensors")
        save_answers(AnswerShard(Shard(index, 4), 3, SETTINGS, chunks), files[-1])
    work = Work(tmp_path / "out.safetensors")
    assert fill_work(files, work) == 3
    assert sorted(path.stem for path in work.folder.glob("*.safetensors")) == [f"answers-{n:06}" for n in range(3)]


def test_batches_of_a_shard() -> None:
    """Shard i of n has the batches i, i + n, i + 2 n, ..."""
    assert [batch for batch in range(8) if Shard(1, 3).has(batch)] == [1, 4, 7]
    assert [batch for batch in range(8) if Shard(0, 3).has(batch)] == [0, 3, 6]
