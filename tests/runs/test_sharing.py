"""A work folder that several processes share: who makes what, what they agree on, and how they end."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from looped import looped
from teams import team, together

from treeopt.errors import Code, TreeoptError
from treeopt.runs import work as sharing_module
from treeopt.runs.processes import Processes, ProcessFailed
from treeopt.runs.work import Chunk, Work, chunk_name

SETTINGS = {"threads": 1}


def making(made: list[str]) -> Callable[[int], Chunk]:
    """What makes chunks of numbers, and notes their names."""

    def make(number: int) -> Chunk:
        made.append(chunk_name("part", number))
        return {"number": np.array([number])}, {}

    return make


def numbers(chunks: Iterable[Chunk]) -> list[int]:
    """The numbers in chunks."""
    return [int(arrays["number"][0]) for arrays, _ in chunks]


def begun(folder: Path, **options: Any) -> Callable[[Processes], Work]:
    """A function from a process to its view of a work folder in which the run has begun."""

    def begin(one: Processes) -> Work:
        work = Work(folder / "out.safetensors", team=one, **options)
        work.begin(SETTINGS)
        return work

    return begin


@looped(("size", "count"), [(2, 7), (3, 2), (3, 0)])
def test_each_chunk_is_made_once_and_read_by_all(tmp_path: Path, size: int, count: int) -> None:
    """With 2 processes and 3, with fewer chunks than processes too; no process makes a chunk again."""
    made: list[str] = []

    def run(one: Processes) -> list[int]:
        work, make = begun(tmp_path)(one), making(made)
        first = numbers(work.each("part", range(count), make))
        return first + numbers(work.each("part", range(count, 2 * count), make))

    assert together(run, size) == [[*range(2 * count)]] * size
    assert sorted(made) == [chunk_name("part", i) for i in range(2 * count)]


def test_chunks_that_are_there_are_not_made_again(tmp_path: Path) -> None:
    """A resumed run of two processes makes the missing chunks, and reports as many as there are."""
    made: list[str] = []
    alone = Work(tmp_path / "out.safetensors")
    alone.begin(SETTINGS)
    assert numbers(alone.each("part", [1, 3], making(made))) == [1, 3]
    alone.release()
    made.clear()
    calls: list[int] = []

    def run(one: Processes) -> None:
        begun(tmp_path, resume=True)(one).each("part", range(5), making(made), lambda *call: calls.append(call[0]))

    assert together(run, 2) == [None, None]
    assert sorted(made) == [chunk_name("part", i) for i in (0, 2, 4)]
    assert sorted(calls) == [1, 2, 3, 4, 5]


def test_only_the_first_process_deletes(tmp_path: Path) -> None:
    """The others follow it, and none of them deletes the folder."""

    def run(one: Processes) -> bool:
        work = begun(tmp_path)(one)
        work.each("part", range(1), making([]))
        if one.rank:
            work.remove()
        return work.follows

    assert together(run, 2) == [False, True]
    assert [file.name for file in sorted((tmp_path / "out.safetensors.partial").iterdir())] == [
        "begun.json",
        "part-000000.safetensors",
    ]


def test_chunks_are_not_deleted_before_all_processes_see_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first process may delete the folder after the last chunks: a slower one has looked at them by then."""
    whole = Work._await_files

    def slow(self: Work, files: Sequence[Path]) -> None:
        if self.follows:
            time.sleep(0.3)
        whole(self, files)

    monkeypatch.setattr(sharing_module, "_VISIBLE", 0.2)
    monkeypatch.setattr(Work, "_await_files", slow)

    def run(one: Processes) -> None:
        work = begun(tmp_path)(one)
        work.each("part", range(2), making([]))
        work.remove()

    assert together(run, 2) == [None, None]


def test_other_settings_of_a_process_are_named(tmp_path: Path) -> None:
    """A process with another number of threads ends with E406, which names both numbers."""

    def run(one: Processes) -> None:
        Work(tmp_path / "out.safetensors", team=one).begin({"threads": 1 + one.rank})

    first, second = together(run, 2)
    assert first is None
    assert isinstance(second, TreeoptError)
    assert second.code is Code.PROCESSES_DIFFER
    assert "threads: started with 1, now 2" in second.at


