"""Failing disks and closed outputs: what commands leave behind, and what they say.

    python bench/faults.py writes      # each change of a file fails in turn, in the ways of PASSES
    python bench/faults.py sizes       # no file may grow beyond a limit, which the operating system enforces
    python bench/faults.py stdout      # standard output is closed, full, or closed by its reader

`--only NAME` takes some of the commands, `--only demo` the one that takes minutes, `--tiny` a few runs. A run is wrong
where its exit status or its number is not that of the fault, where it prints a traceback or more than one error, or
leaves a temporary file, a part of a file or an older file changed. Exit status 1 where any run is wrong.
"""

from __future__ import annotations

import argparse
import errno
import itertools
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

from timing import add_tiny, machine

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import torch
from broken_disk import BrokenDisk
from fault_runs import CHEAP, DEAR, DEMO, Run, contents, faults_of, invoke, make_inputs, make_older

from treeopt.cli import main as program
from treeopt.evaluate import learn_drafter as learn_module
from treeopt.evaluate import profile as timed_step
from treeopt.models import base as base_module

TINY = 40  # with --tiny, one fault of so many
SIZES = (0, 1, 100, 1000, 4096, 20_000, 60_000, 100_000, 300_000)  # bytes
SECONDS = 240
# Name -> the errno, whether it lasts, and whether older outputs are replaced.
PASSES = {
    "disk full from then on": (errno.ENOSPC, True, False),
    "disk full once": (errno.ENOSPC, False, False),
    "no permission once": (errno.EACCES, False, False),
    "input/output error once, over older files": (errno.EIO, False, True),
}


@contextmanager
def copied(template: Path) -> Iterator[Path]:
    """A copy of the inputs as the current folder."""
    before, folder = Path.cwd(), template.with_name("run")  # always the same: some files hold its name
    shutil.copytree(template, folder)
    os.chdir(folder)
    try:
        yield folder
    finally:
        os.chdir(before)
        shutil.rmtree(folder)


def writes(runs: tuple[Run, ...], template: Path, step: int, every: bool) -> tuple[int, int]:
    """Fail each change of a file in turn; the number of runs, and of those that were wrong."""
    counted = [0, 0]
    for run in runs:
        for name, (number, lasting, older) in PASSES.items():
            done = wrong = 0
            calls, whole = sound(run, template, older)
            for failing in chosen_calls(calls, every)[::step]:
                faults = [*broken(run, template, whole, BrokenDisk(Path(), failing, number, lasting=lasting), older)]
                done, wrong = done + 1, wrong + bool(faults)
                for fault in faults:
                    print(f"      FAULT {run.name}, {name}: {fault}")
            counted = [counted[0] + done, counted[1] + wrong]
            print(
                f"{run.name:18} {name:42} {len(calls):4} changes of files, {done:4} failed in turn, {wrong} wrong",
                flush=True,
            )
    return counted[0], counted[1]


def chosen_calls(calls: list[str], every: bool) -> list[int]:
    """Indices of the calls that fail in turn: all, or the first and the last of each kind on each kind of file."""
    kinds: dict[str, list[int]] = {}
    for i, call in enumerate(calls):
        kind = re.sub(r"\d+", "N", re.sub(r"\.\w{8}$", "", call))  # without numbers and the names of temporary files
        kinds.setdefault(str(i) if every else kind, []).append(i)
    return sorted({i for found in kinds.values() for i in (found[0], found[-1])})


def sound(run: Run, template: Path, older: bool) -> tuple[list[str], dict[str, bytes]]:
    """The changes of files of a command, and the files after it."""
    with copied(template) as folder:
        more = prepare(run, older)
        disk = BrokenDisk(folder)
        with disk.broken():
            result = invoke(run, *more)
        assert result.exit_code == 0, f"{run.name}: {result.output}"
        return disk.calls, contents()


