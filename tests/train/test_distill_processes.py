"""Distill in several processes: the bytes of one, and a run that was cut off is continued by any number of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from runs import Cut
from teams import together
from tiny import chat_base

from treeopt.runs.processes import Processes
from treeopt.runs.work import Work
from treeopt.train.distill import Distilled, distill

BASES = [chat_base(disturbed=0.3) for _ in range(2)]  # equal; one after the other, as torch has one generator
REQUESTS = [f"w{i} w{2 * i}" for i in range(1, 8)]


def distilled(path: Path, team: Processes | None = None, **options: Any) -> Distilled:
    """A run of four batches; each thread has a model of its own, as `generate` changes its model's settings."""
    rows = path.with_name(path.name + ".rows")
    begun = rows.with_name(rows.name + ".partial").exists()
    work = None
    if team is not None or begun:
        work = Work(rows, resume=options.get("resume", False) and begun, team=team)
    return distill(
        BASES[0 if team is None else team.rank], REQUESTS, path, max_new_tokens=8, batch_size=2, work=work, **options
    )


def test_the_bytes_and_counts_are_those_of_one_process(tmp_path: Path) -> None:
    """Two processes write the file of one, and nothing is left beside it."""
    alone = distilled(tmp_path / "alone.jsonl")
    first, second = together(lambda one: distilled(tmp_path / "out.jsonl", one), 2)
    assert isinstance(second, SystemExit)
    assert first == alone
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "alone.jsonl").read_bytes()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["alone.jsonl", "out.jsonl"]


def test_a_run_that_was_killed_at_its_begin_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder of the rows alone, without the unfinished file, is a run that --resume continues."""
    out = tmp_path / "out.jsonl"

    def killed(_self: Path) -> None:
        raise Cut

    with monkeypatch.context() as patch:
        patch.setattr(Path, "touch", killed)
        assert isinstance(together(lambda one: distilled(out, one), 1)[0], Cut)
    assert [file.name for file in tmp_path.iterdir()] == ["out.jsonl.rows.partial"]
    distilled(out, resume=True)
    distilled(tmp_path / "alone.jsonl")
    assert out.read_bytes() == (tmp_path / "alone.jsonl").read_bytes()


@pytest.mark.parametrize("size", [1, 2])
def test_a_run_that_was_cut_off_is_continued(tmp_path: Path, size: int) -> None:
    """After a cut while batches are made, and one while they are appended, the finished ones are kept."""
    distilled(tmp_path / "alone.jsonl")
    out, folder = tmp_path / "out.jsonl", tmp_path / "out.jsonl.rows.partial"

    def cut(done: int, _total: int, _note: str) -> None:
        if done == 2:
            raise Cut

    [error] = together(lambda one: distilled(out, one, progress=cut), 1)
    assert isinstance(error, Cut)
    assert len(list(folder.glob("rows-*"))) == 2
    with pytest.raises(Cut):
        distilled(out, resume=True, progress=cut)
    assert out.with_name("out.jsonl.partial").stat().st_size
    if size == 1:
        distilled(out, resume=True)
    else:
        together(lambda one: distilled(out, one, resume=True), size)
    assert out.read_bytes() == (tmp_path / "alone.jsonl").read_bytes()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["alone.jsonl", "out.jsonl"]
