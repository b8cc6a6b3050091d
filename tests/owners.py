"""Other processes that write a run: they take its lock, and wait until the test ends them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from conftest import ROOT_FOLDER

_OWNER = """
import sys
from pathlib import Path
from treeopt.runs.lock import Lock
for run in sys.argv[1:]:
    Lock(Path(run)).take()
"""
_WAITS = """
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def owner(*runs: Path, then: str = "") -> Iterator[subprocess.Popen[str]]:
    """Another process that has the locks of these runs, and has run the statements of `then`.

    Raises:
        AssertionError: with its messages, where it does not get them.
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT_FOLDER)}
    command = [sys.executable, "-c", _OWNER + then + _WAITS, *map(str, runs)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=environment, text=True, **pipes) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "held\n", process.stderr.read()
        try:
            yield process
        finally:
            process.kill()
