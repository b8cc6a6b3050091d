"""Unfinished files of distill: what a kill leaves is continued, all else is refused and left as it is."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest
from tiny import chat_base

from treeopt.errors import Code, TreeoptError
from treeopt.models.base import Base
from treeopt.texts.prompts import PromptSet, load_prompts
from treeopt.train.distill import Distilled, distill
from treeopt.train.talks import SelfTalk


class Cut(KeyboardInterrupt):
    """Stands for a kill."""


def run(base: Base, seeds: PromptSet | SelfTalk, out: Path, *, cut: int = 0, **options: bool) -> Distilled:
    """Distill in batches of two; with `cut` the run is killed after so many batches."""

    def progress(done: int, *_rest: object) -> None:
        if done == 2 * cut:
            raise Cut

    return distill(base, seeds, out, max_new_tokens=8, batch_size=2, progress=progress, **options)


def seeds(folder: Path, *, skip: int = 0, limit: int | None = None) -> PromptSet:
    """Eight requests."""
    (folder / "seeds.txt").write_text("".join(f"w{i}\n" for i in range(1, 9)))
    return load_prompts(str(folder / "seeds.txt"), skip=skip, limit=limit)


@pytest.fixture
def partial(tmp_path: Path) -> Path:
    """What a run leaves that was killed after its second batch."""
    with pytest.raises(Cut):
        run(chat_base(), seeds(tmp_path), tmp_path / "out.jsonl", cut=2)
    return tmp_path / "out.jsonl.partial"


def swapped(raw: bytes) -> bytes:
    """The first two lines in the other order."""
    first, second, *others = raw.splitlines(keepends=True)
    return b"".join([second, first, *others])


def edited(raw: bytes, **fields: object) -> bytes:
    """The second line with other fields."""
    first, second, *others = raw.splitlines(keepends=True)
    return b"".join([first, json.dumps({**json.loads(second), **fields}).encode() + b"\n", *others])


DAMAGE: dict[str, tuple[Callable[[bytes], bytes], int]] = {
    "garbage": (lambda raw: bytes(range(128, 256)), 1),
    "garbage behind": (lambda raw: raw + b"\x80\x81", 5),
    "zeros behind": (lambda raw: raw + bytes(64), 5),
    "garbage in a line": (lambda raw: raw.replace(b'"messages"', b"\xff\xfe", 1), 1),
    "another schema": (lambda raw: b'{"schema": "treeopt.other/1"}\n' + raw, 1),
    "another order": (swapped, 2),
    "an array": (lambda raw: b"[" + b",".join(raw.splitlines()) + b"]\n", 1),
    "an array without end": (lambda raw: b"[" + b",".join(raw.splitlines()), 1),
    "a line torn in the middle": (lambda raw: raw.replace(b'"answers"', b"\n", 1), 1),
    "a blank line": (lambda raw: b"\n" + raw, 1),
    "nested deep": (lambda raw: b"[" * 100_000 + b"\n", 1),
    "another id": (lambda raw: edited(raw, id="other:00000001"), 2),
    "an id of no text": (lambda raw: edited(raw, id=["a"]), 2),
    "spans beyond the text": (lambda raw: edited(raw, answers=[[0, 10**9]]), 2),
    "spans of words": (lambda raw: edited(raw, answers=[["a", "b"]]), 2),
    "a source of no settings": (lambda raw: edited(raw, source=[1]), 2),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_files_are_refused(partial: Path, name: str) -> None:
    """A file that no kill can leave is named with the line, and what to do; it stays, and no answer is made."""
    damage, line = DAMAGE[name]
    partial.write_bytes(damage(partial.read_bytes()))
    before = partial.read_bytes()
    with pytest.raises(TreeoptError) as caught:
        run(chat_base(), seeds(partial.parent), partial.with_suffix(""), resume=True)
    assert caught.value.code is Code.RESUME_INVALID
    assert str(partial) in caught.value.what
    assert caught.value.at == f"{partial}:{line}"
    assert "--force" in caught.value.fix
    assert partial.read_bytes() == before
    assert not partial.with_suffix("").exists()
    assert run(chat_base(), seeds(partial.parent), partial.with_suffix(""), overwrite=True).new_rows == 8


@pytest.mark.parametrize(("kept", "new"), [(0, 8), (1, 8), (30, 8), (-1, 6), (None, 6)])
def test_what_a_kill_leaves_is_continued(partial: Path, kept: int | None, new: int) -> None:
    """An empty file, a torn line wherever it is torn, and whole batches go on and end with the same bytes."""
    run(chat_base(), seeds(partial.parent), partial.parent / "whole.jsonl")
    partial.write_bytes(partial.read_bytes()[:kept])
    done = run(chat_base(), seeds(partial.parent), partial.with_suffix(""), resume=True)
    assert done.new_rows == new
    assert partial.with_suffix("").read_bytes() == (partial.parent / "whole.jsonl").read_bytes()


@pytest.mark.parametrize("kind", ["twice", "edited", "cut"])
def test_rows_of_another_run_are_not_renamed(tmp_path: Path, kind: str) -> None:
    """A file that got or lost rows while a run wrote it, as by a second run without locks, is no output."""
    out = tmp_path / "out.jsonl"
    unfinished = tmp_path / "out.jsonl.partial"

    def interfere(done: int, *_rest: object) -> None:
        if done == 8:
            raw = unfinished.read_bytes()
            last = raw.splitlines(keepends=True)[-1]
            made = {"twice": raw + last, "edited": edited(raw, model_id="other"), "cut": raw[: -len(last)]}
            unfinished.write_bytes(made[kind])

    with pytest.raises(RuntimeError, match=r"out\.jsonl\.partial (has \d rows, and|is not what) this run wrote"):
        distill(chat_base(), seeds(tmp_path), out, max_new_tokens=8, batch_size=2, progress=interfere)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["out.jsonl.partial", "seeds.txt"]


def test_a_deleted_file_is_named(tmp_path: Path) -> None:
    """A file that somebody deletes while a run writes it is E404 with its name."""

    def delete(done: int, *_rest: object) -> None:
        if done == 8:
            (tmp_path / "out.jsonl.partial").unlink()

    with pytest.raises(TreeoptError, match=r"out\.jsonl\.partial was deleted") as caught:
        distill(chat_base(), seeds(tmp_path), tmp_path / "out.jsonl", max_new_tokens=8, batch_size=2, progress=delete)
    assert caught.value.code is Code.SYSTEM_REFUSED


def test_unreadable_file(partial: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that the system does not give is refused by its name, with the system's reason."""

    def refused(path: Path, _mode: str) -> NoReturn:
        raise PermissionError(13, "Permission denied", str(path))

    prompts = seeds(partial.parent)
    monkeypatch.setattr(Path, "open", refused)
    with pytest.raises(TreeoptError, match=r"out\.jsonl\.partial cannot be read: Permission denied") as caught:
        run(chat_base(), prompts, partial.with_suffix(""), resume=True)
    assert caught.value.code is Code.RESUME_INVALID


