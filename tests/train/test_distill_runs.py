"""Runs of distill that are cut off, continued, or divided: the bytes of one unbroken run, and nothing of another."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
from looped import looped
from runs import Cut
from teams import together
from tiny import chat_base

from treeopt.errors import Code, TreeoptError
from treeopt.runs.processes import Processes
from treeopt.runs.work import Work
from treeopt.texts.prompts import GivenPrompts, PromptSet, load_prompts
from treeopt.train.distill import Distilled, DistillOptions, SelfTalk, distill, divided_distill

BASE = chat_base(disturbed=0.3)
BASES = [BASE, chat_base(disturbed=0.3)]  # equal; one for each thread, as `generate` changes its model's settings
TALK = SelfTalk(8, turns=2, opening_tokens=4)


def run(
    seeds: GivenPrompts | SelfTalk, out: Path, *, cut: int = 0, team: Processes | None = None, **options: Any
) -> Distilled | None:
    """Distill in batches of two; with `cut` the run is killed after so many batches."""

    def progress(done: int, *_rest: object) -> None:
        if cut and done >= 2 * cut:
            raise Cut

    base = BASES[0 if team is None else team.rank]
    if team is not None:
        options["work"] = Work(out, resume=options.get("resume", False), team=team)
    more = {"exclude": options.pop("exclude", None), "progress": options.pop("progress", progress)}
    chosen = DistillOptions(**{"max_new_tokens": 8, "batch_size": 2, **options})
    return divided_distill(base, seeds, out, chosen, **more)


def cut_off(seeds: GivenPrompts | SelfTalk, out: Path, batches: int = 2, **options: Any) -> dict[str, bytes]:
    """The folder that a run leaves which was killed after so many batches."""
    with pytest.raises(Cut):
        run(seeds, out, cut=batches, **options)
    return stored(out)


def stored(out: Path) -> dict[str, bytes]:
    """The files of an unfinished run."""
    return {file.name: file.read_bytes() for file in out.with_name(f"{out.name}.partial").iterdir()}


def seeds(folder: Path, name: str = "seeds.txt", **options: int) -> PromptSet:
    """Eight requests, of other words in a file of another name."""
    (folder / name).write_text("".join(f"w{i} w{2 * i}\n" for i in range(len(name) - 8, len(name))))
    return load_prompts(str(folder / name), **options)


def refusal(given: PromptSet | SelfTalk, out: Path, **options: Any) -> TreeoptError:
    """The error that a run ends with."""
    with pytest.raises(TreeoptError) as caught:
        run(given, out, **options)
    return caught.value


@looped("batches, kind", [(1, "prompts"), (2, "self-talk"), (3, "prompts"), (4, "self-talk")])
def test_resume_is_an_unbroken_run(batches: int, kind: str, tmp_path: Path) -> None:
    """Cut off after any batch, a resumed run makes the other batches, and ends with the same bytes and counts."""
    given = seeds(tmp_path) if kind == "prompts" else TALK
    options = {"temperature": 1.2, "seed": 3}
    whole = run(given, tmp_path / "whole.jsonl", **options)
    out, made = tmp_path / "out.jsonl", []
    assert len(cut_off(given, out, batches, **options)) == 1 + batches
    assert not out.exists()
    (out.with_name("out.jsonl.partial") / f".rows-{batches:06}.safetensors.torn").write_bytes(b"half")
    options["progress"] = lambda done, total, _note: made.append((done, total))
    assert run(given, out, resume=True, **options) == whole
    assert made == [(2, 8), (4, 8), (6, 8), (8, 8)]
    assert out.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert sorted(file.name for file in tmp_path.iterdir() if file.name != "seeds.txt") == ["out.jsonl", "whole.jsonl"]


@looped(
    "other",
    [
        *({"seed": 1}, {"temperature": 0.5}, {"max_new_tokens": 7}, {"batch_size": 3}),
        *({"chat_template": False}, {"exclude": ["w1"]}),
    ],
)
def test_resume_with_other_settings(other: dict[str, Any], tmp_path: Path) -> None:
    """A run does not go on with other settings, and what was begun stays."""
    before = cut_off(seeds(tmp_path), tmp_path / "out.jsonl")
    assert refusal(seeds(tmp_path), tmp_path / "out.jsonl", resume=True, **other).code is Code.RESUME_INVALID
    assert stored(tmp_path / "out.jsonl") == before


def test_resume_with_other_prompts_or_another_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor with other prompts, other rows of the same file, or a model whose weights are others."""
    out = tmp_path / "out.jsonl"
    before = cut_off(seeds(tmp_path), out)
    for given in (seeds(tmp_path, "others.txt"), seeds(tmp_path, skip=1), seeds(tmp_path, limit=5), SelfTalk(8)):
        assert refusal(given, out, resume=True).code is Code.RESUME_INVALID
    monkeypatch.setattr(f"{__name__}.BASES", [chat_base(disturbed=0.5)])
    assert refusal(seeds(tmp_path), out, resume=True).code is Code.RESUME_INVALID
    assert stored(out) == before


