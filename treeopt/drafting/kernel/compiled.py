"""Compilation of the drafting kernel by numba, with the machine code kept between processes.

numba keys its cache by the file of a function and not by the files of the functions that it calls. So the cache folder
is named by the hash of all kernel sources, and a change in one of them compiles all again.
"""

import functools
import hashlib
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numba
from numba.core import config

Function = TypeVar("Function", bound=Callable[..., object])

_log = logging.getLogger(__name__)
_HERE = Path(__file__).parent
_SOURCES = ("compiled.py", "data.py", "nodes.py", "trees.py", "paths.py", "memory.py")


def compiled(function: Function) -> Function:
    """Compile a function on its first call with arguments of each type; without Python's lock, so threads run it.

    The function cannot allocate memory. In return arrays are not reference-counted, which is an atomic operation for
    every array at every call: a node's candidates take 0.4 instead of 10 microseconds.
    """
    folder, others = machine_code_folder(), config.CACHE_DIR
    options: dict[str, Any] = {"nogil": True, "cache": folder is not None, "_nrt": False}
    config.CACHE_DIR = str(folder or "")
    try:
        made: Function = numba.njit(**options)(function)
    finally:
        config.CACHE_DIR = others
    return made


def machine_code_folder() -> Path | None:
    """The folder of the machine code; None where no folder can be written, and each program compiles it again."""
    if config.CACHE_DIR:  # the user's choice: the environment variable NUMBA_CACHE_DIR
        return Path(config.CACHE_DIR)
    return next(filter(_writable, _folders()), None)


@functools.cache
def note_compilation() -> None:
    """Log that drafting is about to be compiled, unless machine code is found."""
    folder = machine_code_folder()
    if folder is None or not any(folder.rglob("*.nbi")):
        kept = "at every start, as no folder can be written" if folder is None else "once"
        _log.info("treeopt: compiling the drafting kernel, %s; this takes up to a minute", kept)


def _folders() -> Iterator[Path]:
    """Beside the sources, then in the user's cache, which serves where site-packages is read-only."""
    yield _HERE / "__pycache__" / f"kernel-{_digest()}"
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    yield Path(root) / "treeopt" / f"kernel-{_digest()}"


@functools.cache
def _digest() -> str:
    return hashlib.sha256(b"".join((_HERE / name).read_bytes() for name in _SOURCES)).hexdigest()[:16]


def _writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False
