"""The files of treeopt/ that a command runs through after its start-up, recorded by tracing its calls.

    python bench/walks.py                                  # calibrate, build and generate on the built-in model
    python bench/walks.py --page docs/develop/architecture.md      # write the lists into the page, between two marks

Each command runs twice in this process, so that nothing is imported or compiled in the second run, which is recorded.
Start-up ends where a command calls the library: `calibrate`, `run_job`, and the making of a `TreeDecoder`. From
there to its end every file counts in which a function of treeopt runs, those that print and write among them.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
import tempfile
import threading
from pathlib import Path
from types import FrameType
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}

from timing import add_tiny, machine

import treeopt as package
from treeopt.cli import main as treeopt

PACKAGE = Path(package.__file__).parent
BEGIN, END = "<!-- bench/walks.py -->\n", "<!-- end of bench/walks.py -->\n"
TEXTS = ("--limit", "4", "--max-new-tokens", "32")
WALKS = (  # the words of a command, and the function at which its start-up ends
    (("calibrate", "--heads", "pocket", *TEXTS, "-o", "c.safetensors", "--force"), "calibrate"),
    (("build", "--calibration", "c.safetensors", "--nodes", "16", "-o", "t.yaml", "--force"), "run_job"),
    (("generate", "Once upon a time", "--heads", "pocket", "--tree", "t.yaml", *TEXTS[2:]), "TreeDecoder.__init__"),
)


def run(words: tuple[str, ...]) -> None:
    """Run a command in this process, in silence."""
    sys.argv = ["treeopt", *words]
    silent = io.StringIO()
    with contextlib.redirect_stdout(silent), contextlib.redirect_stderr(silent):
        try:
            treeopt()
        except SystemExit as ended:
            if ended.code:
                sys.exit(f"treeopt {' '.join(words)} failed: {silent.getvalue()}")


def walk(words: tuple[str, ...], marker: str) -> tuple[list[str], int]:
    """Files in the order of their first call after start-up, and the number of files of the whole run."""
    everywhere: dict[str, None] = {}
    after: dict[str, None] = {}

    def record(frame: FrameType, event: str, _value: Any) -> None:
        file = frame.f_code.co_filename
        if event != "call" or not file.startswith(f"{PACKAGE}{os.sep}"):
            return
        name = Path(file).relative_to(PACKAGE).as_posix()
        everywhere[name] = None
        if after or frame.f_code.co_qualname == marker:
            after[name] = None

    threading.setprofile(record)
    sys.setprofile(record)
    try:
        run(words)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    if not after:
        sys.exit(f"treeopt {words[0]} never calls {marker}")
    return list(after), len(everywhere)


def walks() -> list[str]:
    """The lines of the page: a heading and the files of every command."""
    lines = []
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for words, marker in WALKS:
            run(words)
            files, everywhere = walk(words, marker)
            lines.append(f"`{words[0]}`, from `{marker}` on: {len(files)} files ({everywhere} with its start-up).")
            lines += ["", *(f"{number}. `{file}`" for number, file in enumerate(files, 1)), ""]
    return lines


def main() -> None:
    """Print the walks, or write them into a page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", type=Path, help="the page that holds the walks between two marks")
    add_tiny(parser)
    page = parser.parse_args().page
    print(machine(1))
    text = "\n".join(walks())
    print(text)
    if page:
        before, rest = page.read_text(encoding="utf-8").split(BEGIN)
        page.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}", encoding="utf-8")


if __name__ == "__main__":
    main()