@pytest.mark.parametrize("options", [{}, {"resume": True}, {"overwrite": True}])
def test_folder_in_its_place(tmp_path: Path, options: dict[str, bool]) -> None:
    """A folder where answers would be collected is refused, whatever is asked for, and stays."""
    (tmp_path / "out.jsonl.partial").mkdir()
    with pytest.raises(TreeoptError, match=r"out\.jsonl\.partial is a folder") as caught:
        run(chat_base(), seeds(tmp_path), tmp_path / "out.jsonl", **options)
    assert caught.value.code is Code.FILE_UNWRITABLE
    assert (tmp_path / "out.jsonl.partial").is_dir()


@pytest.mark.parametrize(("skip", "limit"), [(1, None), (0, 3), (2, 4)])
def test_other_rows_of_the_same_prompts(partial: Path, skip: int, limit: int | None) -> None:
    """Rows of prompts that --skip or --limit now leaves out are refused, not dropped."""
    before = partial.read_bytes()
    with pytest.raises(TreeoptError) as caught:
        run(chat_base(), seeds(partial.parent, skip=skip, limit=limit), partial.with_suffix(""), resume=True)
    assert caught.value.code is Code.RESUME_INVALID
    assert partial.read_bytes() == before


def test_batches_begin_where_the_prompts_do(tmp_path: Path) -> None:
    """A run that left out the first row does not go on with it: its batches would be others."""
    with pytest.raises(Cut):
        run(chat_base(), seeds(tmp_path, skip=1), tmp_path / "out.jsonl", cut=2)
    with pytest.raises(TreeoptError) as caught:
        run(chat_base(), seeds(tmp_path), tmp_path / "out.jsonl", resume=True)
    assert caught.value.code is Code.RESUME_INVALID
    assert "skip: started with 1" in caught.value.at


