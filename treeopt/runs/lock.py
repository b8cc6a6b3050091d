"""The lock of an unfinished run: one process at a time writes it.

The lock is the operating system's, on the file `.RUN.lock` beside the run. It ends with the process that took it, also
by kill -9, and processes that this one starts do not have it. The file names its owner, and is deleted when the lock is
released. On a file system without locks nothing is locked, and a warning says so.
"""

import contextlib
import fcntl
import os
import platform
import stat
import warnings
from collections.abc import Iterator
from pathlib import Path

from treeopt.errors import Code, TreeoptError
from treeopt.files.atomic import make_folder, unwritable

_OWNER = "process {} on {}"
_MARK = _OWNER.partition("{")[0].encode()
_LONGEST = 300  # bytes of an owner's name
_FLAGS = os.O_RDWR | os.O_NOFOLLOW

# Process and file -> descriptor. A lock of the system belongs to the process, which would lose it by closing any
# descriptor of the file: so it opens the file once.
_held: dict[tuple[int, str], int] = {}


class Lock:
    """The lock of an unfinished run, a file or folder; its process can take it again, such as after an exception."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._file = os.path.join(os.path.realpath(run.parent), f".{run.name}.lock")

    @property
    def held(self) -> bool:
        """Whether this process has the lock."""
        return self._key in _held

    def check(self) -> None:
        """Raise E204 where another process has the lock; nothing is written."""
        if not self.held and os.path.lexists(self._file):
            with contextlib.suppress(FileNotFoundError), self._locked():
                pass

    def take(self) -> None:
        """Take the lock; E204 where another process has it. The folder above the run is made."""
        if self.held:
            return
        make_folder(self._run.parent)
        try:
            while not self.held:
                with self._locked(create=True) as handle:
                    if self._is_there(handle):  # else its owner deleted it after it was opened here
                        _held[self._key] = handle
                        os.ftruncate(handle, 0)
                        os.write(handle, _OWNER.format(os.getpid(), platform.node()).encode())
        except OSError as error:
            self.release()
            raise unwritable(self._file, error) from error

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

    @contextlib.contextmanager
    def _locked(self, *, create: bool = False) -> Iterator[int]:
        """The open file, locked, until the end of the block, or of the process where it is in `_held`."""
        handle = self._open(_FLAGS | (os.O_CREAT if create else 0))
        try:
            self._lock(handle, warns=create)
            yield handle
        finally:
            if not self.held:
                os.close(handle)

    def _open(self, flags: int) -> int:
        """The file; E204 where it is a link, or not what this module wrote."""
        try:
            handle = os.open(self._file, flags, 0o666)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise unwritable(self._file, error) from error
        if stat.S_ISREG(os.fstat(handle).st_mode) and os.pread(handle, len(_MARK), 0) in (b"", _MARK):
            return handle
        os.close(handle)
        what = f"{self._file} is not what treeopt wrote, but a run is locked by a file of this name"
        raise TreeoptError(Code.FILE_UNWRITABLE, what, fix="move it away, or choose another name with -o")

    def _lock(self, handle: int, *, warns: bool) -> None:
        """Lock the open file, or raise E204 where another process has it; warn where the system has no locks."""
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            owner = os.pread(handle, _LONGEST, 0).decode(errors="replace") or "another process"
            what = f"{self._run} is in use: {owner} is writing it"
            why = "the parts of two runs in one place would be mixed"
            fix = "wait until it has ended, or end it; or choose another name with -o"
            raise TreeoptError(Code.FILE_UNWRITABLE, what, why=why, fix=fix) from error
        except OSError:  # ENOLCK, ENOSYS, EOPNOTSUPP and others
            what = f"{self._run} cannot be locked: its file system has no locks. Start no second run with this output"
            if warns:
                warnings.warn(what, RuntimeWarning, stacklevel=5)

    def _is_there(self, handle: int) -> bool:
        """Whether the open file is the one of this name."""
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(handle), os.stat(self._file))
        return False
