"""Checkpoints: a run that was broken off goes on from a whole one; damage is refused, and nothing is dropped."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from looped import looped
from owners import owner
from runs import SMALL, Cut, cut_at, noise
from tiny import tiny_base

from treeopt.errors import Code, TreeoptError
from treeopt.train import medusa1 as medusa1_module
from treeopt.train.medusa1 import train_heads


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was cut off after step 9; its checkpoints are of steps 4 and 8."""
    folder = tmp_path_factory.mktemp("begun")
    with pytest.raises(Cut):
        train_heads(tiny_base("llama"), noise(20), folder, SMALL, progress=cut_at(9))
    return folder


@pytest.fixture
def broken(begun: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    shutil.copytree(begun, tmp_path / "run")
    return tmp_path / "run"


def go_on(folder: Path) -> list[int]:
    """The steps of a resumed run that is cut off again after its second."""
    told: list[int] = []

    def progress(done: int, *_rest: object) -> None:
        told.append(done)
        if len(told) == 2:
            raise Cut

    with pytest.raises(Cut):
        train_heads(tiny_base("llama"), noise(20), folder, SMALL, resume=True, progress=progress)
    return told


def contents(folder: Path) -> dict[str, bytes]:
    """Every file by its path."""
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def overwrite(name: str, content: bytes) -> Callable[[Path], None]:
    """Damage that replaces a file."""
    return lambda folder: (folder / "checkpoints" / name).write_bytes(content) and None


def remove(name: str) -> Callable[[Path], None]:
    """Damage that removes a file."""
    return lambda folder: (folder / "checkpoints" / name).unlink()


def flip(name: str) -> Callable[[Path], None]:
    """Damage of one bit in the middle of a file."""

    def damage(folder: Path) -> None:
        path = folder / "checkpoints" / name
        raw = bytearray(path.read_bytes())
        raw[len(raw) // 2] ^= 1
        path.write_bytes(bytes(raw))

    return damage


def folder_in_place(folder: Path) -> None:
    """A folder under the name of a run's note."""
    (folder / "checkpoints" / "begun.json").unlink()
    (folder / "checkpoints" / "begun.json").mkdir()


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "note of garbage": (overwrite("begun.json", b"\x80\x81"), "begun.json"),
    "empty note": (overwrite("begun.json", b""), "begun.json"),
    "note of a list": (overwrite("begun.json", b"[1]"), "begun.json"),
    "note nested deep": (overwrite("begun.json", b"[" * 100_000), "begun.json"),
    "note of another schema": (
        overwrite("begun.json", b'{"schema": "treeopt.other/1"}'),
        "started with other settings",
    ),
    "no note": (remove("begun.json"), "begun.json"),
    "a folder for a note": (folder_in_place, "begun.json"),
    "weights of garbage": (
        overwrite("checkpoint-8/model.safetensors", b"garbage"),
        "model.safetensors is missing, or",
    ),
    "weights with a flipped bit": (flip("checkpoint-8/model.safetensors"), "model.safetensors is missing, or"),
    "no weights": (remove("checkpoint-8/model.safetensors"), "model.safetensors is missing, or"),
    "optimizer with a flipped bit": (flip("checkpoint-8/optimizer.pt"), "optimizer.pt is missing, or"),
    "no optimizer": (remove("checkpoint-8/optimizer.pt"), "optimizer.pt is missing, or"),
    "no random state": (remove("checkpoint-8/rng_state.pth"), "rng_state.pth is missing, or"),
    "state of garbage": (
        overwrite("checkpoint-8/trainer_state.json", b"garbage"),
        "trainer_state.json is missing, or",
    ),
    "no state": (remove("checkpoint-8/trainer_state.json"), "trainer_state.json is missing, or"),
    "mark of garbage": (overwrite("checkpoint-8/whole.json", b"garbage"), "whole.json is not what"),
    "mark without files": (overwrite("checkpoint-8/whole.json", b"{}"), "whole.json is not what"),
}


@looped("name", DAMAGE)
def test_damage_is_refused(name: str, begun: Path, tmp_path: Path) -> None:
    """A note or a checkpoint that a kill cannot leave so is named, with what to do, and every file stays."""
    damage, said = DAMAGE[name]
    broken = shutil.copytree(begun, tmp_path / "run")
    damage(broken)
    before = contents(broken)
    with pytest.raises(TreeoptError) as caught:
        train_heads(tiny_base("llama"), noise(20), broken, SMALL, resume=True)
    assert caught.value.code is Code.RESUME_INVALID
    assert said in caught.value.what
    assert "--force" in caught.value.fix
    assert contents(broken) == before


def test_checkpoint_before_a_damaged_one(broken: Path) -> None:
    """As the error says: without the damaged checkpoint the run goes on from the one before."""
    shutil.rmtree(broken / "checkpoints" / "checkpoint-8")
    assert go_on(broken) == [5, 6]


def test_whole_checkpoint_is_gone_on_from(broken: Path) -> None:
    """Undamaged, a run goes on from its last checkpoint, and what is no checkpoint of it does not matter."""
    (broken / "checkpoints" / "checkpoint-best").mkdir()
    (broken / "checkpoints" / "notes.txt").write_text("mine")
    assert go_on(broken) == [9, 10]


def test_half_written_checkpoint_is_passed_over(broken: Path) -> None:
    """A checkpoint without its mark is what a kill leaves: the one before it serves, or the run begins again."""
    for step, steps in ((8, [5, 6]), (4, [1, 2])):
        (broken / "checkpoints" / f"checkpoint-{step}" / "whole.json").unlink()
        assert go_on(broken) == steps


def test_killed_before_the_note(tmp_path: Path) -> None:
    """An empty folder of checkpoints is no unfinished run: a new one begins in it."""
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(Cut):
        train_heads(tiny_base("llama"), noise(20), tmp_path, SMALL, progress=cut_at(1))
    assert json.loads((tmp_path / "checkpoints" / "begun.json").read_text())["settings"]["num_heads"] == 2


def test_another_process_cannot_train_there(tmp_path: Path) -> None:
    """From its first step to its end a run has the lock of its checkpoints; after the end nobody has it."""
    refused = []

    def progress(*_told: object) -> None:
        with pytest.raises(AssertionError, match="is in use"), owner(tmp_path / "checkpoints"):
            pass
        refused.append(True)
        raise Cut

    with pytest.raises(Cut):
        train_heads(tiny_base("llama"), noise(20), tmp_path, SMALL, progress=progress)
    assert refused
    with owner(tmp_path / "checkpoints"), pytest.raises(TreeoptError, match="is in use") as caught:
        train_heads(tiny_base("llama"), noise(20), tmp_path, SMALL, overwrite=True)
    assert caught.value.code is Code.FILE_UNWRITABLE


def test_a_run_that_begins_meanwhile_is_not_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that another one left unfinished since the folder was checked is E202, and stays."""
    note = tmp_path / "checkpoints" / "begun.json"

    def job_of(*arguments: Any, **options: Any) -> Any:
        note.parent.mkdir()
        note.write_text("{}")
        return whole(*arguments, **options)

    whole = medusa1_module.job_of
    monkeypatch.setattr(medusa1_module, "job_of", job_of)
    with pytest.raises(TreeoptError, match="holds an unfinished run") as caught:
        train_heads(tiny_base("llama"), noise(20), tmp_path, SMALL)
    assert caught.value.code is Code.FILE_EXISTS
    assert note.read_text() == "{}"


@looped("options", [{}, {"resume": True}, {"overwrite": True}])
def test_file_in_place_of_checkpoints(options: dict[str, bool], tmp_path: Path) -> None:
    """A file where checkpoints would go is refused, whatever is asked for, and stays."""
    (tmp_path / "checkpoints").write_text("mine")
    with pytest.raises(TreeoptError) as caught:
        train_heads(tiny_base("llama"), noise(20), tmp_path, SMALL, **options)
    assert caught.value.code is Code.FILE_UNWRITABLE
    assert (tmp_path / "checkpoints").read_text() == "mine"
