"""The house's rule, as data: imports point left, and torch stays out of the rooms that need none."""

from __future__ import annotations

import ast
from pathlib import Path

import treeopt

PACKAGE = Path(treeopt.__file__).parent

# Room -> rooms it may import from, besides itself. Rooms not built yet join here when they are.
ROOMS = (  # from the top: each may import those above it
    "errors",
    "records",
    "files",
    "optimize",
    "models",
    "verify",
    "texts",
    "drafting",
    "calibrate",
    "decode",
    "evaluate",
    "train",
)
NO_MODELS = {"errors", "records", "files", "optimize"}
MAY_IMPORT = {room: set(ROOMS[:i]) for i, room in enumerate(ROOMS)}
MAY_IMPORT |= {"view": NO_MODELS, "cli": {*ROOMS, "view"}, "treeopt": set(ROOMS)}  # lazy exports
RECORDS = {
    "tree",
    "calibration",
    "drafter",
    "latency",
    "policy",
    "progress",
    "sampling",
    "provenance",
    "version",
}
NO_TORCH = {*NO_MODELS, "view"}
HEAVY = {"torch", "transformers", "accelerate", "datasets"}


def room_of(module: str) -> str:
    """The room of a dotted module name of ours."""
    parts = module.split(".")
    if len(parts) == 1:
        return "treeopt"
    return "records" if parts[1] in RECORDS else "cli" if parts[1] == "__main__" else parts[1]


def imports_of(path: Path) -> set[str]:
    """Modules that a file imports, anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            found.add(node.module or "")
    return found


def broken_rules(path: Path, module: str) -> list[str]:
    """What a file imports although its room may not."""
    room = room_of(module)
    faults = []
    for name in imports_of(path):
        top = name.split(".")[0]
        if top == "treeopt" and room_of(name) not in MAY_IMPORT[room] | {room}:
            faults.append(f"{module} ({room}) imports {name}")
        if top in HEAVY and room in NO_TORCH:
            faults.append(f"{module} ({room}) imports {name}")
    return faults


def module_files() -> dict[str, Path]:
    """Dotted name and file of every module of the package."""
    files = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = ["treeopt", *path.relative_to(PACKAGE).with_suffix("").parts]
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return files


def test_imports_point_left() -> None:
    """No module imports a room to its right, and none without torch imports it."""
    faults = [fault for module, path in module_files().items() for fault in broken_rules(path, module)]
    assert faults == []


def test_rule_finds_a_forbidden_import(tmp_path: Path) -> None:
    """The test of the test: an import uphill and a torch import are both found."""
    wrong = tmp_path / "wrong.py"
    wrong.write_text("import torch\nfrom treeopt.decode.decoder import TreeDecoder\n")
    assert len(broken_rules(wrong, "treeopt.optimize.wrong")) == 2


def test_heavy_libraries_stay_inside_functions_of_the_command_line() -> None:
    """Command modules import nothing heavy at their top, so `--help` is instant."""
    for module, path in module_files().items():
        if room_of(module) == "cli":
            for node in ast.parse(path.read_text()).body:
                names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                heavy = {*ROOMS} - NO_MODELS
                assert not [n for n in names if room_of(n) in heavy or n.split(".")[0] in HEAVY], module
