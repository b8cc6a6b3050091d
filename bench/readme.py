"""The figures of README.md, made again: those of pocket's table by `treeopt compare`, and the commands of the others.

python bench/readme.py

Tokens per step must equal the README's on every machine. Speeds are those of this machine, with its load.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from timing import add_tiny, machine

README = Path(__file__).resolve().parent.parent / "README.md"
COMPARE = ["compare", "--test-limit", "10"]  # as in the README
TINY = ["--test-limit", "2", "--max-new-tokens", "8", "--repeats", "1", "--methods", "lookup"]
# First cell of a row of the README, without emphasis -> name of the method in the result.
ROWS = {
    "stock generate": "generate",
    "prompt lookup of transformers": "prompt lookup",
    "Medusa tree, heads": "Medusa tree",
    "heads+ngram, per step": "heads+ngram, per step",
    "ngram (no heads), static": "ngram, static",
}
OTHERS = {
    "calibration over the bare forward pass": "python bench/calibrate.py",
    "bytes of memory for each position": "python bench/optimiser.py speed --calibration FILE",
    "seconds and tokens of learn": "treeopt learn, as on docs/drafters.md",
    "how many prompts suffice": "python bench/ablations.py prompts, as on docs/develop/ablations.md",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_tiny(parser)
    options = parser.parse_args()
    print(machine(1))
    line = [*COMPARE, *(TINY if options.tiny else ())]
    print(f"$ treeopt {' '.join(line)}")
    found = {row["method"]: row for row in compared(line)}
    print("method\tnodes\ttokens per step, README\there\tspeedup, README\there")
    wrong = 0
    for label, claimed in table().items():
        row = found.get(ROWS[label])
        if row is None or row["mean_acceptance_length"] is None:
            print(f"{label}\tnot run")
            continue
        tokens = f"{row['mean_acceptance_length']:.3f}"
        wrong += tokens != claimed[1] or row["nodes"] != int(claimed[0])
        print("\t".join([label, claimed[0], claimed[1], tokens, claimed[2], f"{row['speedup']:.2f}"]))
    print("--tiny: the figures mean nothing" if options.tiny else f"{wrong} rows differ in tokens per step or nodes")
    for name, command in OTHERS.items():
        print(f"{name}: {command}")
    if wrong and not options.tiny:
        sys.exit(1)


def table() -> dict[str, tuple[str, str, str]]:
    """Nodes, tokens per step and speedup of each row of the README's table of pocket."""
    cells = re.findall(r"^\| (.+?) \| (\d+) \| (\d\.\d{3}) \| (\d\.\d\d) \|$", README.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[*`]", "", label): (nodes, tokens, speedup) for label, nodes, tokens, speedup in cells}


def compared(line: list[str]) -> list[dict[str, Any]]:
    """The rows of the comparison, in a process with one thread."""
    code = "import torch; torch.set_num_threads(1); from treeopt.cli import main; main()"
    command = [sys.executable, "-c", code, *line, "--json"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    rows: list[dict[str, Any]] = json.loads(done.stdout)["rows"]
    return rows


if __name__ == "__main__":
    main()
