"""Work folders: stored whole or not at all, continued with their settings."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT_FOLDER
from looped import looped
from owners import owner
from refusals import refusal_of
from torn import TORN

from treeopt.calibrate.results import Shard
from treeopt.cli.console import Console
from treeopt.cli.work_options import ending_work
from treeopt.errors import Code, TreeoptError
from treeopt.runs.work import Chunk, Work, chunk_name, pack_rows, unpack_rows

SETTINGS = {"batch_size": 2, "learning": {"seed": 0}, "rows": [0, 7]}
FOLDER = "out.safetensors.partial"

# A run of eight chunks whose process is killed when so many bytes of temporary files were written; 0 never.
RUN = (
    TORN
    + """
from pathlib import Path
import numpy as np
from treeopt.runs.work import Work, pack_rows, unpack_rows

resume = Path("out.safetensors.partial").exists()
work = Work(Path("out.safetensors"), resume=resume)
work.begin({"seed": 3})
rows = [unpack_rows(work.chunk(f"answers-{i:06}", lambda: pack_rows([[i] * 40, list(range(i))]))) for i in range(8)]
Path("rows.txt").write_text(repr(rows))
work.remove()
"""
)
WHOLE = [[[i] * 40, list(range(i))] for i in range(8)]


def made(value: int = 1) -> Chunk:
    """A chunk of two rows."""
    return pack_rows([[value, 2], []], names=["a", "b"])


def refused() -> Chunk:
    """A chunk that is stored, so that nothing makes it."""
    raise AssertionError("the chunk was made again")


def begun(folder: Path, chunks: int = 1) -> Work:
    """An unfinished run with so many chunks."""
    work = Work(folder / "out.safetensors")
    work.begin(SETTINGS)
    for number in range(chunks):
        work.chunk(chunk_name("answers", number), lambda: made(7))
    return work


def refusal(folder: Path, **options: bool) -> TreeoptError:
    """The error of a run that cannot begin."""
    return refusal_of(Work, folder / "out.safetensors", **options)


def test_chunks_are_read_back(tmp_path: Path) -> None:
    """A resumed run reads rows and data of stored chunks, and makes the others; the end leaves nothing."""
    begun(tmp_path)
    work = Work(tmp_path / "out.safetensors", resume=True)
    work.begin(dict(SETTINGS))
    chunk = work.chunk("answers-000000", refused)
    assert (unpack_rows(chunk), chunk[1]) == ([[7, 2], []], {"names": ["a", "b"]})
    assert unpack_rows(work.chunk("answers-000001", made)) == [[1, 2], []]
    assert work.chunks == 2
    work.remove()
    assert list(tmp_path.iterdir()) == []


def test_arrays_keep_their_type(tmp_path: Path) -> None:
    """Arrays of every type of traces, and empty ones, are read back with type and shape."""
    arrays = {
        "ranks": np.array([[1, 255]], np.uint8),
        "confidence": np.array([[0.5, 0.25]], np.float16),
        "expected": np.zeros((0, 3), np.float32),
    }
    work = begun(tmp_path)
    found, data = work.chunk("traces-000000", lambda: (arrays, {}))
    assert data == {}
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)
        assert found[name].shape == array.shape


@looped("rows", [[], [[]], [[], [5], [], [1, 2, 3], []]])
def test_rows_of_any_length(rows: list[list[int]]) -> None:
    """Rows come back as they were, empty ones at any place."""
    assert unpack_rows(pack_rows(rows)) == rows


def test_unfinished_run_names_both_continuations(tmp_path: Path) -> None:
    """Without --resume and --force an unfinished run is E202; with force it is deleted."""
    begun(tmp_path)
    error = refusal(tmp_path)
    assert error.code is Code.FILE_EXISTS
    assert "--resume" in error.fix
    assert "--force" in error.fix
    work = Work(tmp_path / "out.safetensors", overwrite=True)
    work.begin({})
    assert work.chunks == 0


@looped("options", [{}, {"resume": True}, {"overwrite": True}])
def test_a_run_that_lives_is_left_alone(tmp_path: Path, options: dict[str, bool]) -> None:
    """While its process lives a run is E204 whatever is given, also after the first check, and keeps its files."""
    first = Work(tmp_path / "out.safetensors")
    begun(tmp_path, chunks=0).release()
    before = sorted(tmp_path.rglob("*"))
    with owner(tmp_path / FOLDER) as process:
        error = refusal(tmp_path, **options)
        assert error.code is Code.FILE_UNWRITABLE
        assert f"process {process.pid} " in error.what
        assert "--force" not in error.fix
        with pytest.raises(TreeoptError, match="is in use"), ending_work(Console(as_json=False), first):
            first.begin(SETTINGS)
    (tmp_path / f".{FOLDER}.lock").unlink()
    assert sorted(tmp_path.rglob("*")) == before


def test_a_run_that_begins_after_the_check_is_not_deleted(tmp_path: Path) -> None:
    """A run that another one began, and left unfinished, since the folder was checked is E202, and stays."""
    late = Work(tmp_path / "out.safetensors")
    begun(tmp_path).release()
    with pytest.raises(TreeoptError, match="is an unfinished run"), ending_work(Console(as_json=False), late):
        late.begin({})
    assert Work(tmp_path / "out.safetensors", resume=True).chunks == 1


@looped("make", [made, refused])
def test_a_folder_of_another_run_is_noticed(tmp_path: Path, make: Callable[[], Chunk]) -> None:
    """Where nothing is locked, and another run begins in the folder, no chunk is written to it, nor read from it."""
    work = begun(tmp_path, chunks=0)
    other = Work(tmp_path / "out.safetensors", overwrite=True)
    other.begin({})
    if make is refused:
        other.chunk("answers-000000", made)
    with pytest.raises(TreeoptError, match="another run has begun") as caught:
        work.chunk("answers-000000", make)
    assert caught.value.code is Code.FILE_UNWRITABLE
    assert other.chunks == (make is refused)


@looped("name", ["answers-000000", "answers-000001"])
def test_a_folder_that_is_deleted_is_named(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that somebody deletes, before a chunk is written or while it is read, is E404 with its name."""
    work = begun(tmp_path)
    shutil.rmtree(tmp_path / FOLDER)
    if name == "answers-000000":
        exists = Path.exists
        monkeypatch.setattr(Path, "exists", lambda file: file.name.startswith(name) or exists(file))
    with pytest.raises(TreeoptError, match=f"{FOLDER} was deleted") as caught:
        work.chunk(name, made)
    assert caught.value.code is Code.SYSTEM_REFUSED


