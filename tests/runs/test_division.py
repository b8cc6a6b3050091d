"""Work that processes divide through a store or a shared folder: each part made once, known to all, and their ends."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drafters import prompts_of
from looped import looped
from teams import team, together
from tiny import cycle_heads, tiny_base

from treeopt.errors import Code, TreeoptError
from treeopt.evaluate.runs import Measured
from treeopt.evaluate.validate import divided_validate, make_inputs, validate
from treeopt.models.base import Base
from treeopt.models.given import load_pair
from treeopt.progress import silent
from treeopt.runs import work as sharing_module
from treeopt.runs.processes import Processes, ProcessFailed
from treeopt.runs.work import ALONE, BatchRun, Chunk, Work, chunk_name
from treeopt.tree import Tree

NEW = 10


@looped(("size", "count"), [(2, 7), (3, 2), (3, 0)])
def test_each_part_is_made_once_and_known_to_all(size: int, count: int) -> None:
    """With 2 processes and 3, with fewer parts than processes too, and twice in a row."""
    made: list[int] = []

    def run(one: Processes) -> list[Any]:
        division = BatchRun(one)
        first = division.each("one", range(count), lambda i: made.append(i) or {"part": [i, 0.1 * i, None]})
        return [list(first), list(division.each("two", [7, 9], lambda i: i))]

    expected = [[{"part": [i, 0.1 * i, None]} for i in range(count)], [7, 9]]
    assert together(run, size) == [expected] * size
    assert sorted(made) == list(range(count))
    assert run_alone(count) == expected[0]


def run_alone(count: int) -> list[Any]:
    """The same parts by one process without a store."""
    return list(ALONE.each("one", range(count), lambda i: {"part": [i, 0.1 * i, None]}))


@pytest.mark.slow
def test_parts_of_any_size() -> None:
    """A part of more bytes than the store takes at once, which cannot be compressed much."""
    text = "".join(chr(33 + (i * i * 7919 + i) % 20_000) for i in range(5_000_000))
    found = together(lambda one: list(BatchRun(one).each("one", range(1), lambda _: text)), 2)
    assert found == [[text], [text]]


def test_sums_are_of_all_processes_and_new_each_time() -> None:
    """Two processes add to one sum; the next tally begins with 0; so does that of one process."""

    def run(one: Processes) -> list[int]:
        division = BatchRun(one)
        add = division.tally()
        division.each("one", range(4), lambda i: add("texts", i))
        division.check_same(dict)
        sums = [add("texts", 0), division.tally()("texts", 0)]
        division.each("two", [], lambda i: i)
        return sums

    assert together(run, 2) == [[6, 0]] * 2
    alone: BatchRun[Any] = BatchRun()
    add = alone.tally()
    assert [add("a", 2), add("a", 3), add("b", 1), alone.tally()("a", 0)] == [2, 5, 1, 0]


def test_settings_that_differ_are_an_error() -> None:
    """Processes with different settings, or numbers of parts, end with an error that names what differs."""

    def other_settings(one: Processes) -> None:
        BatchRun(one).check_same(lambda: {"threads": 1 + one.rank, "seed": 3})

    def other_parts(one: Processes) -> None:
        BatchRun(one).each("one", range(6 + one.rank), lambda i: i)

    def texts_of(function: Callable[[Processes], None]) -> list[str]:
        found = [str(error) for error in together(function, 2) if isinstance(error, TreeoptError)]
        assert found
        return found

    assert all("threads: started with 1, now 2" in text for text in texts_of(other_settings))
    assert all("process 1 computed another number of parts" in text for text in texts_of(other_parts))
    ALONE.check_same(lambda: pytest.fail("one process alone compares nothing"))


def validated(base: Base, heads: Any, tree: Tree, prompts: Any, **options: Any) -> Measured | None:
    """A validation in one of several processes, as the command makes it."""
    return divided_validate(*make_inputs(base, heads, tree, prompts, None, None, options), silent)


def figures(found: Measured | None) -> list[Any]:
    """All that does not depend on the clock: the texts, their steps, what was predicted and skipped."""
    assert found is not None
    runs = [
        (trial.text.prompt_id, trial.text.turn, name, [(run.tokens, run.step_lengths, run.drafts) for run in repeats])
        for trial in found.metrics.trials
        for name, repeats in trial.runs.items()
    ]
    more = [getattr(found, name, None) for name in ("differences", "skipped")]
    return [runs, found.texts, found.predicted.tokens_per_step, found.left_out, *more]


def divided(function: Callable[[BatchRun[Any]], Any], size: int) -> Any:
    """What the first of several processes returns; the others return None."""
    first, *others = together(lambda one: function(BatchRun(one)), size)
    assert others == [None] * (size - 1)
    if isinstance(first, BaseException):
        raise first
    return first


def test_validate_finds_the_same() -> None:
    """The texts, steps and predictions of one process and of two are equal, with repeats and batches."""
    options: dict[str, Any] = {"batch_size": 2, "repeats": 2}
    base = tiny_base("llama")
    heads, tree = cycle_heads(base, 2, 1), Tree.chain(2)

    def run(division: BatchRun[Any]) -> Measured | None:
        return validated(base, heads, tree, prompts_of(5, 5), max_new_tokens=NEW, division=division, **options)

    assert figures(divided(run, 2)) == figures(run(ALONE))


def test_processes_that_decode_something_else_are_an_error() -> None:
    """Another number of tokens in one process is named, before texts of two kinds are mixed."""
    base, heads = tiny_base("llama"), cycle_heads(tiny_base("llama"), 2, 1)

    def run(one: Processes) -> Any:
        options: dict[str, Any] = {"max_new_tokens": NEW - one.rank, "division": BatchRun(one)}
        return validate(base, heads, Tree.chain(2), prompts_of(5, 5), **options)

    *_, other = together(run, 2)
    assert isinstance(other, TreeoptError)
    assert f"max_new_tokens: started with {NEW}, now {NEW - 1}" in other.at
    assert other.code is Code.PROCESSES_DIFFER


@pytest.mark.slow
def test_dialogues_stay_whole() -> None:
    """Later turns follow the answers to the turns before, in the process that made these, or are skipped."""
    turns = [{"turns": ["import os", f"def f{i}():", "x" * (900 if i == 1 else 3)]} for i in range(3)]
    base, heads = load_pair("pocket", "pocket")
    options: dict[str, Any] = {"max_new_tokens": NEW, "batch_size": 2}

    def run(division: BatchRun[Any]) -> Measured | None:
        return validated(base, heads, Tree.chain(2), turns, division=division, **options)

    found = run(ALONE)
    assert found is not None
    assert sorted(text.turn for text in found.texts) == [1, 1, 1, 2, 2, 2, 3, 3]
    assert len(found.skipped) == 1
    assert figures(divided(run, 2)) == figures(found)


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