def broken(run: Run, template: Path, whole: dict[str, bytes], disk: BrokenDisk, older: bool) -> Iterator[str]:
    """The faults of one run on a broken disk, and where it can be resumed, of the run that continues it."""
    with copied(template) as folder:
        more = prepare(run, older)
        disk.root, before = os.path.realpath(folder), contents()
        with disk.broken():
            result = invoke(run, *more)
        where = f"call {disk.failing}, {disk.failed}"
        yield from (f"{where}: {fault}" for fault in faults_of(run, result, disk, before, whole))
        if run.resumes and disk.lasting and result.exit_code and not disk.removing:
            unfinished = any(".partial" in name or "checkpoints" in name for name in contents())
            again = invoke(run, *(["--resume"] if unfinished else ["--force"]))
            if again.exit_code:
                yield f"{where}: cannot be continued: {again.stderr.strip()[-300:]}"
            elif run.repeats and contents() != whole:
                differing = [name for name in {**contents(), **whole} if contents().get(name) != whole.get(name)]
                yield f"{where}: continued, and {differing} differ from those of one run"


def prepare(run: Run, older: bool) -> list[str]:
    """Write older outputs; the options that replace them."""
    if not older:
        return []
    make_older(run)
    return ["--force"]


def sizes(runs: tuple[Run, ...], template: Path, step: int, _every: bool) -> tuple[int, int]:
    """Limit the size of files, in a process of its own, so that writers in any language meet it."""
    done = wrong = 0
    for run in runs:
        for limit in SIZES[::step]:
            with copied(template):
                before = contents()

                def limited(most: int = limit) -> None:
                    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
                    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
                    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)

                found = process(run.arguments, limited)
                faults = [*said(found, {0, 3, 4})]
                faults += [f"{name} changed" for name, raw in before.items() if contents().get(name) != raw]
                faults += [f"{name} left" for name in contents() if "/." in f"/{name}"]
                if found.status:
                    faults += [f"{name} is left" for name in run.outputs if Path(name).is_file()]
            done, wrong = done + 1, wrong + bool(faults)
            for fault in faults:
                print(f"      FAULT {run.name}, files of {limit} bytes: {fault}")
        print(f"{run.name:18} {len(SIZES[::step])} limits of files, {wrong} wrong until here", flush=True)
    return done, wrong


def stdout(runs: tuple[Run, ...], template: Path, step: int, _every: bool) -> tuple[int, int]:
    """Commands with a standard output that is closed, full, or closed by its reader."""
    done = wrong = 0
    plain = [("list", ("list",)), ("show", ("show", "tree.yaml"))]
    plain += [("options", ("show", "built.yaml", "--options")), ("doctor", ("doctor",))]
    plain += [
        ("against", ("show", "tree.yaml", "--against", "mc_sim_7b_63")),
        ("rules", ("show", "tree.yaml", "--for", "all")),
    ]
    plain += [("path", ("show", "built.yaml", "--path", "0", "--calibration", "calibration.safetensors"))]
    plain += [("heads show", ("heads", "show", "heads"))]
    model = ("--model", "base", "--heads", "heads", "--device", "cpu", "--tree", "two.yaml", "--max-new-tokens", "4")
    plain += [("generate", ("generate", "w1 w2", *model))]
    plain += [("validate", ("validate", *model, "--prompts", "prompts.jsonl", "--repeats", "1"))]
    helps = [("help", ("--help",)), ("version", ("--version",)), ("build help", ("build", "--help"))]
    listed = [(*one, True) for one in (*plain, *((run.name, run.arguments) for run in runs))]
    listed += [(*one, False) for one in helps]
    for name, arguments, has_json in listed[::step]:
        for more in ((), ("--json",))[: 1 + has_json]:
            for how, statuses in ((full, {4, 0}), (closed, {4, 0}), (reader_gone, {141, 0})):
                with copied(template):
                    invoke(CHEAP[0])
                    Path("o.yaml").rename("built.yaml")
                    found = process([*arguments, *more], how)
                    faults = [*said(found, statuses)]
                    faults += [f"{one} left" for one in contents() if "/." in f"/{one}"]
                done, wrong = done + 1, wrong + bool(faults)
                for fault in faults:
                    print(f"      FAULT {name} {' '.join(more)} {how.__name__}: {fault}")
        print(f"{name:18} {done} runs until here, {wrong} wrong", flush=True)
    return done, wrong


