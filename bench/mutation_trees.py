"""The copies of the repository in which bench/mutation.py plants faults, and the map from lines to tests."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from mutation_child import in_child, make_map
from mutation_sites import Fault

ROOT = Path(__file__).resolve().parent.parent
# Tests of the form of the sources, of the pages and of the benches; a fault that they find may still be a fault.
_LEFT_OUT = ("house", "layers", "docstrings", "bench", "readme", "collection", "environment", "package")
_ticks = itertools.count(2_000_000_000)  # seconds of modification times: Python compiles a source whose time differs


def copy_repository(folder: Path) -> None:
    """Copy the files of the repository, those that are not yet committed too."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


@contextmanager
def planted(fault: Fault, folder: Path) -> Iterator[None]:
    """Plant a fault in a copy, with a new time of modification; restore the file afterwards, with its own."""
    path = folder / "treeopt" / fault.path
    source, before = path.read_bytes(), path.stat()
    path.write_bytes(fault.planted(source))
    tick = next(_ticks)
    os.utime(path, (tick, tick))
    try:
        yield
    finally:
        path.write_bytes(source)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_files(room: str) -> list[str]:
    """Files of the tests of a room, as paths in the repository."""
    folder = ROOT / "tests" / ("" if room == "records" else room)
    files = sorted(folder.glob("test_*.py"))
    left_out = {f"test_{name}.py" for name in _LEFT_OUT} if room == "records" else set()
    return [path.relative_to(ROOT).as_posix() for path in files if path.name not in left_out]


class Map:
    """Which tests run which lines: measured once for each test file, and again if it or the sources change."""

    def __init__(self, store: Path, room: str, files: Sequence[str] = (), variants: int = 0):
        self.store, self.room, self.variants = store, room, variants
        self.files = [name for name in test_files(room) if not files or Path(name).name in files]
        sources = sorted((ROOT / "treeopt").rglob("*.py")) + sorted((ROOT / "tests").glob("*.py"))
        shared = [path for path in sources if path.parent.name != "tests" or not path.name.startswith("test_")]
        self.digest = hashlib.sha256(b"".join(path.read_bytes() for path in shared))
        self.seconds: dict[str, float] = {}
        self.modules: list[str] = []
        self.lines: dict[str, dict[int, dict[str, None]]] = defaultdict(lambda: defaultdict(dict))

    def read(self, folder: Path) -> None:
        """Read the maps of the room's test files, after making those that are missing in the copy `folder`."""
        files = {name: self._file(name) for name in self.files}
        missing = [name for name, file in files.items() if not file.exists()]
        if missing:
            self._make(missing, folder)
        for file in files.values():
            self._add(json.loads(file.read_text()))

    def _file(self, name: str) -> Path:
        digest = self.digest.copy()
        digest.update((ROOT / name).read_bytes())
        if self.variants:
            digest.update(b"%d" % self.variants)
        return self.store / f"{name.replace('/', '-')}-{digest.hexdigest()[:16]}.json"

    def _make(self, files: Sequence[str], folder: Path) -> None:
        for name in files:
            shutil.copy2(ROOT / name, folder / name)
        together, log = self.store / f"{self.room}-{os.getpid()}.json", self.store / f"{self.room}.log"
        basetemp = self.store / f"pytest-{os.getpid()}"
        status = in_child(partial(make_map, files, folder, together, basetemp, self.variants), folder, log)
        if status:
            raise SystemExit(f"the tests of {self.room} could not be mapped: {log}")
        made = json.loads(together.read_text())
        for name in files:
            own = {test: noted for test, noted in made["tests"].items() if test.startswith(f"{name}::")}
            lines: dict[str, dict[str, list[str]]] = defaultdict(dict)
            for path, by_line in made["lines"].items():
                for line, parts in by_line.items():
                    if kept := [part for part in parts if part.startswith(f"{name}::")]:
                        lines[path][line] = kept
            self._file(name).write_text(json.dumps({"tests": own, "lines": lines, "modules": made["modules"]}))
        together.unlink()

    def _add(self, one: dict[str, Any]) -> None:
        passed = {test: seconds for test, (seconds, good) in one["tests"].items() if good}
        self.seconds |= passed
        self.modules += one["modules"]
        for path, by_line in one["lines"].items():
            for line, parts in by_line.items():
                self.lines[path][int(line)].update(dict.fromkeys(parts))

    def of_lines(self, path: str, lines: range | None = None, first: str = "") -> list[str]:
        """Tests that run a line of a file, by default any line, in the order in which they are to run.

        A line that a fixture runs is of all tests of its file, after those that run it themselves. Files are in the
        order of their tests' seconds, `first` before all, by default the file that is named after the module.
        """
        parts: dict[str, None] = {}
        for line in self.lines[path] if lines is None else lines:
            parts |= self.lines[path].get(line, {})
        direct = {test for test, kind in (part.rsplit("|", 1) for part in parts) if kind == "call"}
        fixed = {part.split("::")[0] for part in parts if part.endswith("|setup")}
        tests = {test for test in self.seconds if test in direct or test.split("::")[0] in fixed}
        spent: dict[str, float] = defaultdict(float)
        for test in tests:
            spent[test.split("::")[0]] += self.seconds[test]
        first = first or f"test_{Path(path).stem}.py"

        def order(test: str) -> tuple[bool, float, str, bool, float]:
            file = test.split("::")[0]
            return (not file.endswith(f"/{first}"), spent[file], file, test not in direct, self.seconds[test])

        return sorted(tests, key=order)