def test_more_prompts_of_the_same_file(tmp_path: Path) -> None:
    """A run of the first five rows goes on with all of them."""
    with pytest.raises(Cut):
        run(chat_base(), seeds(tmp_path, limit=5), tmp_path / "out.jsonl", cut=1)
    run(chat_base(), seeds(tmp_path), tmp_path / "out.jsonl", resume=True)
    run(chat_base(), seeds(tmp_path), tmp_path / "whole.jsonl")
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_failure_before_the_first_batch_leaves_nothing(tmp_path: Path) -> None:
    """Where the first batch fails no empty file is left that would have to be dropped by hand."""
    base = chat_base(template=None)
    assert base.tokenizer is not None
    base.tokenizer.eos_token = None
    with pytest.raises(TreeoptError):
        run(base, SelfTalk(2), tmp_path / "out.jsonl")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_seeds_beyond_the_generators(tmp_path: Path, seed: int) -> None:
    """Seeds that torch's generator does not take are refused before anything is written; the largest one works."""
    with pytest.raises(ValueError, match="a seed is a whole number"):
        distill(chat_base(), SelfTalk(1), tmp_path / "out.jsonl", max_new_tokens=8, seed=seed)
    assert list(tmp_path.iterdir()) == []
    assert distill(chat_base(), SelfTalk(2), tmp_path / "out.jsonl", max_new_tokens=8, seed=2**63 - 1).rows
    assert next(iter(tmp_path.iterdir())).name == "out.jsonl"


def test_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is full in the second batch is E403; --resume ends the run with the same bytes."""
    calls: list[int] = []

    def full(_handle: int) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(TreeoptError, match="the disk is full") as caught:
            run(chat_base(), seeds(tmp_path), tmp_path / "out.jsonl")
    assert caught.value.code is Code.OUT_OF_MEMORY
    assert "--resume" in caught.value.fix
    assert not (tmp_path / "out.jsonl").exists()
    run(chat_base(), seeds(tmp_path), tmp_path / "out.jsonl", resume=True)
    run(chat_base(), seeds(tmp_path), tmp_path / "whole.jsonl")
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_self_talk_without_end_begins_at_once(tmp_path: Path) -> None:
    """A number of conversations that fits into no memory is no fault by itself: batches are made one by one."""
    with pytest.raises(Cut):
        run(chat_base(), SelfTalk(10**15, opening_tokens=4), tmp_path / "out.jsonl", cut=2)
    with pytest.raises(Cut):
        run(chat_base(), SelfTalk(10**15, opening_tokens=4), tmp_path / "out.jsonl", cut=3, resume=True)
    assert len((tmp_path / "out.jsonl.partial").read_text().splitlines()) > 2


@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("options", [{}, {"overwrite": True}, {"resume": True}])
def test_unfinished_file_that_is_a_link(tmp_path: Path, hard: bool, options: dict[str, bool]) -> None:
    """Answers are never written through a link to a file of another name, such as the prompts."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"text": "w1"}\n')
    partial = tmp_path / "out.jsonl.partial"
    if hard:
        partial.hardlink_to(prompts)
    else:
        partial.symlink_to(prompts)
    with pytest.raises(TreeoptError, match="is a link") as caught:
        distill(chat_base(), SelfTalk(1), tmp_path / "out.jsonl", max_new_tokens=4, **options)
    assert caught.value.code is Code.FILE_UNWRITABLE
    assert prompts.read_text() == '{"text": "w1"}\n'
