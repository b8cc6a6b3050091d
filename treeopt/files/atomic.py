"""Atomic writes: a temporary file beside the target, then one rename."""

import contextlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from treeopt.errors import Code, TreeoptError, system_error

STANDARD_STREAM = "-"
_STREAMS = ("/dev/std", "/dev/fd/", "/proc/self/fd/")  # such as /dev/stdout, a link to the target of a redirection
LEAST_SPACE = 4 * 1024  # free bytes that are required before any work that ends in a file
_SHOWN_CHARACTERS = 40  # of the target's name in that of the temporary file; at most 4 bytes each


def check_writable(path: str | os.PathLike[str], *, overwrite: bool) -> Path:
    """The path, after checking before any work that a file can be written there; else E202, E204 or E403."""
    if not str(path) or str(path) == STANDARD_STREAM or str(path).startswith(_STREAMS):
        what = f"{str(path)!r} is not the name of a file"
        raise TreeoptError(Code.FILE_UNWRITABLE, what, why="files are written atomically", fix="-o FILE")
    target = Path(os.path.realpath(path))  # of a link, the file that it points to
    try:
        exists = os.path.lexists(path) and _checked_existing(path, target)
        if target.parent.exists() and not target.parent.is_dir():
            raise TreeoptError(Code.FILE_UNWRITABLE, f"{Path(path).parent} is a file, not a folder")
        if not target.parent.is_dir():
            fix = f"mkdir -p {Path(path).parent}"
            raise TreeoptError(Code.FILE_UNWRITABLE, f"the folder {Path(path).parent} does not exist", fix=fix)
        with contextlib.suppress(FileNotFoundError):
            os.lstat(target)  # OSError where the file system does not accept the name
    except OSError as error:
        raise unwritable(path, error) from error
    if not os.access(target.parent, os.W_OK):
        raise TreeoptError(Code.FILE_UNWRITABLE, f"the folder {Path(path).parent} cannot be written to")
    if exists and not overwrite:
        raise TreeoptError(Code.FILE_EXISTS, f"{path} exists")
    check_space(target.parent, LEAST_SPACE)
    return target


def _checked_existing(path: str | os.PathLike[str], target: Path) -> bool:
    """True for a regular file or a link to one; E204 for anything else that exists."""
    if target.is_dir():
        raise TreeoptError(Code.FILE_UNWRITABLE, f"{path} is a folder", fix="name a file in it")
    if not target.exists():
        what = f"{path} is a symbolic link to {target}, which does not exist"
        raise TreeoptError(Code.FILE_UNWRITABLE, what, fix="remove the link, or name the file itself")
    if not target.is_file():
        raise TreeoptError(Code.FILE_UNWRITABLE, f"{path} is a device or pipe, which cannot be written atomically")
    return True


def check_space(folder: str | os.PathLike[str], needed: int, what: str = "a file") -> None:
    """Raise E403 where the disk of a folder, which need not exist yet, has fewer bytes free than `what` needs."""
    usage = shutil.disk_usage(nearest(Path(folder)))
    if usage.total and usage.free < needed:  # virtual file systems have no size
        said = f"{what} needs {in_words(needed)} on disk, and {in_words(usage.free)} are free"
        fix = "free some space, or write to another disk with -o"
        raise TreeoptError(Code.OUT_OF_MEMORY, said, at=str(folder), fix=fix)


def nearest(folder: Path) -> Path:
    """The folder, or the first above it that exists."""
    return next(place for place in (folder, *folder.absolute().parents) if place.exists())


def in_words(size: int) -> str:
    """A number of bytes with a unit: `7.2 MB`."""
    for unit, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if size >= unit:
            return f"{size / unit:.1f} {name}"
    return f"{size} bytes"


def unwritable(path: str | os.PathLike[str], error: OSError) -> TreeoptError:
    """E403 where the disk is full, else E204 with the message of the system."""
    known = system_error(error)
    if known is not None and known.code is Code.OUT_OF_MEMORY:
        return TreeoptError(known.code, f"{path} cannot be written: {known.what}", fix=known.fix)
    return TreeoptError(Code.FILE_UNWRITABLE, f"{path} cannot be written: {error.strerror or error}")


def check_folder(path: str | os.PathLike[str]) -> Path:
    """The folder, after checking before any work that it exists or can be made; else E204."""
    folder = Path(path)
    known = nearest(folder)
    if not known.is_dir():
        raise TreeoptError(Code.FILE_UNWRITABLE, f"{known} is a file, not a folder", fix="name another folder with -o")
    if not os.access(known, os.W_OK):
        raise TreeoptError(Code.FILE_UNWRITABLE, f"the folder {folder} cannot be made or written to", at=str(known))
    return folder


def make_folder(path: str | os.PathLike[str]) -> Path:
    """The folder, which is made with its parents where it is missing."""
    folder = check_folder(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(folder, error) from error
    return folder


def write_bytes(path: str | os.PathLike[str], content: bytes | Iterable[bytes], *, overwrite: bool = True) -> None:
    """Write the whole file, or leave the previous one unchanged."""
    write_files({Path(path): content}, overwrite=overwrite)


def write_files(contents: Mapping[Path, bytes | Iterable[bytes]], *, overwrite: bool = True) -> None:
    """Write several files that belong together, each beside its target first: all of them are renamed, or none."""
    targets = {path: check_writable(path, overwrite=overwrite) for path in contents}
    staged: dict[Path, str] = {}
    writing = next(iter(contents))
    try:
        for writing, content in contents.items():
            target = targets[writing]
            handle, staged[target] = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name[:_SHOWN_CHARACTERS]}.")
            with os.fdopen(handle, "wb") as stream:
                stream.writelines([content] if isinstance(content, bytes) else content)
                stream.flush()
                os.fsync(stream.fileno())
            # A file that is replaced keeps its mode.
            os.chmod(staged[target], stat.S_IMODE(target.stat().st_mode) if target.exists() else new_file_mode())
        _rename_all(staged)
    except BaseException as error:
        _discard(*staged.values())
        if isinstance(error, OSError):
            renamed = {temporary: target for target, temporary in staged.items()}
            raise unwritable(renamed.get(error.filename, targets[writing]), error) from error
        raise


def _rename_all(staged: Mapping[Path, str]) -> None:
    """Rename temporary files to their targets; where one cannot be renamed, put back what was there."""
    *earlier, last = staged  # after the last rename nothing can fail
    undo: dict[Path, str | None] = {}
    try:
        for target in earlier:
            with contextlib.suppress(OSError):  # some file systems have no hard links; there nothing is put back
                old = f"{staged[target]}.old" if target.exists() else None
                if old is not None:
                    os.link(target, old)
                undo[target] = old
            os.replace(staged[target], target)
        os.replace(staged[last], last)
    except BaseException:
        for target, old in list(undo.items()):
            try:
                _discard(target) if old is None else os.replace(old, target)
            except OSError:  # the link is the only copy of what was there: it stays
                del undo[target]
        raise
    finally:  # also after the undo: a rename between two links of one file does nothing
        _discard(*(old for old in undo.values() if old is not None))


def _discard(*files: str | Path) -> None:
    """Delete files; one that cannot be deleted stays, as another error is raised or the work is done."""
    for file in files:
        with contextlib.suppress(OSError):
            os.unlink(file)


def write_text(path: str | os.PathLike[str], content: str) -> None:
    write_bytes(path, content.encode())


def new_file_mode() -> int:
    """The mode of a file that the process makes; the umask can be read only by setting it."""
    umask = os.umask(0)
    os.umask(umask)
    return 0o666 & ~umask
