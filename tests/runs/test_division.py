"""Work that processes divide through their store: every part made once, known to all, in order, of any size.

Processes are threads here, which share the generators of torch: tests/cli/test_processes_cli.py tests what draws.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from drafters import prompts_of
from looped import looped
from teams import together
from tiny import cycle_heads, tiny_base

from treeopt.errors import Code, TreeoptError
from treeopt.evaluate.runs import Measured
from treeopt.evaluate.validate import divided_validate, make_inputs, validate
from treeopt.models.base import Base
from treeopt.models.given import load_pair
from treeopt.progress import silent
from treeopt.runs.batches import ALONE, BatchRun
from treeopt.runs.processes import Processes
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
        (trial.prompt_id, trial.text.turn, name, [(run.tokens, run.step_lengths, run.drafts) for run in repeats])
        for trial in found.metrics.trials
        for name, repeats in trial.runs.items()
    ]
    more = [getattr(found, name, None) for name in ("differences", "skipped")]
    return [runs, found.texts, found.predicted.tokens_per_step, found.smaller, found.left_out, *more]


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
