"""Runs of the command line with damaged inputs: none may exit with status 1, a bug, or print a traceback.

    python bench/hostile.py            # all runs, one process each; --tiny runs a few

Each run gets a new folder with a small model, its heads, prompts, a calibration and a tree; `prepare` may damage them.
The run must exit with a documented status and print at most one error. No input may change, and no temporary file may
remain.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from hostile_damage import MODEL, Run
from hostile_runs import all_runs
from timing import add_tiny, machine

from treeopt.files.bundled import pocket

DOCUMENTED = {0, 2, 3, 4, 5, 6, 130, 141}  # exit statuses of the README; 1 is a bug
SECONDS = 240
TINY = 240  # with --tiny, one run of so many


def make_folder(folder: Path) -> None:
    """Write the files of a run: a model with heads, prompts, a calibration and a tree."""
    shutil.copytree(pocket(), folder / "model", ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    rows = [json.dumps({"text": f"def f{i}(x):\n    return", "category": "code"}) for i in range(6)]
    (folder / "prompts.jsonl").write_text("\n".join(rows) + "\n")
    short = [*MODEL, "--prompts", "prompts.jsonl", "--max-new-tokens", "12"]
    for arguments in (["calibrate", *short], ["build", "--nodes", "8", "-o", "mine.yaml"]):
        command = [sys.executable, "-m", "treeopt", *arguments]
        subprocess.run(command, cwd=folder, check=True, capture_output=True, env=_environment())


def outcome(run: Run, template: Path, folder: Path) -> tuple[int, list[str]]:
    """The exit status of a run, and the faults found in it."""
    shutil.copytree(template, folder)
    before = Path.cwd()
    os.chdir(folder)
    try:
        run.prepare()
        inputs = _hashes()
        command = [sys.executable, "-m", "treeopt", *run.arguments]
        done = subprocess.run(command, input=run.stdin, capture_output=True, timeout=SECONDS, env=_environment())
        said = done.stderr.decode(errors="replace")
        faults = [] if done.returncode in DOCUMENTED else [f"exit {done.returncode}: {said.strip()[-300:]}"]
        faults += ["a traceback"] * ("Traceback" in said) + ["more than one error"] * (said.count("error[E") > 1)
        faults += ["control characters"] * ("\x1b" in said)
        faults += ["no message"] * (done.returncode not in (0, 141) and not said.strip())
        faults += [f"{name} changed" for name, digest in inputs.items() if _hashes().get(name) != digest]
        faults += [f"{name} left" for name in _hashes() if Path(name).name.startswith(".")]
    except subprocess.TimeoutExpired:
        return -1, [f"not finished after {SECONDS} s"]
    finally:
        os.chdir(before)
    return done.returncode, faults


def _hashes() -> dict[str, str]:
    files = [path for path in Path().rglob("*") if path.is_file()]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def _environment() -> dict[str, str]:
    root = str(Path(__file__).resolve().parent.parent)
    return {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="only runs whose description contains this text")
    add_tiny(parser)
    options = parser.parse_args()
    runs = [run for run in all_runs() if options.only in run.what][:: TINY if options.tiny else 1]
    print(f"{machine(1)}; {len(runs)} runs")
    statuses: Counter[int] = Counter()
    failed = 0
    with tempfile.TemporaryDirectory() as place:
        template = Path(place, "template")
        template.mkdir()
        make_folder(template)
        for i, run in enumerate(runs):
            folder = Path(place, str(i))
            status, faults = outcome(run, template, folder)
            shutil.rmtree(folder)
            statuses[status] += 1
            failed += bool(faults)
            print(f"{'FAULT' if faults else 'ok   '} exit {status:3}  {run.what.encode('unicode_escape').decode()}")
            for fault in faults:
                print(f"      {fault}")
    counted = ", ".join(f"{count} with status {status}" for status, count in sorted(statuses.items()))
    print(f"{len(runs)} runs: {counted}; {failed} with a fault")
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
