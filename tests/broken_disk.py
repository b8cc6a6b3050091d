"""A disk that fails: inside `BrokenDisk` every change of files below a folder is counted, and a chosen one fails.

A change is one call that opens a file for writing, writes, truncates, syncs, renames, makes a folder, sets a mode, or
removes. Files of Python are written by a raw stream that writes half of the bytes and fails at the rest, as a disk that
fills. Libraries that write in Rust or C++ fail with the messages of their own before they write.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors import SafetensorError

_WRITING = set("wax+")
_REMOVALS = ("unlink", "remove", "rmdir")
_CALLS = ("replace", "rename", "chmod", "mkdir", "link", "symlink", "truncate", *_REMOVALS)


class BrokenDisk:
    """The changes of files below a folder, of which one fails.

    Args:
        root: of the files that count.
        failing: index of the call that fails; None for none.
        number: the errno.
        lasting: whether all later calls fail too, other than removals, as on a full disk.
    """

    def __init__(self, root: Path, failing: int | None = None, number: int = errno.ENOSPC, *, lasting: bool = False):
        self.root = os.path.realpath(root)
        self.failing = failing
        self.number = number
        self.lasting = lasting
        self.calls: list[str] = []

    def fails(self, call: str, place: Any) -> bool:
        """Count a call, and whether it fails."""
        name = self._below(place)
        if name is None:
            return False
        index = len(self.calls)
        self.calls.append(f"{call} {name}")
        if self.failing is None or index < self.failing:
            return False
        return index == self.failing or (self.lasting and call not in _REMOVALS)

    def error(self, place: Any) -> OSError:
        """What the operating system answers."""
        return OSError(self.number, os.strerror(self.number), place if isinstance(place, str) else None)

    @property
    def failed(self) -> str:
        """The call that failed first."""
        return "" if self.failing is None or self.failing >= len(self.calls) else self.calls[self.failing]

    @property
    def removing(self) -> bool:
        """Whether the call that failed first deletes something."""
        return self.failed.split(" ")[0] in _REMOVALS

    @contextmanager
    def broken(self) -> Iterator[BrokenDisk]:
        """Context in which this process writes to the disk."""
        with pytest.MonkeyPatch.context() as patch:
            for name in _CALLS:
                patch.setattr(os, name, self._guarded(name, getattr(os, name)))
            patch.setattr(os, "fsync", self._guarded("fsync", os.fsync))
            patch.setattr(os, "open", self._opening(os.open))
            opened = self._streams(io.open)
            patch.setattr(io, "open", opened)
            patch.setattr(builtins, "open", opened)
            self._libraries(patch)
            yield self

    def _below(self, place: Any) -> str | None:
        """The name of a file or of an open one below the root; None for any other."""
        if isinstance(place, int):
            place = os.readlink(f"/proc/self/fd/{place}")
        path = os.path.realpath(os.path.dirname(os.fspath(place)) or ".")
        name = os.path.join(path, os.path.basename(os.fspath(place)))
        return os.path.relpath(name, self.root) if name.startswith(self.root + os.sep) else None

    def _guarded(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(place: Any, *rest: Any, **named: Any) -> Any:
            if named.get("dir_fd") is None and self.fails(name, place):
                raise self.error(place)
            return call(place, *rest, **named)

        return guarded

    def _opening(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def opening(place: Any, flags: int, *rest: Any, **named: Any) -> Any:
            written = flags & (os.O_CREAT | os.O_WRONLY | os.O_RDWR)
            if written and named.get("dir_fd") is None and self.fails("open", place):
                raise self.error(place)
            return call(place, flags, *rest, **named)

        return opening

    def _streams(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def opened(file: Any, mode: str = "r", buffering: int = -1, *text: Any, **named: Any) -> Any:
            if not set(mode) & _WRITING or self._below(file) is None:
                return call(file, mode, buffering, *text, **named)
            if not isinstance(file, int) and self.fails("open", file):
                raise self.error(file)
            raw = _BrokenFile(self, file, mode.replace("b", "").replace("t", ""), named.pop("closefd", True))
            buffered = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
            return buffered if "b" in mode else io.TextIOWrapper(buffered, *text, **named)

        return opened

    def _libraries(self, patch: pytest.MonkeyPatch) -> None:
        """The writers in Rust and C++, wherever they were imported to."""
        said = f"{os.strerror(self.number)} (os error {self.number})"
        for whole, place, failure in (
            (safetensors.torch.save_file, 1, SafetensorError(f"Error while serializing: I/O error: {said}")),
            (torch.save, 1, RuntimeError("[enforce fail at inline_container.cc:664] . unexpected pos 64 vs 0")),
        ):
            fake = self._library(whole, place, failure)
            for module in list(sys.modules.values()):
                for name in [name for name, value in vars(module).items() if value is whole]:
                    patch.setattr(module, name, fake)

    def _library(self, whole: Callable[..., Any], place: int, failure: Exception) -> Callable[..., Any]:
        def saved(*given: Any, **named: Any) -> Any:
            target = given[place] if len(given) > place else named.get("filename", named.get("f"))
            if isinstance(target, (str, os.PathLike)) and self.fails("save", target):
                raise failure
            return whole(*given, **named)

        return saved


class _BrokenFile(io.FileIO):
    """A raw file that fails as its disk does."""

    def __init__(self, disk: BrokenDisk, file: Any, mode: str, closefd: bool) -> None:
        super().__init__(file, mode, closefd)
        self._disk, self._file, self._torn = disk, file, False

    def write(self, content: Any) -> int:
        if self._torn or self._disk.fails("write", self.fileno()):
            whole = memoryview(content).cast("B")
            if not self._torn and len(whole) > 1:  # a disk that fills: a part is written, and the rest is an error
                self._torn = True
                return super().write(whole[: len(whole) // 2])
            self._torn = self._disk.lasting
            raise self._disk.error(self._file)
        return super().write(content)

    def truncate(self, size: int | None = None) -> int:
        if self._disk.fails("truncate", self.fileno()):
            raise self._disk.error(self._file)
        return super().truncate(size)
