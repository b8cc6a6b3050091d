"""Fuzzing of every reader of files: damaged files may raise TreeoptError, and nothing else.

    python bench/fuzz.py                        # 100,000 inputs for each reader of tests/hostile_readers.py
    python bench/fuzz.py --reader tree --inputs 1000 --seed 3
    python bench/fuzz.py --reader tree --rerun build/fuzz/tree/ValueError-1f2e3d4c

Each reader runs in a process of its own, guided by the coverage of treeopt's code (atheris). Half of the inputs are
changed bytewise, half in the structure of the format (tests/damage.py). The same seed gives the same inputs. A finding
is an exception that is not TreeoptError, a process, import or connection that a file starts, a file that is written or
that is opened elsewhere, more than 2 GiB of memory, a minute for one input, or a crash of the interpreter. Its input
is kept in the folder of --findings; --rerun reads it again and prints the traceback.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import io
import json
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

from timing import add_tiny, machine

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
INPUTS, TINY = 100_000, 20
TINY_READERS = ("tree", "result of validate", "note of a work folder")
SLOW = 10  # readers of milliseconds get one input of so many
LONGEST = 1 << 13  # bytes of an input
SECONDS, MEGABYTES = 60, 2048  # of one input, on a machine that does other work too, and of the process
RESTARTS = 5  # after crashes
STDERR = 2  # of libFuzzer, which prints there
EACH = 100  # inputs after which the figures are stored, and the folder is looked at
MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None  # folder of the inputs
QUIET = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "critical", "OMP_NUM_THREADS": "1"}
# Events of Python that no reader of data may cause.
_FORBIDDEN = ("os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen", "socket.connect")
_WRITES = ("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.chmod", "shutil.rmtree")


class Watch:
    """Notes forbidden events, and files that are opened outside of a folder, while a reader runs.

    Args:
        folder: the reader's.
        elsewhere: whether files of any folder may be read.
    """

    def __init__(self, folder: Path, *, elsewhere: bool = False) -> None:
        self.folder = os.path.realpath(folder)
        self.elsewhere = elsewhere
        self.allowed = (self.folder, str(ROOT), sys.prefix, sys.base_prefix, "/usr", "/proc", "/etc/localtime", "/sys")
        self.on = False
        self.seen: list[str] = []
        sys.addaudithook(self._note)

    @contextlib.contextmanager
    def over(self) -> Iterator[None]:
        """Watch the block."""
        self.seen, self.on = [], True
        try:
            yield
        finally:
            self.on = False

    def _note(self, event: str, given: tuple[Any, ...]) -> None:
        if not self.on:
            return
        if event.startswith(_FORBIDDEN) or event in _WRITES:
            self.seen.append(f"{event} {given!r}"[:200])
        elif event == "open" and isinstance(given[0], (str, bytes)):
            name, flags = os.fsdecode(given[0]), given[2]
            writes = bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
            plain = name.startswith(self.folder) and ".." not in name
            inside = plain or os.path.realpath(name).startswith(self.allowed)
            if writes or not (inside or self.elsewhere):
                self.seen.append(f"open {name[:120]!r}{' for writing' if writes else ''}")


class Target:
    """One reader with its folder; counts inputs and keeps those that fail."""

    def __init__(self, name: str, place: Path, findings: Path) -> None:
        table: Any = importlib.import_module("hostile_readers")
        self.reader = table.READERS[name]
        self.folder = table.folder_of(name, place)
        self.path = self.folder / self.reader.file
        self.valid = self.reader.valid()
        self.findings = findings
        self.watch = Watch(place, elsewhere=self.reader.elsewhere)
        self.inputs = 0
        self.found: dict[str, int] = {}
        warnings.simplefilter("ignore")
        self.path.touch()
        self.files = sorted(os.listdir(self.folder))
        for raw in self.valid:  # also imports what is imported on first use
            fault = self.fault(raw)
            if fault is not None:
                raise SystemExit(f"{name}: a valid file is a finding: {fault}")

    def __call__(self, raw: bytes) -> None:
        """Read one input."""
        self.inputs += 1
        fault = self.fault(raw)
        if fault is None:
            return
        kind, text = fault
        if kind not in self.found:
            self.findings.mkdir(parents=True, exist_ok=True)
            file = self.findings / f"{kind.split()[0]}-{hashlib.sha256(raw).hexdigest()[:8]}"
            file.write_bytes(raw)
            file.with_suffix(".txt").write_text(text)
        self.found[kind] = self.found.get(kind, 0) + 1

    def fault(self, raw: bytes) -> tuple[str, str] | None:
        """The kind of a finding, with its place, and the traceback; None where there is none."""
        from treeopt.errors import TreeoptError

        self.path.write_bytes(raw)
        self.reader.before(self.path)
        try:
            with self.watch.over():
                self.reader.read(self.path)
        except TreeoptError as error:
            if len(str(error)) > LONGEST * 4:
                return "LongMessage", str(error)[:1000]
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # also panics of Rust, which are no Exception
            ours = [one for one in traceback.extract_tb(error.__traceback__) if "/treeopt/" in one.filename]
            place = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else "elsewhere"
            return f"{type(error).__name__} {place}", traceback.format_exc()
        if self.watch.seen:
            return f"Event {self.watch.seen[0].split()[0]}", "\n".join(self.watch.seen)
        if self.inputs % EACH == 0 and sorted(os.listdir(self.folder)) != self.files:  # also what no event tells
            return "Written", str(sorted(os.listdir(self.folder)))
        return None

    def mutated(self, raw: bytes, most: int, seed: int) -> bytes:
        """The next input: bytewise by libFuzzer, or by the damage of the format."""
        import atheris

        rng = Random(seed)
        if rng.random() < 0.5:
            made: bytes = atheris.Mutate(raw, most)
            return made
        base = raw if rng.random() < 0.7 else rng.choice(self.valid)
        changed: bytes = self.reader.damage(base, rng)
        return changed[:most]


def run_child(name: str, options: argparse.Namespace, inputs: int, seed: int, summary: Path) -> None:
    """Fuzz one reader in this process, which libFuzzer ends."""
    import atheris

    folder = options.findings / name.replace(" ", "_")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=MEMORY) as place:
        target = Target(name, Path(place), folder)
        corpus = Path(place, "corpus")
        corpus.mkdir()
        for number, raw in enumerate(target.valid):
            (corpus / str(number)).write_bytes(raw)
        begin, begin_cpu = time.monotonic(), time.process_time()

        def one(raw: bytes) -> None:
            target(raw)
            if target.inputs % EACH == 0 or target.inputs >= inputs:
                spent = {"seconds": time.monotonic() - begin, "cpu": time.process_time() - begin_cpu}
                summary.write_text(json.dumps({"inputs": target.inputs, **spent, "found": target.found}))

        limits = [f"-timeout={SECONDS}", f"-rss_limit_mb={MEGABYTES}", f"-max_len={LONGEST}", "-len_control=0"]
        run = [f"-runs={inputs}", f"-seed={seed + 1}", f"-artifact_prefix={folder}/", "-verbosity=0"]
        # libFuzzer ends without a counter: treeopt has none where it was imported before.
        counted = atheris.instrument_func(one)
        atheris.Setup([sys.argv[0], *limits, *run, str(corpus)], counted, custom_mutator=target.mutated)
        atheris.Fuzz()


def fuzz(name: str, options: argparse.Namespace, inputs: int) -> tuple[dict[str, float], dict[str, int]]:
    """Inputs, seconds and CPU seconds of a reader, and its findings; a process that crashed is followed by another."""
    spent = {"inputs": 0.0, "seconds": 0.0, "cpu": 0.0}
    found: dict[str, int] = {}
    for attempt in range(RESTARTS):
        left = int(inputs - spent["inputs"])
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            status = _in_a_fork(lambda: run_child(name, options, left, options.seed + attempt, Path(file.name)))  # noqa: B023
            made = json.loads(Path(file.name).read_text() or '{"inputs": 0, "seconds": 0, "cpu": 0, "found": {}}')
        for key in spent:
            spent[key] += made[key]
        for kind, count in made["found"].items():
            found[kind] = found.get(kind, 0) + count
        if spent["inputs"] >= inputs:
            break
        found[f"Crash (status {status})"] = found.get(f"Crash (status {status})", 0) + 1
    return spent, found


def _in_a_fork(run: Callable[[], None]) -> int:
    """The status of a process that runs a function; what is imported here is imported there too."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), STDERR)
            run()
        except BaseException:
            traceback.print_exc(file=sys.__stdout__)
        finally:
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _import_readers() -> Any:
    """The table of readers; treeopt is imported with counters of its coverage, where atheris is installed."""
    import atheris

    quiet = contextlib.redirect_stderr(io.StringIO())  # a line for each module
    with quiet, atheris.instrument_imports(include=["treeopt"], enable_loader_override=False):
        return importlib.import_module("hostile_readers")


