"""The lock of an unfinished run: one process at a time writes it.

The lock is the operating system's, on the file `.RUN.lock` beside the run. It ends with the process that took it, also
by kill -9, and processes that this one starts do not have it. The file names its owner, and is deleted when the lock is
released. On a file system without locks, and on Windows, nothing is locked, and a warning says so.
"""

from __future__ import annotations

import contextlib
import os
import platform
import stat
import warnings
from pathlib import Path
from typing import Any

from treeopt.errors import Code, TreeoptError
from treeopt.files.atomic import make_folder, unwritable

fcntl: Any
try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

_OWNER = "process {} on {}"
_MARK = _OWNER.partition("{")[0].encode()
_LONGEST = 300  # bytes of an owner's name
_FLAGS = os.O_RDWR | getattr(os, "O_NOFOLLOW", 0)

# Process and file -> descriptor. A lock of the system belongs to the process, which would lose it by closing any
# descriptor of the file: so it opens the file once.
_held: dict[tuple[int, str], int] = {}


class Lock:
    """The lock of a run.

    Within a process it can be taken again, such as by a run that continues one that an exception ended.

    Args:
        run: the file or folder of the unfinished run.
    """

    def __init__(self, run: Path) -> None:
        self._run = run
        self._file = os.path.join(os.path.realpath(run.parent), f".{run.name}.lock")

    @property
    def held(self) -> bool:
        """Whether this process has the lock."""
        return self._key in _held

    def check(self) -> None:
        """Raise E204 where another process has the lock; nothing is written."""
        if self.held or not os.path.lexists(self._file):
            return
        with contextlib.suppress(FileNotFoundError):
            handle = self._open()
            try:
                self._lock(handle)
            finally:
                os.close(handle)

    def take(self) -> None:
        """Take the lock; E204 where another process has it. The folder above the run is made."""
        if self.held:
            return
        locked = True
        make_folder(self._run.parent)
        try:
            while not self.held:
                handle = self._open(os.O_CREAT)
                try:
                    locked = self._lock(handle)
                    if self._is_there(handle):  # else its owner deleted it after it was opened here
                        _held[self._key] = handle
                        os.ftruncate(handle, 0)
                        os.lseek(handle, 0, os.SEEK_SET)
                        os.write(handle, _OWNER.format(os.getpid(), platform.node()).encode())
                finally:
                    if not self.held:
                        os.close(handle)
        except OSError as error:
            self.release()
            raise unwritable(self._file, error) from error
        if not locked:
            what = f"{self._run} cannot be locked: its file system has no locks. Start no second run with this output"
            warnings.warn(what, RuntimeWarning, stacklevel=2)

    def release(self) -> None:
        """Delete the file and give up the lock; nothing where this process does not have it."""
        handle = _held.pop(self._key, None)
        if handle is None:
            return
        with contextlib.suppress(OSError):  # nothing is lost by a file that stays
            if self._is_there(handle):
                os.unlink(self._file)
        os.close(handle)

    def __enter__(self) -> None:
        self.take()

    def __exit__(self, *_error: object) -> None:
        self.release()

    @property
    def _key(self) -> tuple[int, str]:
        return os.getpid(), self._file

    def _open(self, more: int = 0) -> int:
        """The file; E204 where it is a link, or not what this module wrote."""
        try:
            handle = os.open(self._file, _FLAGS | more, 0o666)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise unwritable(self._file, error) from error
        if stat.S_ISREG(os.fstat(handle).st_mode) and _beginning(handle, len(_MARK)) in (b"", _MARK):
            return handle
        os.close(handle)
        what = f"{self._file} is not what treeopt wrote, but a run is locked by a file of this name"
        raise TreeoptError(Code.FILE_UNWRITABLE, what, fix="move it away, or choose another name with -o")

    def _lock(self, handle: int) -> bool:
        """Lock the open file, or raise E204 where another process has it; False where the system has no locks."""
        try:
            if fcntl is not None:
                fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return fcntl is not None
        except (BlockingIOError, PermissionError) as error:
            owner = _beginning(handle, _LONGEST).decode(errors="replace") or "another process"
            what = f"{self._run} is in use: {owner} is writing it"
            fix = "wait until it has ended, or end it; or choose another name with -o"
            raise TreeoptError(
                Code.FILE_UNWRITABLE, what, why="the parts of two runs in one place would be mixed", fix=fix
            ) from error
        except OSError:  # ENOLCK, ENOSYS, EOPNOTSUPP and others
            return False

    def _is_there(self, handle: int) -> bool:
        """Whether the open file is the one of this name."""
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(handle), os.stat(self._file))
        return False


def _beginning(handle: int, length: int) -> bytes:
    """The first bytes of an open file, at most so many."""
    os.lseek(handle, 0, os.SEEK_SET)
    return os.read(handle, length)
