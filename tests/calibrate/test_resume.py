"""Resumed calibrations and learning: wherever a run ends, the next one makes the rest, and the bytes are the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import Cut
from tiny import chat_base

from treeopt.calibrate.pipeline import run_calibration
from treeopt.calibrate.results import CalibrationRun
from treeopt.drafting.learn import Learning
from treeopt.errors import Code, TreeoptError
from treeopt.evaluate.learn_drafter import learn_drafter
from treeopt.files.calibrations import save_calibration
from treeopt.files.drafters import save_drafter
from treeopt.models.base import Base
from treeopt.runs.work import Work

NEW = 10
PROMPTS: list[Any] = [f"w{i} w{i + 1}" for i in range(1, 6)] + [{"turns": ["w3", "w5 w6"]}]
LEARNING = Learning(150, temperature=2.0, levels=3)
OPTIONS: dict[str, Any] = {"max_new_tokens": NEW, "batch_size": 2, "steps": True}


@pytest.fixture(scope="module")
def base() -> Base:
    """A model with a chat template, whose answers depend on the text before them."""
    return chat_base(disturbed=0.3)


def calibrate(base: Base, work: Work | None, **options: Any) -> CalibrationRun:
    """Learn a drafter from the prompts and trace it."""
    chosen = {"learning": LEARNING, "work": work, **OPTIONS, **options}
    return run_calibration(base, None, PROMPTS, **chosen)


@pytest.fixture(scope="module")
def unbroken(base: Base) -> CalibrationRun:
    """A run without a work folder."""
    return calibrate(base, None)


def files_of(folder: Path, run: CalibrationRun) -> tuple[bytes, bytes]:
    """The files of the calibration and of the drafter."""
    assert run.learned is not None
    save_calibration(run.calibration, folder / "c.safetensors", overwrite=True)
    save_drafter(run.learned.drafter, folder / "d.safetensors", overwrite=True)
    return (folder / "c.safetensors").read_bytes(), (folder / "d.safetensors").read_bytes()


def cut_in(work: Work, number: int) -> None:
    """Let the run end in the middle of the so many-th chunk that it makes."""
    whole, left = work.chunk, iter(range(number))

    def chunk(name: str, make: Callable[[], Any]) -> Any:
        def cut() -> Any:
            if next(left, None) is None:
                make()  # the state of the generator is another after it
                raise Cut
            return make()

        return whole(name, cut)

    work.chunk = chunk  # type: ignore[method-assign]  # of this one


def test_every_run_makes_two_chunks(tmp_path: Path, base: Base, unbroken: CalibrationRun) -> None:
    """A run that is cut in its third chunk, again and again, ends with the bytes of an unbroken one."""
    target, parts = tmp_path / "out.safetensors", []
    for attempt in range(30):
        work = Work(target, resume=attempt > 0)
        cut_in(work, 2)
        try:
            run = calibrate(base, work)
        except Cut:
            assert work.chunks == 2 * (attempt + 1)
            parts = sorted({file.name.partition("-")[0] for file in work.folder.glob("*.safetensors")})
            continue
        break
    assert attempt > 4
    assert parts == ["answers", "counted", "sampled", "traces"]
    assert files_of(tmp_path, run) == files_of(tmp_path, unbroken)


def test_work_folder_changes_nothing(tmp_path: Path, base: Base, unbroken: CalibrationRun) -> None:
    """A run that stores its batches has the bytes of one that does not."""
    run = calibrate(base, Work(tmp_path / "out.safetensors"))
    assert files_of(tmp_path, run) == files_of(tmp_path, unbroken)


def test_traces_of_other_lengths_are_damaged(tmp_path: Path, base: Base) -> None:
    """A stored chunk of traces whose lengths are not those of the answers is E205, and no array is filled from it."""
    work = Work(tmp_path / "out.safetensors")
    whole = work.chunk

    def changed(name: str, make: Callable[[], Any]) -> Any:
        arrays, data = whole(name, make)
        if name == "traces-000001":
            arrays = {**arrays, "lengths": arrays["lengths"] + [1, -1, *[0] * (len(arrays["lengths"]) - 2)]}
        return arrays, data

    work.chunk = changed  # type: ignore[method-assign]  # of this one
    with pytest.raises(TreeoptError, match="lengths are not those of the answers") as caught:
        calibrate(base, work)
    assert caught.value.code is Code.RESUME_INVALID


OTHER: dict[str, tuple[dict[str, Any], str]] = {
    "batch size": ({"batch_size": 3}, "batch_size"),
    "tokens": ({"max_new_tokens": 9}, "max_new_tokens"),
    "temperature": ({"temperature": 0.5}, "answers"),
    "template": ({"chat_template": False}, "chat_template"),
    "trees": ({"steps": False}, "kind"),
    "learning": ({"learning": dataclasses.replace(LEARNING, seed=3)}, "learning.seed"),
    "sampled tokens": ({"learning": dataclasses.replace(LEARNING, tokens=151)}, "learning.tokens"),
}


@pytest.mark.parametrize("name", OTHER)
def test_other_settings_are_refused(tmp_path: Path, base: Base, name: str) -> None:
    """A run is not continued with another value of any setting, which is named."""
    work = Work(tmp_path / "out.safetensors")
    cut_in(work, 1)
    with pytest.raises(Cut):
        calibrate(base, work)
    options, setting = OTHER[name]
    with pytest.raises(TreeoptError) as caught:
        calibrate(base, Work(tmp_path / "out.safetensors", resume=True), **options)
    assert caught.value.code is Code.RESUME_INVALID
    assert any(line.startswith(f"{setting}: started with") for line in caught.value.at.splitlines())


def test_other_prompts_and_models_are_refused(tmp_path: Path, base: Base) -> None:
    """Nor with other prompts, or another model."""
    work = Work(tmp_path / "out.safetensors")
    cut_in(work, 1)
    with pytest.raises(Cut):
        calibrate(base, work)
    again = {"learning": LEARNING, **OPTIONS}
    for model, prompts, setting in (
        (base, PROMPTS[:-1], "prompts"),
        (chat_base(disturbed=0.2), PROMPTS, "model_id"),
    ):
        with pytest.raises(TreeoptError) as caught:
            run_calibration(model, None, prompts, work=Work(tmp_path / "out.safetensors", resume=True), **again)
        assert f"{setting}: started with" in caught.value.at


def test_other_number_of_threads_is_refused(tmp_path: Path, base: Base) -> None:
    """Sums of other numbers of threads are rounded differently, so the number is one of the settings."""
    work, threads = Work(tmp_path / "out.safetensors"), torch.get_num_threads()
    cut_in(work, 1)
    with pytest.raises(Cut):
        calibrate(base, work)
    torch.set_num_threads(threads + 1)
    try:
        with pytest.raises(TreeoptError) as caught:
            calibrate(base, Work(tmp_path / "out.safetensors", resume=True))
    finally:
        torch.set_num_threads(threads)
    assert caught.value.code is Code.RESUME_INVALID
    assert caught.value.at == f"threads: started with {threads}, now {threads + 1}"


def test_learning_is_resumed(tmp_path: Path, base: Base) -> None:
    """`learn_drafter` continues too: the drafter is that of an unbroken run, but for the plan, which is timed."""
    options: dict[str, Any] = {"learning": LEARNING, "sizes": [4], "max_new_tokens": NEW, "batch_size": 3}
    work = Work(tmp_path / "out.safetensors")
    cut_in(work, 3)
    with pytest.raises(Cut):
        learn_drafter(base, PROMPTS, work=work, **options)
    resumed = learn_drafter(base, PROMPTS, work=Work(tmp_path / "out.safetensors", resume=True), **options)
    whole = learn_drafter(base, PROMPTS, **options)
    for run, name in ((resumed, "a.safetensors"), (whole, "b.safetensors")):
        save_drafter(dataclasses.replace(run.drafter, plan=None), tmp_path / name)
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    assert resumed.drafter.id == whole.drafter.id
