"""Counts of the house: lines by kind, files, commands, words of the pages, and what docs/design sets as their limits.

    python bench/house.py [--json]      # this checkout
    python bench/house.py --tree DIR    # another one

Lines are of the files `treeopt/**/*.py` unless said. A line is a docstring, a comment, blank or code, imports included.
The status is 1 where a count is above its limit.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import os
import statistics
import subprocess
import sys
import tokenize
from collections import Counter, defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMITS = {  # at most; the limits of the design with the verdict and the paths route
    "lines": 40_000,
    "files": 270,
    "lines.cli": 6_000,
    "commands": 23,
    "duplicate_class_names": 0,
}


def kinds(text: str) -> Counter[str]:
    """Lines of a source file by kind; imports count as code, and once more as imports."""
    tree = ast.parse(text)
    docs: set[int] = set()
    imports: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            imports.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(getattr(first.value, "value", None), str):
                docs.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    silent = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in silent:
            code.update(range(token.start[0], token.end[0] + 1))
    found: Counter[str] = Counter(imports=len(imports))
    for number, line in enumerate(text.splitlines(), 1):
        if number in docs:
            found["docstrings"] += 1
        elif not line.strip():
            found["blank"] += 1
        else:
            found["code" if number in code else "comments"] += 1
    return found


def class_names(root: Path) -> dict[str, list[str]]:
    """Names of classes that are defined more than once, with their files."""
    places: dict[str, list[str]] = defaultdict(list)
    for path in sorted((root / "treeopt").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(path.relative_to(root).as_posix())
    return {name: found for name, found in places.items() if len(found) > 1}


def counts(root: Path) -> dict[str, float]:
    """All counts of a checkout."""
    found: dict[str, float] = {}
    total: Counter[str] = Counter()
    rooms: Counter[str] = Counter()
    lengths = []
    files = sorted((root / "treeopt").rglob("*.py"))
    for path in files:
        text = path.read_text()
        parts = path.relative_to(root / "treeopt").parts
        rooms[parts[0] if len(parts) > 1 else "records"] += len(text.splitlines())
        total.update(kinds(text))
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lengths.append((node.end_lineno or node.lineno) - node.lineno + 1)
    found["lines"] = sum(rooms.values())
    found["files"] = len(files)
    found |= {f"lines.{room}": lines for room, lines in sorted(rooms.items())}
    found |= {kind: total[kind] for kind in ("code", "imports", "docstrings", "comments", "blank")}
    found["functions"] = len(lengths)
    found["median_function"] = statistics.median(lengths)
    found["files_below_60_lines"] = sum(len(path.read_text().splitlines()) < 60 for path in files)
    found["duplicate_class_names"] = len(class_names(root))
    found["lines.tests"] = sum(len(path.read_text().splitlines()) for path in (root / "tests").rglob("*.py"))
    found["lines.bench"] = sum(len(path.read_text().splitlines()) for path in (root / "bench").rglob("*.py"))
    found["commands"] = command_count(root)
    pages = [root / "README.md", *(root / "docs").rglob("*.md")]
    found["words_of_pages"] = sum(len(page.read_text().split()) for page in pages)
    return found


def command_count(root: Path) -> int:
    """Commands of the program."""
    code = (
        "import click; from treeopt.cli.app import program; print(len(program.list_commands(click.Context(program))))"
    )
    environment = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return int(done.stdout)


def main() -> int:
    """Print the counts beside their limits."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tree", type=Path, default=ROOT, help="the checkout that is counted")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = counts(options.tree)
    if options.json:
        print(json.dumps(found, indent=1))
    else:
        for name, value in found.items():
            limit = LIMITS.get(name)
            over = "" if limit is None else f"   at most {limit}{'' if value <= limit else '   ABOVE'}"
            print(f"{name:24}{value:>8g}{over}")
        for name, places in class_names(options.tree).items():
            print(f"class {name}: {', '.join(places)}")
    return int(any(found[name] > limit for name, limit in LIMITS.items()))


if __name__ == "__main__":
    sys.exit(main())