@dataclass(frozen=True)
class Ended:
    """Exit status and standard error of a process."""

    status: int
    said: str


def process(arguments: Sequence[str], prepare: Callable[[], None]) -> Ended:
    """Run the program in a copy of this process, which has its modules already; `prepare` is called there first."""
    sys.stdout.flush()
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.dup2(writing, 2)
        signal.alarm(SECONDS)
        sys.argv = ["treeopt", *arguments]
        os._exit(ended(prepare))
    os.close(writing)
    with os.fdopen(reading, errors="replace") as stream:
        text = stream.read()
    return Ended(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), text)


def ended(prepare: Callable[[], None]) -> int:
    """The exit status of the program in this process, with the message of Python where it cannot flush at the end."""
    status: int | str | None = 0
    try:
        prepare()
        if sys.stdout is not None:
            sys.stdout = os.fdopen(1, "w", closefd=False)
        sys.stderr = os.fdopen(2, "w", 1, closefd=False)
        program()
    except SystemExit as error:
        status = error.code
    except BaseException:
        traceback.print_exc()
        status = 1
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        sys.stderr.write(f"Exception ignored in: {error}\n")
        status = status or 120
    sys.stderr.flush()
    return status if isinstance(status, int) else 0 if status is None else 1


def full() -> None:
    """Standard output is a full disk."""
    os.dup2(os.open("/dev/full", os.O_WRONLY), 1)


def closed() -> None:
    """Standard output is closed by the caller, as by `>&-`."""
    os.close(1)
    sys.stdout = None


def reader_gone() -> None:
    """The reader of standard output has ended, as in `| head -0`."""
    reading, writing = os.pipe()
    os.dup2(writing, 1)
    os.close(reading)


def said(found: Ended, statuses: set[int]) -> Iterator[str]:
    """What is wrong with the exit status and standard error."""
    text = found.said
    if found.status not in statuses:
        yield f"exit {found.status}: {text.strip()[-300:]}"
    if "Traceback" in text or "Exception ignored" in text:
        yield f"a traceback: {text.strip()[-300:]}"
    errors = text.count("error[E") + text.count('{"error"')
    if errors != (found.status in (3, 4)):
        yield f"{errors} errors with status {found.status}: {text.strip()[-300:]}"


PARTS = {"writes": writes, "sizes": sizes, "stdout": stdout}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--all", action="store_true", help="every call; else each kind of call on each kind of file")
    parser.add_argument("--only", default="", help="only commands whose name contains this text")
    add_tiny(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in ("_FEWEST_ROUNDS", "_MOST_ROUNDS"):
        setattr(learn_module, name, 2)
    timed_step._TIMED = 1
    ticks = itertools.count()
    ticking = SimpleNamespace(perf_counter=lambda: float(next(ticks)))
    setattr(base_module, "time", ticking)  # noqa: B010 - equal runs then write equal figures
    chosen = CHEAP if options.tiny else (*CHEAP, *DEAR)
    runs = (DEMO,) if options.only == DEMO.name else tuple(run for run in chosen if options.only in run.name)
    print(f"{machine(1)}; {len(runs)} commands that write")
    with tempfile.TemporaryDirectory() as place:
        template = Path(place, "template")
        template.mkdir()
        make_inputs(template)
        done, wrong = PARTS[options.part](runs, template, TINY if options.tiny else 1, options.all)
    print(f"{options.part}: {done} runs with a fault, {wrong} wrong")
    if wrong:
        sys.exit(1)


if __name__ == "__main__":
    main()
