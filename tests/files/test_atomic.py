"""Files are written whole or not at all."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest
from looped import looped
from refusals import refusal_of

from treeopt.errors import Code, TreeoptError
from treeopt.files.atomic import check_writable, write_bytes, write_files, write_text
from treeopt.files.read import read_bytes


@pytest.fixture
def restore_umask() -> Iterator[None]:
    """Puts the umask back."""
    before = os.umask(0o022)
    yield
    os.umask(before)


def disk_full(*_: object, **__: object) -> NoReturn:
    """What a full disk answers."""
    raise OSError(errno.ENOSPC, "No space left on device")


@looped("call", ["replace", "fsync", "chmod"])
def test_failing_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """Where the disk is full, the old file stays and no temporary file does: E403."""
    target = tmp_path / "tree.yaml"
    target.write_text("old")
    monkeypatch.setattr(os, call, disk_full)
    error = refusal_of(write_text, target, "new")
    assert error.code is Code.OUT_OF_MEMORY
    assert error.exit_status == 4
    assert "No space left on device" in error.what
    assert os.listdir(tmp_path) == ["tree.yaml"]
    assert target.read_text() == "old"


@looped(
    ("number", "code"),
    [(errno.ENOSPC, Code.OUT_OF_MEMORY), (errno.EDQUOT, Code.OUT_OF_MEMORY), (errno.EROFS, Code.FILE_UNWRITABLE)],
)
def test_failing_temporary_file_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, code: Code
) -> None:
    """Where not even the temporary file can be made: E403 where there is no room, E204 for any other reason."""

    def refuse(*_: object, **__: object) -> NoReturn:
        raise OSError(number, os.strerror(number))

    target = tmp_path / "tree.yaml"
    target.write_text("old")
    monkeypatch.setattr(tempfile, "mkstemp", refuse)
    assert refusal_of(write_text, target, "new").code is code
    assert target.read_text() == "old"


def test_interrupted_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interruption cleans up and goes on as itself."""

    def interrupt(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    target = tmp_path / "tree.yaml"
    target.write_text("old")
    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_text(target, "new")
    assert os.listdir(tmp_path) == ["tree.yaml"]
    assert target.read_text() == "old"


def test_a_write_is_whole_and_a_check_none(tmp_path: Path) -> None:
    """A shorter content leaves nothing of a longer one; the check before long work leaves no trace."""
    target = tmp_path / "tree.yaml"
    target.write_text("a long old text")
    write_text(target, "τ = 2.5\n")
    assert target.read_bytes() == b"\xcf\x84 = 2.5\n"
    assert os.listdir(tmp_path) == ["tree.yaml"]
    assert check_writable(tmp_path / "new", overwrite=False) == tmp_path / "new"
    assert os.listdir(tmp_path) == ["tree.yaml"]


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    """E204 where the folder is missing, with the command that makes it, and where the target is a folder."""
    error = refusal_of(write_text, tmp_path / "absent" / "tree.yaml", "new")
    assert error.code is Code.FILE_UNWRITABLE
    assert error.fix == f"mkdir -p {tmp_path / 'absent'}"
    assert os.listdir(tmp_path) == []
    for overwrite in (True, False):
        error = refusal_of(write_bytes, tmp_path, b"new", overwrite=overwrite)
        assert error.code is Code.FILE_UNWRITABLE
        assert "is a folder" in error.what


def test_read_only_folder_is_unwritable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """E204 where the folder takes no files; asked of the system, because root may write anywhere."""
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert refusal_of(check_writable, tmp_path / "tree.yaml", overwrite=True).code is Code.FILE_UNWRITABLE


@pytest.mark.usefixtures("restore_umask")
@looped(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_permissions_follow_the_umask(tmp_path: Path, umask: int, mode: int) -> None:
    """A written file has the permissions of any new file, and the umask is as before."""
    os.umask(umask)
    write_text(tmp_path / "tree.yaml", "new")
    assert stat.S_IMODE((tmp_path / "tree.yaml").stat().st_mode) == mode
    assert os.umask(umask) == umask


def test_existing_file_is_kept_unless_overwriting(tmp_path: Path) -> None:
    """E202 names --force; with it the file is replaced."""
    target = tmp_path / "calibration.safetensors"
    target.write_text("old")
    error = refusal_of(write_bytes, target, b"new", overwrite=False)
    assert error.code is Code.FILE_EXISTS
    assert "--force" in error.fix
    assert target.read_text() == "old"
    write_bytes(target, b"new", overwrite=True)
    assert target.read_text() == "new"


def test_what_cannot_be_read(tmp_path: Path) -> None:
    """E201 names a missing file; a folder is no file: E203."""
    error = refusal_of(read_bytes, tmp_path / "absent")
    assert error.code is Code.FILE_MISSING
    assert str(tmp_path / "absent") in error.what
    assert refusal_of(read_bytes, tmp_path).code is Code.FILE_INVALID


def test_files_that_cannot_be_put_back_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the disk fails at the second rename and at every undo, the old content of the first file is still there."""
    first, second = tmp_path / "a.txt", tmp_path / "b.txt"
    write_files({first: b"old a", second: b"old b"})
    replace, calls = os.replace, 0

    def failing(source: str, target: Path) -> None:
        nonlocal calls
        calls += 1
        if calls > 1:
            raise OSError(errno.EIO, "Input/output error")
        replace(source, target)

    monkeypatch.setattr(os, "replace", failing)
    with pytest.raises(TreeoptError):
        write_files({first: b"new a", second: b"new b"})
    assert (first.read_bytes(), second.read_bytes()) == (b"new a", b"old b")
    assert [path.read_bytes() for path in tmp_path.iterdir() if path not in (first, second)] == [b"old a"]


@looped("at", [0, 1, 2])
def test_rename_that_fails_names_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """The error is of the file whose rename failed, and none of the files is changed."""
    files = [tmp_path / name for name in ("a.txt", "b.txt", "c.txt")]
    replace, calls = os.replace, 0

    def failing(source: str, target: Path) -> None:
        nonlocal calls
        calls += 1
        if calls == at + 1:
            raise PermissionError(errno.EACCES, "Permission denied", source, None, str(target))
        replace(source, target)

    monkeypatch.setattr(os, "replace", failing)
    error = refusal_of(write_files, dict.fromkeys(files, b"new"))
    assert files[at].name in f"{error.what} {error.at}"
    assert list(tmp_path.iterdir()) == []
