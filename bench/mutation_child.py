"""One run of tests in a forked child of bench/mutation.py: which tests run a line, or which test finds a fault.

The parent has imported the libraries that treeopt uses, and not treeopt, so that a child starts in a second.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import coverage
import pytest

MEMORY = 8 << 30  # bytes that a child may take beyond those of the parent
UNCOMPILED = "test_kernel_uncompiled.py"  # tests of the kernel that compile nothing
CPU, WALL = (30, 10), (180, 60)  # limits of one test: seconds, and multiples of its time without a fault
Timed = Mapping[str, float]  # test -> seconds


def in_child(work: Callable[[], int], folder: Path, log: Path) -> int:
    """Run `work` in a forked process whose working directory and first import path are `folder`; return its status.

    Minus the number of a signal that ended the process, as in `subprocess`.
    """
    process = os.fork()
    if process:
        _, status = os.waitpid(process, 0)
        with contextlib.suppress(ProcessLookupError):  # programs that a test started and that are still running
            os.killpg(process, signal.SIGKILL)
        return os.waitstatus_to_exitcode(status)
    status = 70
    try:
        os.setsid()
        with log.open("wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        os.chdir(folder)
        sys.path.insert(0, str(folder))
        os.environ["PYTHONPATH"] = str(folder)
        status = work()
        sys.stdout.flush()
    finally:
        os._exit(status)


def run_tests(files: Sequence[str], plugin: object, basetemp: Path) -> int:
    """Run the tests of files in this process; the status of pytest."""
    options = ["-x", "-q", "--tb=line", "--hypothesis-seed=0", f"--basetemp={basetemp}"]
    plugins = [argument for name in ("cacheprovider", "xdist") for argument in ("-p", f"no:{name}")]
    return int(pytest.main([*options, *plugins, *files], plugins=[plugin]))


class Finder:
    """Runs the chosen tests in their order, each within limits of time, and writes the first that fails to a file."""

    def __init__(self, tests: Sequence[str], seconds: Timed, found: Path, *, compiling: float):
        self.order = {name: i for i, name in enumerate(tests)}
        self.seconds, self.found, self.compiling = seconds, found, compiling
        self.limit("")

    def limit(self, test: str) -> None:
        """End this process at a multiple of the test's time; the system does it, also in compiled code."""
        usual = self.seconds.get(test, 1.0)
        compiling = 0.0 if UNCOMPILED in test else self.compiling
        signal.setitimer(signal.ITIMER_PROF, compiling + CPU[0] + CPU[1] * usual)
        signal.setitimer(signal.ITIMER_REAL, compiling * 4 + WALL[0] + WALL[1] * usual)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted(
            (item for item in items if item.nodeid in self.order), key=lambda item: self.order[item.nodeid]
        )

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.limit(nodeid)
        self.found.write_text(nodeid)  # remains if the process is ended

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.found.write_text(f"{report.nodeid}")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.found.write_text(f"import of {report.nodeid}")


def find(fault_tests: Sequence[str], plugin: Finder, basetemp: Path) -> int:
    """Run tests on a source with a fault; to be called in a child."""
    sys.dont_write_bytecode = True
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))
    files = list(dict.fromkeys(test.split("::")[0] for test in fault_tests))
    return run_tests(files, plugin, basetemp)


class Mapper:
    """Notes the lines that every test runs, those of its fixtures apart, and its seconds."""

    def __init__(self, measured: coverage.Coverage, variants: int):
        self.measured, self.variants = measured, variants
        self.tests: dict[str, list[Any]] = {}  # test -> seconds, whether it passed

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Keep evenly spaced ones of the variants of each test."""
        if not self.variants:
            return
        names = defaultdict(list)
        for item in items:
            names[item.nodeid.split("[")[0]].append(item)
        items[:] = [item for some in names.values() for item in some[:: -(-len(some) // self.variants)]]

    @contextlib.contextmanager
    def _part(self, item: pytest.Item, part: str) -> Iterator[None]:
        self.measured.switch_context(f"{item.nodeid}|{part}")
        begin = time.process_time()
        yield
        noted = self.tests.setdefault(item.nodeid, [0.0, True])
        noted[0] += time.process_time() - begin
        self.measured.switch_context("")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Iterator[None]:
        with self._part(item, "setup"):
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        with self._part(item, "call"):
            return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.outcome != "passed" and report.nodeid in self.tests:
            self.tests[report.nodeid][1] = False


def make_map(files: Sequence[str], folder: Path, output: Path, basetemp: Path, variants: int) -> int:
    """Write {"tests": {test: [seconds, passed]}, "lines": {file: {line: [part of a test]}}}; to be called in a child.

    A part is TEST|call or TEST|setup.
    """
    measured = coverage.Coverage(data_file=None, source=[str(folder / "treeopt")], config_file=False, messages=False)
    measured.start()
    plugin = Mapper(measured, variants)
    options = ["-q", "--tb=short", "--hypothesis-seed=0", f"--basetemp={basetemp}", "-p", "no:cacheprovider"]
    pytest.main([*options, *files], plugins=[plugin])
    measured.stop()
    data = measured.get_data()
    lines: dict[str, dict[int, list[str]]] = defaultdict(dict)
    for file in data.measured_files():
        name = Path(file).relative_to(folder / "treeopt").as_posix()
        for line, contexts in data.contexts_by_lineno(file).items():
            lines[name][line] = [one for one in contexts if one]
    modules = [name for name, module in list(sys.modules.items()) if not _here(module, folder)]
    output.write_text(json.dumps({"tests": plugin.tests, "lines": lines, "modules": modules}))
    return 0


def _here(module: object, folder: Path) -> bool:
    name = getattr(module, "__name__", "") or ""
    file = getattr(module, "__file__", None) or ""
    return str(file).startswith(str(folder)) or name.split(".")[0] in ("treeopt", "tests", "conftest")


def preload(modules: Iterable[str]) -> None:
    """Import libraries in the parent; those that cannot be imported are left to the children."""
    for name in modules:
        if name not in sys.modules and not name.startswith(("__", "treeopt", "tests", "conftest", "torch._inductor")):
            with contextlib.suppress(Exception):
                importlib.import_module(name)
