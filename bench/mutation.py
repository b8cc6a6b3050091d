"""Plant faults in treeopt and run the tests of the room: a fault that no test finds shows what the tests miss.

    python bench/mutation.py --room optimize --faults 60              # a room; without --room, all of them
    python bench/mutation.py --room optimize --list                   # the faults that this would plant
    python bench/mutation.py --only optimize/grow.py:grow:compare:1   # one fault, with the output of its tests

Faults are chosen by --seed, kinds in turn. Each is planted in a copy of the repository, never in place. The tests of
the room that run the changed line are run, fastest first, up to the first that fails; for a fault that they miss, the
tests that run anything of the module. A test that takes 10 times its usual time (and 30 s) has found an endless loop.
Which tests run a line is measured once for each test file and kept in --folder, with all results: a fault that was
found is not planted again. `mutation_known.yaml` has faults that change nothing that can be observed, with the reason.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

# Before the libraries are imported, as in tests/conftest.py.
os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}
os.environ |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1"}
# The copies are in another folder, and without the shared models many tests are skipped.
os.environ.setdefault("TREEOPT_SHARED", str(Path(__file__).resolve().parents[2] / "shared"))

import yaml
from mutation_child import UNCOMPILED, Finder, find, in_child, preload
from mutation_sites import KINDS, Fault, chosen, faults_of
from mutation_trees import ROOT, Map, copy_repository, planted
from timing import add_tiny, machine

ROOMS = (
    *("records", "files", "optimize", "models", "verify", "texts", "drafting", "calibrate"),
    *("decode", "evaluate", "train", "export", "plan", "view", "cli"),
)
KNOWN = Path(__file__).with_name("mutation_known.yaml")
# Compiled modules, whose lines cannot be followed: the tests are those that run a session of the kernel, first those
# that do not compile it.
KERNEL = ("drafting/kernel/nodes.py", "drafting/kernel/trees.py")
KERNEL_SESSION = "drafting/kernel/session.py"
COMPILING = 240.0  # seconds of processor time that compiling the kernel may take
FOUND, MISSED, SAME = "found", "missed", "equivalent"


@dataclass(frozen=True)
class Result:
    """What became of a fault: `outcome` is FOUND or MISSED, `by` the test, its number of tests and seconds."""

    fault: Fault
    outcome: str
    by: str
    tests: int
    seconds: float

    def row(self) -> dict[str, Any]:
        """As one line of the file of results."""
        return {
            "id": self.fault.id,
            "before": self.fault.before,
            "after": self.fault.after,
            "outcome": self.outcome,
            "by": self.by,
            "tests": self.tests,
            "seconds": round(self.seconds, 1),
        }


def all_faults(rooms: Sequence[str]) -> dict[str, list[Fault]]:
    """All faults that can be planted in each room."""
    found: dict[str, list[Fault]] = {room: [] for room in rooms}
    for path in sorted((ROOT / "treeopt").rglob("*.py")):
        name = path.relative_to(ROOT / "treeopt").as_posix()
        for fault in faults_of(path.read_bytes(), name):
            if fault.room in found:
                found[fault.room].append(fault)
    return found


def known() -> dict[str, tuple[str, str]]:
    """Faults that change nothing: ID -> the changed text, the reason."""
    listed = yaml.safe_load(KNOWN.read_text()) if KNOWN.exists() else None
    return {one["id"]: (one["change"], one["why"]) for one in listed or ()}


def change(fault: Fault) -> str:
    """Before and after, on one line."""
    return f"{fault.before} -> {' '.join(fault.after.split())}"


class Store:
    """The folder of maps, copies and results."""

    def __init__(self, folder: Path):
        self.folder = folder.resolve()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.results = self.folder / "results.jsonl"
        self.tree = self.folder / f"tree-{os.getpid()}"
        self.log = self.folder / f"log-{os.getpid()}.txt"

    def earlier(self) -> dict[tuple[str, str], dict[str, Any]]:
        """Results of earlier runs, by ID and change; what any run has found is found."""
        lines = self.results.read_text().splitlines() if self.results.exists() else []
        rows = [json.loads(line) for line in lines]
        rows.sort(key=lambda row: row["outcome"] == FOUND)  # the last of each key is kept
        return {(row["id"], row["after"]): row for row in rows}

    def add(self, result: Result) -> None:
        """Append a result."""
        with self.results.open("a") as file:
            file.write(json.dumps(result.row()) + "\n")


def tests_of(fault: Fault, tests: Map) -> tuple[list[str], list[str]]:
    """The tests that run the changed line, and those that run anything else of the module, in their order."""
    if fault.path in KERNEL:
        return tests.of_lines(KERNEL_SESSION, first=UNCOMPILED), []
    lines = fault.lines if fault.scope is None else fault.scope
    if lines == (0, 0):
        return tests.of_lines(fault.path), []
    near = tests.of_lines(fault.path, range(lines[0], lines[1] + 1))
    return near, [test for test in tests.of_lines(fault.path) if test not in set(near)]


def within(some: Sequence[str], tests: Map, seconds: float) -> list[str]:
    """The first tests, at least one, that together take at most so many seconds without a fault."""
    spent = itertools.accumulate(tests.seconds[test] for test in some)
    return [test for test, sum_ in zip(some, spent, strict=True) if test == some[0] or sum_ <= seconds]


def run_fault(fault: Fault, tests: Map, store: Store, *, thorough: float) -> Result:
    """Plant a fault and run the tests that may find it, each part for at most `thorough` seconds."""
    begin = time.perf_counter()
    near, far = (within(some, tests, thorough) for some in tests_of(fault, tests))
    found = store.folder / f"found-{os.getpid()}.txt"
    ran = 0
    with planted(fault, store.tree):
        for some in (near, far):
            if not some:
                continue
            found.write_text("")
            compiling = COMPILING if fault.path in (*KERNEL, "drafting/kernel/data.py") else 0.0
            work = partial(_search, some, tests, found, compiling, store.folder / f"pytest-{os.getpid()}")
            status = in_child(work, store.tree, store.log)
            ran += len(some)
            if status:
                by = found.read_text() + (f" (signal {-status})" if status < 0 else "")
                return Result(fault, FOUND, by or f"status {status}", ran, time.perf_counter() - begin)
    return Result(fault, MISSED, "", ran, time.perf_counter() - begin)


def _search(some: Sequence[str], tests: Map, found: Path, compiling: float, basetemp: Path) -> int:
    return find(some, Finder(some, tests.seconds, found, compiling=compiling), basetemp)


def run_room(faults: Sequence[Fault], store: Store, options: argparse.Namespace) -> list[Result]:
    """Run the faults of a room, without those that have a result which is not to be made again."""
    earlier, same = store.earlier(), known()
    rows = {fault.id: earlier.get((fault.id, fault.after)) for fault in faults}
    kept = {name: row for name, row in rows.items() if row is not None and row["outcome"] not in options.again}
    tests = Map(store.folder / "maps", faults[0].room, options.tests, options.variants)
    if len(kept) < len(faults):
        tests.store.mkdir(exist_ok=True)
        tests.read(store.tree)
        preload(tests.modules)
        gc.freeze()
    results = []
    for fault in faults:
        listed = same.get(fault.id, ("", ""))[0] == change(fault)
        if row := kept.get(fault.id):
            result = Result(fault, row["outcome"], row["by"], row["tests"], row["seconds"])
        else:
            result = run_fault(fault, tests, store, thorough=0.0 if listed else options.seconds)
            store.add(result)
        if result.outcome == MISSED and listed:
            result = Result(fault, SAME, "", result.tests, result.seconds)
        results.append(result)
        if fault.id not in kept:
            print(_line(result), flush=True)
    return results


def _line(result: Result) -> str:
    fault = result.fault
    end = f"by {result.by}" if result.by else f"{result.tests} tests"
    what = f"{result.outcome:10} {fault.id} (line {fault.line}): {change(fault)[:160]}"
    return f"{what}  [{end}, {result.seconds:.0f} s]"


def table(results: Sequence[Result]) -> None:
    """Print the counts of each room, and what was missed."""
    print("| room | faults | found | equivalent | missed | kill rate | seconds |")
    print("|---|---|---|---|---|---|---|")
    for room in [*ROOMS, "all"]:
        own = [one for one in results if room in (one.fault.room, "all")]
        if not own:
            continue
        count = Counter(one.outcome for one in own)
        rate = 100 * count[FOUND] / max(1, len(own) - count[SAME])
        spent = sum(one.seconds for one in own)
        numbers = f"{len(own)} | {count[FOUND]} | {count[SAME]} | {count[MISSED]} | {rate:.1f} % | {spent:.0f}"
        print(f"| {room} | {numbers} |")
    kinds = Counter((one.fault.kind, one.outcome == FOUND) for one in results if one.outcome != SAME)
    rows = [f"{kind} {kinds[kind, True]}/{kinds[kind, True] + kinds[kind, False]}" for kind in KINDS]
    print("found by kind:", ", ".join(rows))
    for one in results:
        if one.outcome == MISSED:
            print(f"missed  treeopt/{one.fault.path}:{one.fault.line}  {change(one.fault)}\n        {one.fault.id}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--room", nargs="+", choices=ROOMS, default=ROOMS)
    parser.add_argument("--faults", type=int, default=20, help="faults of each room (default: 20)")
    parser.add_argument("--module", nargs="+", default=[""], help="only modules whose path in treeopt starts so")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--list", action="store_true", help="print the faults and plant none")
    parser.add_argument("--only", nargs="+", metavar="ID", help="these faults, even those with a result")
    parser.add_argument("--seconds", type=float, default=60.0, help="of the tests for a fault, twice (default: 60)")
    parser.add_argument("--tests", nargs="+", default=[], metavar="FILE", help="only these test files, by their names")
    parser.add_argument("--variants", type=int, default=0, help="parameters that each test is run with at most")
    parser.add_argument("--again", nargs="+", choices=(FOUND, MISSED), default=(), help="run these results again")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "mutation", help="maps and results")
    add_tiny(parser)
    return parser.parse_args()


def selected(options: argparse.Namespace) -> dict[str, list[Fault]]:
    """The faults to plant, by room."""
    rooms = sorted({one.split("/")[0] if "/" in one.split(":")[0] else "records" for one in options.only or ()})
    by_room = all_faults(rooms or options.room)
    if options.only:
        listed = set(options.only)
        picked = {room: [one for one in faults if one.id in listed] for room, faults in by_room.items()}
        if missing := listed - {one.id for faults in picked.values() for one in faults}:
            raise SystemExit(f"no such fault: {', '.join(sorted(missing))}")
    else:
        own = {
            room: [one for one in some if one.path.startswith(tuple(options.module))] for room, some in by_room.items()
        }
        picked = {room: chosen(faults, options.faults, options.seed) for room, faults in own.items()}
    return picked


def main() -> None:
    options = arguments()
    if "treeopt" in sys.modules:  # children would run the sources that are imported, and not those with a fault
        command = [sys.executable, str(Path(__file__)), *sys.argv[1:]]
        print(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        return
    print(machine(1))
    if options.tiny:
        options.room, options.faults, options.module = ["records"], 2, ["sampling.py"]
        options.tests = ["test_sampling.py"]
    picked = selected(options)
    if options.list:
        for fault in (one for faults in picked.values() for one in faults):
            print(f"{fault.id} (line {fault.line}): {change(fault)}")
        return
    store = Store(options.folder)
    if options.only:
        options.again = [FOUND, MISSED]
    results: list[Result] = []
    copy_repository(store.tree)
    try:
        for faults in picked.values():
            if faults:
                results += run_room(faults, store, options)
        table(results)
        if options.only:
            print(store.log.read_text())
    finally:
        shutil.rmtree(store.tree)
        for path in store.folder.glob(f"*-{os.getpid()}*"):
            path.unlink() if path.is_file() else shutil.rmtree(path)


if __name__ == "__main__":
    main()