def test_no_run_to_resume(tmp_path: Path) -> None:
    """--resume without an unfinished run is E205."""
    assert refusal(tmp_path, resume=True).code is Code.RESUME_INVALID


def test_other_settings_are_named(tmp_path: Path) -> None:
    """A resumed run with other settings is E205 with both values; the folder stays as it is."""
    begun(tmp_path)
    work = Work(tmp_path / "out.safetensors", resume=True)
    error = refusal_of(work.begin, {**SETTINGS, "batch_size": 4, "learning": {"seed": 1}})
    assert error.code is Code.RESUME_INVALID
    assert error.at.splitlines() == ["batch_size: started with 2, now 4", "learning.seed: started with 0, now 1"]
    assert work.chunks == 1


def test_killed_before_the_first_chunk(tmp_path: Path) -> None:
    """A folder without settings, with the temporary file of a killed write, is begun by --resume."""
    folder = tmp_path / FOLDER
    folder.mkdir()
    (folder / ".begun.json.k1x9").write_bytes(b'{"bat')
    work = Work(tmp_path / "out.safetensors", resume=True)
    work.begin(SETTINGS)
    assert json.loads((folder / "begun.json").read_text()) == SETTINGS
    work.remove()
    assert not folder.exists()


@looped("name", ["notes.txt", "answers-000000.safetensors/x", ".hidden", "answers-1.safetensors"])
@looped("options", [{}, {"resume": True}, {"overwrite": True}])
def test_folders_of_others_are_left_alone(tmp_path: Path, name: str, options: dict[str, bool]) -> None:
    """A folder with any other file is E204, whatever is given, and keeps all files."""
    file = tmp_path / FOLDER / name
    file.parent.mkdir(parents=True)
    file.write_text("mine")
    assert refusal(tmp_path, **options).code is Code.FILE_UNWRITABLE
    assert file.read_text() == "mine"


def test_links_and_files_in_its_place(tmp_path: Path) -> None:
    """Work is never written through a link, nor over a file."""
    (tmp_path / "other").mkdir()
    (tmp_path / FOLDER).symlink_to(tmp_path / "other")
    assert refusal(tmp_path, overwrite=True).code is Code.FILE_UNWRITABLE
    (tmp_path / FOLDER).unlink()
    (tmp_path / FOLDER).write_text("")
    assert refusal(tmp_path, overwrite=True).code is Code.FILE_UNWRITABLE


def test_file_that_appears_later_stays(tmp_path: Path) -> None:
    """The end of a run deletes its own files alone."""
    work = begun(tmp_path)
    (tmp_path / FOLDER / "notes.txt").write_text("mine")
    work.remove()
    assert [file.name for file in (tmp_path / FOLDER).iterdir()] == ["notes.txt"]


