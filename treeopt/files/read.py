"""Reading of files with a bound, also where a name leads to a pipe, a device or a link.

A folder from a stranger may hold a pipe that nobody writes to, or a link to a device without an end. Neither hangs a
command or fills its memory.
"""

import contextlib
import errno
import hashlib
import json
import math
import os
import select
import stat
from collections import Counter
from collections.abc import Iterator
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from treeopt.errors import Code, TreeoptError

MOST_BYTES = 1 << 34  # of a file of arrays; a calibration of 100,000,000 tokens and four heads has less
MOST_TEXT = 1 << 31  # of a file of prompts or training texts
MOST_SETTINGS = 1 << 25  # of a config, a note or an index of weights; the index of a model of 671 B weights has 2^23
HEADER_KEY = "treeopt"  # of the one entry in the metadata of a safetensors file
MAX_HEADER = 100_000_000  # bytes of a safetensors header, as in the format's own reader
_MOST_PIPED = 1 << 26  # of a pipe or device, whose size is not known before it is read
_LARGE = 1 << 28  # files of this size or more are compared with the free memory
_PIECE = 1 << 20
_WAIT_MS = 5000  # for another process to open a pipe


def check_there(path: str | os.PathLike[str], what: str, *, why: str = "", fix: str) -> None:
    """Raise E201, with the command that makes it, where there is no file or folder of this name."""
    if not os.path.exists(path):
        raise TreeoptError(Code.FILE_MISSING, f"there is no {what}", why=why, fix=fix)


def read_bytes(path: str | os.PathLike[str], most: int = MOST_BYTES) -> bytes:
    """The content of a file, or at most 64 MiB of a pipe: E201, E203 (more than `most` bytes, too), E403, E404."""
    with _errors(path):
        size = os.stat(path).st_size
        if size <= most:
            _check_memory(path, size)
            raw, size = read_start(path, most + 1)
    if size > most:
        raise TreeoptError(Code.FILE_INVALID, f"{path} has {size:,} bytes; at most {most:,} are read")
    return raw


def read_head(path: str | os.PathLike[str], most: int) -> bytes:
    """The first bytes of a file, at most so many; errors as `read_bytes`."""
    with _errors(path):
        return read_start(path, most)[0]


def read_start(path: str | os.PathLike[str], most: int) -> tuple[bytes, int]:
    """The first bytes of a file, and its size as far as it is known; OSError or ValueError, for a folder too."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        state = os.fstat(handle)
        if stat.S_ISDIR(state.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not stat.S_ISREG(state.st_mode):
            raw = _read_pipe(handle, min(most, _MOST_PIPED + 1))
            return raw, len(raw) if len(raw) < most else max(len(raw), most)
        with os.fdopen(handle, "rb", closefd=False) as stream:
            raw = stream.read(min(most, max(state.st_size, _PIECE)))  # files of /proc state the size 0
        return raw, max(len(raw), state.st_size)
    finally:
        os.close(handle)


def header_of(path: str | os.PathLike[str]) -> dict[str, Any] | None:
    """treeopt's header in a safetensors file, as `header_in` gives it; None for a folder and a pipe."""
    if not is_regular(path):
        return None
    length = int.from_bytes(read_head(path, 8), "little")
    return header_in(read_head(path, 8 + length)) if length <= MAX_HEADER else None


def header_in(raw: bytes) -> dict[str, Any] | None:
    """treeopt's header in the first bytes of a safetensors file: empty where it has none, None for another format."""
    length = int.from_bytes(raw[:8], "little")
    if raw[8:9] != b"{" or not 2 <= length <= MAX_HEADER:
        return None
    with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
        found = parse_json(json.loads(raw[8 : 8 + length])["__metadata__"][HEADER_KEY])
        return found if isinstance(found, dict) else {}
    return {}