def test_a_folder_of_another_machine_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that sees no folder, or another one of the same name and settings, ends with E406."""
    monkeypatch.setattr(sharing_module, "_VISIBLE", 0.2)
    for other in ("missing", "other"):
        if other == "other":
            Work(tmp_path / "other" / "out.safetensors").begin(SETTINGS)

        def run(one: Processes, other: str = other) -> None:
            place = tmp_path / (other if one.rank else f"of-{other}")
            begun(place)(one)

        first, second = together(run, 2)
        assert first is None
        assert isinstance(second, TreeoptError)
        assert second.code is Code.PROCESSES_DIFFER
        assert "process 1 does not see" in second.what


def test_results_that_differ_are_noticed(tmp_path: Path) -> None:
    """Where two processes computed different drafters every process ends with E406."""

    def run(one: Processes) -> None:
        work = begun(tmp_path)(one)
        work.agree("table", "same")
        work.agree("drafter", f"{one.rank}")

    for error in together(run, 2):
        assert isinstance(error, TreeoptError)
        assert error.code is Code.PROCESSES_DIFFER
        assert "process 1 computed another drafter" in error.what


def test_a_stopped_run_stores_the_chunks_in_flight(tmp_path: Path) -> None:
    """After `stop` in the first process every process stores its chunk in flight and makes no other."""
    made: list[str] = []
    both = threading.Barrier(2)

    def run(one: Processes) -> None:
        work = begun(tmp_path)(one)

        def in_flight(number: int) -> Chunk:
            both.wait()
            if one.rank == 0:
                work.stop()
            both.wait()
            return making(made)(number)

        work.each("part", range(6), in_flight)

    assert all(isinstance(error, KeyboardInterrupt) for error in together(run, 2))
    assert sorted(made) == ["part-000000", "part-000001"]
    assert Work(tmp_path / "out.safetensors", resume=True).chunks == 2


def test_an_error_of_another_process_ends_the_first(tmp_path: Path) -> None:
    """The first process raises the error of another one, with its number, instead of waiting for it."""

    def run(one: Processes) -> None:
        work = begun(tmp_path)(one)
        if one.rank == 1:
            assert one.fail(TreeoptError(Code.OUT_OF_MEMORY, "full", at="here").as_dict())
            return
        try:
            work.each("part", range(3), making([]))
        finally:
            one.close()

    first, second = together(run, 2)
    assert second is None
    assert isinstance(first, ProcessFailed)
    assert first.report["error"] == "E403"
    assert first.report["at"] == "here\nprocess 1"


def test_the_first_error_counts() -> None:
    """Of two processes that fail, the first process hears of the first error."""
    first, second, third = team(3)
    reports = [{**TreeoptError(Code.OUT_OF_MEMORY, what).as_dict()} for what in ("one", "two")]
    first.close()
    assert all(one.fail(report) for one, report in zip((second, third), reports, strict=True))
    with pytest.raises(ProcessFailed, match="one"):
        first.take("stage")


def test_a_process_that_left_is_not_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    """However a process leaves a run, the first one counts it among those that have stopped."""
    monkeypatch.setattr(time, "sleep", lambda _seconds: pytest.fail("the first process waits"))
    first, *others = team(3)
    for one in others:
        one.close()
    first.stop()
    first.await_stopped()


def test_the_others_do_not_outlive_the_first() -> None:
    """After the end of the first process the others take and await nothing; messages that have come are read."""
    first, second = team(2)
    first.close()
    for wait in (lambda: second.take("stage"), lambda: second.meet("stage", "", waiting=lambda: None)):
        with pytest.raises(TreeoptError, match="process 0 has ended") as caught:
            wait()
        assert caught.value.code is Code.PROCESS_ENDED
    assert second.meet("last", "b", waiting=lambda: first.meet("last", "a", waiting=pytest.fail)) == ["a", "b"]


def test_settings_are_compared_as_files_hold_them(tmp_path: Path) -> None:
    """Tuples of the settings are lists in the file, and equal to those of the other processes."""

    def run(one: Processes) -> None:
        Work(tmp_path / "out.safetensors", team=one).begin({"rows": (0, 1)})

    assert together(run, 2) == [None, None]
    assert json.loads((tmp_path / "out.safetensors.partial" / "begun.json").read_text()) == {"rows": [0, 1]}