def test_a_damaged_batch_is_named(tmp_path: Path) -> None:
    """A stored batch that was changed is E205 with its file, and stays."""
    out = tmp_path / "out.jsonl"
    cut_off(seeds(tmp_path), out)
    file = tmp_path / "out.jsonl.partial" / "rows-000001.safetensors"
    file.write_bytes(file.read_bytes().replace(b"w2", b"w3"))
    error = refusal(seeds(tmp_path), out, resume=True)
    assert error.code is Code.RESUME_INVALID
    assert str(file) in error.what
    assert "--resume" in error.fix


def test_files_are_not_overwritten_unasked(tmp_path: Path) -> None:
    """There is nothing to resume at first; a finished file and an unfinished run are refused, and dropped on demand."""
    given, out = seeds(tmp_path), tmp_path / "out.jsonl"
    error = refusal(given, out, resume=True)
    assert error.code is Code.RESUME_INVALID
    assert "out.jsonl.partial" in error.what
    cut_off(given, out, 1)
    error = refusal(given, out)
    assert error.code is Code.FILE_EXISTS
    assert "--resume" in error.fix
    assert run(given, out, overwrite=True).rows == 8
    assert refusal(given, out).code is Code.FILE_EXISTS
    assert refusal(given, out, resume=True).code is Code.FILE_EXISTS
    assert run(given, out, overwrite=True, max_new_tokens=2).tokens == 16


def test_failure_before_the_first_batch_leaves_nothing(tmp_path: Path) -> None:
    """Where the first batch fails no folder is left that would have to be dropped by hand."""
    base = chat_base(template=None)
    assert base.tokenizer is not None
    base.tokenizer.eos_token = None
    with pytest.raises(TreeoptError):
        distill(base, SelfTalk(2), tmp_path / "out.jsonl", max_new_tokens=8)
    assert list(tmp_path.iterdir()) == []


@looped("seed", [-1, 2**63])
def test_seeds_beyond_the_generators(seed: int, tmp_path: Path) -> None:
    """Seeds that torch's generator does not take are refused before anything is written; the largest one works."""
    with pytest.raises(ValueError, match="a seed is a whole number"):
        run(SelfTalk(1), tmp_path / "out.jsonl", seed=seed)
    assert list(tmp_path.iterdir()) == []
    assert run(SelfTalk(2), tmp_path / "out.jsonl", seed=2**63 - 1).rows
    assert next(iter(tmp_path.iterdir())).name == "out.jsonl"


@pytest.mark.slow
@looped("call", [3, 6])
def test_full_disk(call: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is full in the second batch, or in the output, is E403; --resume ends with the same bytes."""
    calls: list[int] = []
    fsync = os.fsync

    def full(handle: int) -> None:
        calls.append(1)
        if len(calls) == call:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(handle)

    out = tmp_path / "out.jsonl"
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        assert refusal(seeds(tmp_path), out).code is Code.OUT_OF_MEMORY
    assert not out.exists()
    run(seeds(tmp_path), out, resume=True)
    run(seeds(tmp_path), tmp_path / "whole.jsonl")
    assert out.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


@pytest.mark.slow
def test_several_processes_write_the_file_of_one(tmp_path: Path) -> None:
    """Two processes write the bytes and counts of one, also after a cut, and nothing is left beside the file."""
    given = [f"w{i} w{2 * i}" for i in range(1, 8)]  # greedy: threads share one generator
    alone = run(given, tmp_path / "alone.jsonl")
    first, second = together(lambda one: run(given, tmp_path / "out.jsonl", team=one), 2)
    assert second is None
    assert first == alone
    cut_off(given, tmp_path / "cut.jsonl", 3)
    together(lambda one: run(given, tmp_path / "cut.jsonl", team=one, resume=True), 2)
    for name in ("out.jsonl", "cut.jsonl"):
        assert (tmp_path / name).read_bytes() == (tmp_path / "alone.jsonl").read_bytes()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["alone.jsonl", "cut.jsonl", "out.jsonl"]
    assert all(json.loads(line)["answers"] for line in (tmp_path / "out.jsonl").read_text().splitlines())