@looped("keep", [0, 9, -1])
def test_damaged_chunks_are_named(tmp_path: Path, keep: int) -> None:
    """A stored chunk that was cut or changed is E205 with its file; once removed it is made again."""
    work = begun(tmp_path)
    file = tmp_path / FOLDER / "answers-000000.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(TreeoptError, match="answers-000000") as caught:
        work.chunk("answers-000000", refused)
    assert caught.value.code is Code.RESUME_INVALID
    file.unlink()
    assert unpack_rows(work.chunk("answers-000000", made)) == [[1, 2], []]


@looped("text", ["", "[]", '{"a": '])
def test_damaged_settings_are_named(tmp_path: Path, text: str) -> None:
    """Settings that cannot be read are E205."""
    begun(tmp_path)
    (tmp_path / FOLDER / "begun.json").write_text(text)
    with pytest.raises(TreeoptError, match=r"begun\.json is not what") as caught:
        Work(tmp_path / "out.safetensors", resume=True).begin(SETTINGS)
    assert caught.value.code is Code.RESUME_INVALID


def test_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ENOSPC in a chunk is E403 with --resume as the remedy; the chunks before it are read back."""
    work = begun(tmp_path, chunks=2)

    def full(_handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        error = refusal_of(work.chunk, "answers-000002", made)
    assert error.code is Code.OUT_OF_MEMORY
    assert "--resume" in error.fix
    names = ["answers-000000.safetensors", "answers-000001.safetensors", "begun.json"]
    assert sorted(file.name for file in (tmp_path / FOLDER).iterdir()) == names
    again = Work(tmp_path / "out.safetensors", resume=True)
    again.begin(SETTINGS)
    assert unpack_rows(again.chunk("answers-000001", refused)) == [[7, 2], []]


def test_stop_after_the_chunk_in_flight(tmp_path: Path) -> None:
    """The chunk in flight is stored, and then the run ends; the next one reads it."""
    work = begun(tmp_path)

    def interrupted() -> Chunk:
        work.stop()
        return made()

    with pytest.raises(KeyboardInterrupt):
        work.chunk("answers-000001", interrupted)
    again = Work(tmp_path / "out.safetensors", resume=True)
    again.begin(SETTINGS)
    assert unpack_rows(again.chunk("answers-000001", refused)) == [[1, 2], []]
    assert unpack_rows(again.chunk("answers-000000", refused)) == [[7, 2], []]
    assert again.chunks == 2


def test_a_folder_that_is_deleted_meanwhile_has_no_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process may delete the folder after any look at it."""
    work = Work(tmp_path / "out.safetensors")
    monkeypatch.setattr(Path, "is_dir", lambda _self: True)
    assert work.chunks == 0


def test_the_first_error_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a failed run's folder cannot be deleted either, the error of the run is raised."""
    work = Work(tmp_path / "out.safetensors")
    work.begin(SETTINGS)
    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(TreeoptError, match="cannot be deleted") as caught:
        work.remove()
    assert "none of its outputs" in caught.value.why
    with pytest.raises(ValueError, match="first"), ending_work(Console(as_json=False), work):
        raise ValueError("first")


def refuse(_self: Path) -> None:
    """In place of `Path.unlink`."""
    raise PermissionError(errno.EACCES, "refused")


def test_stop_outside_chunks(tmp_path: Path) -> None:
    """Where no chunk is in flight, before the first, after one or after one that failed, the run ends at once."""
    work = begun(tmp_path)
    with pytest.raises(AssertionError, match="made again"):
        work.chunk("answers-000001", refused)
    with pytest.raises(KeyboardInterrupt):
        work.stop()
    with pytest.raises(KeyboardInterrupt):
        Work(tmp_path / "other.safetensors").stop()


@pytest.mark.slow
def test_kills_inside_writes(tmp_path: Path) -> None:
    """Killed again and again inside writes, the run loses at most a chunk each time, and ends with the same rows."""
    stored, environment = 0, {**os.environ, "PYTHONPATH": str(ROOT_FOLDER)}
    for after in (1, 300, 1000, 1900, 0):  # bytes before the kill, 0 never; a chunk has about 600
        done = subprocess.run([sys.executable, "-c", RUN, str(after)], cwd=tmp_path, env=environment, check=False)
        assert done.returncode == (-signal.SIGKILL if after else 0)
        now = len(list((tmp_path / FOLDER).glob("answers-*"))) if after else 8
        assert now >= stored
        assert now >= stored + after // 800 - 2  # begun.json, and the chunk in flight, may be among the bytes
        stored = now
    assert (tmp_path / "rows.txt").read_text() == repr(WHOLE)
    assert [file.name for file in tmp_path.iterdir()] == ["rows.txt"]


def test_batches_of_a_shard() -> None:
    """Shard i of n has the batches i, i + n, i + 2 n, ..."""
    assert [batch for batch in range(8) if Shard(1, 3).has(batch)] == [1, 4, 7]
    assert [batch for batch in range(8) if Shard(0, 3).has(batch)] == [0, 3, 6]
