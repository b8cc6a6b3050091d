"""Files are written whole or not at all: a temporary name beside the target, then one rename."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from treeopt.errors import Code, TreeoptError


def check_writable(path: str | os.PathLike[str], *, overwrite: bool) -> Path:
    """The path, after checking that a file can be written there; called before any long work.

    Raises:
        TreeoptError: E202 where it exists and `overwrite` is off, E204 where its folder is missing or not writable.
    """
    target = Path(os.path.realpath(path))  # through a link to the file itself
    folder = target.parent
    if target.is_dir():
        raise TreeoptError(Code.FILE_UNWRITABLE, f"{path} is a folder", fix="name a file in it")
    if target.exists() and not target.is_file():
        raise TreeoptError(
            Code.FILE_UNWRITABLE, f"{path} is a device or pipe, which cannot be written whole or not at all"
        )
    if not folder.is_dir():
        raise TreeoptError(
            Code.FILE_UNWRITABLE, f"the folder {Path(path).parent} does not exist", fix=f"mkdir -p {Path(path).parent}"
        )
    if not os.access(folder, os.W_OK):
        raise TreeoptError(Code.FILE_UNWRITABLE, f"the folder {Path(path).parent} cannot be written to")
    if target.exists() and not overwrite:
        raise TreeoptError(
            Code.FILE_EXISTS, f"{path} exists", fix="choose another name with -o, or overwrite it with --force"
        )
    return target


def check_folder(path: str | os.PathLike[str]) -> Path:
    """The folder, after checking that it is there or can be made; called before any long work.

    Raises:
        TreeoptError: E204 where it is no folder or what it would stand in cannot be written to.
    """
    folder = Path(path)
    known = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not known.is_dir():
        raise TreeoptError(Code.FILE_UNWRITABLE, f"{known} is a file, not a folder", fix="name another folder with -o")
    if not os.access(known, os.W_OK):
        raise TreeoptError(Code.FILE_UNWRITABLE, f"the folder {folder} cannot be made or written to", at=str(known))
    return folder


def make_folder(path: str | os.PathLike[str]) -> Path:
    """The folder, made with all above it where it is missing.

    Raises:
        TreeoptError: E204 where it cannot be made.
    """
    folder = check_folder(path)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def write_bytes(path: str | os.PathLike[str], content: bytes, *, overwrite: bool = True) -> None:
    """Write the whole file or leave what was there.

    Raises:
        TreeoptError: as `check_writable`; E204 where the disk refuses.
    """
    target = check_writable(path, overwrite=overwrite)
    try:
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    except OSError as error:
        raise TreeoptError(Code.FILE_UNWRITABLE, f"{target} cannot be written: {error.strerror}") from error
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, target)
    except BaseException as error:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        if isinstance(error, OSError):
            raise TreeoptError(Code.FILE_UNWRITABLE, f"{target} cannot be written: {error.strerror}") from error
        raise


def write_text(path: str | os.PathLike[str], content: str) -> None:
    """`write_bytes` for text, in UTF-8."""
    write_bytes(path, content.encode())


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """The content of a file that must exist.

    Raises:
        TreeoptError: E201 where it is missing, E203 where it is a folder or unreadable.
    """
    try:
        return Path(path).read_bytes()
    except FileNotFoundError as error:
        raise TreeoptError(Code.FILE_MISSING, f"there is no file {path}") from error
    except OSError as error:
        raise TreeoptError(Code.FILE_INVALID, f"{path} cannot be read: {error.strerror}") from error


def _umask() -> int:
    """The process's umask; reading it means setting it, so it is put back at once."""
    current = os.umask(0)
    os.umask(current)
    return current