def sha256_of(path: str | os.PathLike[str]) -> str:
    """The SHA-256 of a file of any size, in hexadecimal digits; errors as `read_bytes`."""
    with _errors(path):
        if not is_regular(path):
            read_start(path, 0)  # raises where there is nothing to read
            raise OSError("it is not a regular file")
        with open(path, "rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()


def is_regular(path: str | os.PathLike[str]) -> bool:
    """Whether a path leads to a regular file; False for a name that no file can have."""
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except (OSError, ValueError):
        return False


def leaves_folder(name: str) -> bool:
    """Whether a name in a file may, on any system, be outside the folder that it is relative to."""
    kinds = (PurePosixPath(name), PureWindowsPath(name))
    return any(path.is_absolute() or path.anchor or ".." in path.parts for path in kinds) or not name.strip(os.curdir)


def stays_in(file: Path, *folders: Path) -> bool:
    """Whether a file, with all links followed, is in one of these folders."""
    try:
        found = Path(os.path.realpath(file))
    except ValueError:  # no file can have this name
        return False
    return any(Path(os.path.realpath(folder)) in found.parents for folder in folders)


def path_from(folder: str | os.PathLike[str], name: str | os.PathLike[str]) -> str:
    """The path of a file from a folder, whose links are followed: it holds by each name of the folder."""
    place, last = os.path.split(os.path.abspath(name))
    return os.path.relpath(os.path.join(_real(place), last), _real(folder))


def path_beside(folder: str | os.PathLike[str], name: str) -> str:
    """The path that a file in a folder names, without `..` where that is the same file; across a link it is not."""
    path = os.path.join(folder, name)
    plain = os.path.normpath(path)
    return plain if _real(plain) == _real(path) else _real(path)


def _real(path: str | os.PathLike[str]) -> str:
    """The path without links; as it is where no file can have that name."""
    try:
        return os.path.realpath(path)
    except ValueError:
        return os.path.abspath(path)


def unreadable(path: str | os.PathLike[str], error: OSError | ValueError) -> TreeoptError:
    """E404 where a file may not be read, else E203; a ValueError is about a zero byte or a lone surrogate in a name."""
    reason = (error.strerror or str(error)) if isinstance(error, OSError) else "no file can have this name"
    what = f"{path} cannot be read: {reason}"
    if isinstance(error, PermissionError):
        return TreeoptError(Code.SYSTEM_REFUSED, what)
    return TreeoptError(Code.FILE_INVALID, what)


def parse_json(raw: bytes | str, *, finite: bool = True) -> Any:
    """The value of a JSON document; ValueError where it is none, has a key twice, or a number that is not `finite`."""
    numbers: dict[str, Any] = {"parse_constant": _finite, "parse_float": _finite} if finite else {}
    try:
        return json.loads(raw, object_pairs_hook=_unique, **numbers)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def read_settings(file: Path) -> Any:
    """The value of a small JSON file of any program; of equal keys the last one counts, as in that program."""
    raw = read_bytes(file, MOST_SETTINGS)
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        what = "nested too deeply" if isinstance(error, RecursionError) else str(error).splitlines()[0]
        raise TreeoptError(Code.FILE_INVALID, f"{file} is not JSON: {what}") from error


@contextlib.contextmanager
def _errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn errors of the system into ours."""
    try:
        yield
    except FileNotFoundError as error:
        raise TreeoptError(Code.FILE_MISSING, f"there is no file {path}") from error
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error


def _read_pipe(handle: int, most: int) -> bytes:
    """The first bytes of a pipe or device that was opened without waiting."""
    ready = select.poll()
    ready.register(handle, select.POLLIN)
    if stat.S_ISFIFO(os.fstat(handle).st_mode) and not ready.poll(_WAIT_MS):
        with contextlib.suppress(BlockingIOError):  # a process has opened it, and has not written yet
            os.read(handle, 1)
            raise OSError("nobody writes to this pipe")
    raw = bytearray()
    while len(raw) < most:
        ready.poll()
        piece = os.read(handle, min(_PIECE, most - len(raw)))
        if not piece:
            break
        raw += piece
    return bytes(raw)


def _check_memory(path: str | os.PathLike[str], size: int) -> None:
    """Raise E403 where a large file does not fit into the free memory."""
    if size < _LARGE:
        return
    import psutil

    if size > psutil.virtual_memory().available:
        what = f"{path} has {size:,} bytes, which do not fit into the free memory"
        raise TreeoptError(Code.OUT_OF_MEMORY, what, fix="use a machine with more memory")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        [(twice, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"it has the key {twice[:40]!r} twice")
    return made


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is not a finite number")
    return value