def rerun(name: str, file: Path) -> None:
    """Read a kept input again."""
    with tempfile.TemporaryDirectory() as place:
        target = Target(name, Path(place), Path(place, "findings"))
        fault = target.fault(file.read_bytes())
    print("no finding" if fault is None else f"{fault[0]}\n{fault[1]}")
    sys.exit(fault is not None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reader", action="append", default=[], help="only this one; may be repeated")
    parser.add_argument("--inputs", type=int, default=INPUTS, help="of each reader; slow readers get a tenth")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--findings", type=Path, help="folder of the inputs that fail (default: build/fuzz)")
    parser.add_argument("--rerun", type=Path, help="read a kept input again, with one --reader")
    add_tiny(parser)
    options = parser.parse_args()
    for key, value in QUIET.items():
        os.environ.setdefault(key, value)
    if options.rerun is not None:
        rerun(options.reader[0], options.rerun)
    table = _import_readers()
    scratch = tempfile.TemporaryDirectory()
    options.findings = options.findings or (Path(scratch.name) if options.tiny else ROOT / "build" / "fuzz")
    names = options.reader or list(TINY_READERS if options.tiny else table.READERS)
    names.sort(key=lambda name: table.READERS[name].slow)
    inputs = TINY if options.tiny else options.inputs
    print(f"{machine(1)}; seed {options.seed}, {len(names)} readers")
    print(f"{'reader':26} {'inputs':>9} {'seconds':>8} {'CPU s':>8}  findings")
    failed = 0
    for name in names:
        wanted = max(1, inputs // SLOW) if table.READERS[name].slow else inputs
        spent, found = fuzz(name, options, wanted)
        shown = ", ".join(f"{kind} ({count} times)" for kind, count in found.items())
        figures = f"{spent['inputs']:9,.0f} {spent['seconds']:8.0f} {spent['cpu']:8.0f}"
        print(f"{name:26} {figures}  {shown or 'none'}", flush=True)
        failed += bool(found) or spent["inputs"] < wanted
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
