"""Locks of unfinished runs: one process has a lock, which ends with it, however it ends."""

from __future__ import annotations

import errno
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from looped import looped
from owners import owner
from refusals import refusal_of

from treeopt.errors import Code, TreeoptError
from treeopt.runs import lock as locks_module
from treeopt.runs.lock import Lock

# Two children of the owner that live until the test ends: one of a fork, and one that inherits open files.
CHILDREN = """
import os, subprocess
if not os.fork():
    os.read(0, 1)
    os._exit(0)
subprocess.Popen([sys.executable, "-c", "import os; os.read(0, 1)"], close_fds=False)
"""


@pytest.fixture
def lock(tmp_path: Path) -> Iterator[Lock]:
    """The lock of a run."""
    lock = Lock(tmp_path / "run.partial")
    yield lock
    lock.release()


def refusal(call: Any) -> TreeoptError:
    """The error of a call, which is E204."""
    error = refusal_of(call)
    assert error.code is Code.FILE_UNWRITABLE
    return error


def test_a_live_owner_is_named(lock: Lock, tmp_path: Path) -> None:
    """While another process lives its lock is E204 with its number and machine; after kill -9 the lock is free."""
    with owner(tmp_path / "run.partial") as process:
        for call in (lock.check, lock.take):
            error = refusal(call)
            assert f"process {process.pid} on {platform.node()} is writing it" in error.what
            assert "end it" in error.fix
        process.kill()
        process.wait()
        lock.check()
        lock.take()
    assert (tmp_path / ".run.partial.lock").read_text() == f"process {os.getpid()} on {platform.node()}"
    lock.release()
    assert list(tmp_path.iterdir()) == []


def test_children_of_a_killed_owner_do_not_have_its_lock(lock: Lock, tmp_path: Path) -> None:
    """Children by fork, and children that inherit files, live on without the lock."""
    with owner(tmp_path / "run.partial", then=CHILDREN) as process:
        refusal(lock.take)
        process.kill()
        process.wait()
        lock.take()


def test_a_lock_is_taken_again_by_its_process(lock: Lock, tmp_path: Path) -> None:
    """A run that continues another one of its process has its lock, which other processes have not."""
    lock.take()
    again = Lock(tmp_path / "run.partial")
    again.check()
    again.take()
    with pytest.raises(AssertionError, match="is in use"), owner(tmp_path / "run.partial"):
        pass
    again.release()
    assert not lock.held
    with owner(tmp_path / "run.partial"):
        pass


def test_a_file_that_its_owner_deletes_meanwhile_is_no_lock(
    lock: Lock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that is deleted between its opening and its locking, as at the end of a run, is made again."""
    whole, file = locks_module.fcntl.lockf, tmp_path / ".run.partial.lock"
    calls = []

    def late(handle: int, *options: int) -> None:
        calls.append(handle)
        if len(calls) == 1:
            file.unlink()
        whole(handle, *options)

    monkeypatch.setattr(locks_module.fcntl, "lockf", late)
    lock.take()
    assert len(calls) == 2
    with pytest.raises(AssertionError, match="is in use"), owner(tmp_path / "run.partial"):
        pass


def test_the_lock_of_another_process_stays(lock: Lock, tmp_path: Path) -> None:
    """Where somebody deletes the file, another process can take the lock; its file is not deleted at the end."""
    lock.take()
    (tmp_path / ".run.partial.lock").unlink()
    with owner(tmp_path / "run.partial") as process:
        lock.release()
        assert (tmp_path / ".run.partial.lock").read_text().startswith(f"process {process.pid} ")


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is locked, a warning says so, and the file is deleted."""
    lock = Lock(tmp_path / "run.partial")

    def refuse(*_arguments: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    with monkeypatch.context() as patch:
        patch.setattr(locks_module.fcntl, "lockf", refuse)
        lock.check()
        with pytest.warns(RuntimeWarning, match=r"run\.partial cannot be locked"):
            lock.take()
        lock.release()
    assert list(tmp_path.iterdir()) == []


@looped("kind", ["link", "text", "pipe", "folder"])
def test_files_of_others_in_its_place_stay(kind: str, tmp_path: Path) -> None:
    """A link, and a file, pipe or folder that treeopt did not write, is E204 and stays as it is."""
    lock = Lock(tmp_path / "run.partial")
    file, other = tmp_path / ".run.partial.lock", tmp_path / "other"
    other.write_text("mine")
    if kind == "link":
        file.symlink_to(other)
    elif kind == "text":
        file.write_text("mine")
    elif kind == "pipe":
        os.mkfifo(file)
    else:
        file.mkdir()
    before = file.lstat()
    for call in (lock.check, lock.take):
        assert str(file) in refusal(call).what
    assert other.read_text() == "mine"
    assert (file.lstat().st_mode, file.lstat().st_size) == (before.st_mode, before.st_size)


def test_a_full_disk(lock: Lock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the owner's name cannot be written the error is E403, and nothing is left."""

    def full(*_arguments: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    assert refusal_of(lock.take).code is Code.OUT_OF_MEMORY
    assert not lock.held
    assert list(tmp_path.iterdir()) == []
