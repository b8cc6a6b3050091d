"""The order of the rooms, as data: imports point up the list and in no circle; some rooms import no torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import treeopt

PACKAGE = Path(treeopt.__file__).parent

ROOMS = (  # each may import itself and those above it
    "records",
    "files",
    "optimize",
    "models",
    "verify",
    "runs",
    "texts",
    "drafting",
    "calibrate",
    "decode",
    "evaluate",
    "train",
    "export",
    "plan",
    "view",
    "cli",
)
NO_TORCH = {"records", "files", "optimize", "plan", "view"}  # these may import one another only
HEAVY = {"torch", "transformers", "accelerate", "datasets"}
RECORDS = {
    "calibration",
    "defaults",
    "drafter",
    "ngram_table",
    "engines",
    "errors",
    "facts",
    "latency",
    "policy",
    "schedule",
    "progress",
    "sampling",
    "shape",
    "traces",
    "drafted_step",
    "tree",
    "version",
}


def room_of(module: str) -> str:
    """The room of a dotted module name of ours; the package itself, whose names are lazy, is the last."""
    parts = module.split(".")
    if len(parts) == 1 or parts[1] == "__main__":
        return "cli"
    return "records" if parts[1] in RECORDS else parts[1]


def may_import(room: str, other: str) -> bool:
    """Whether modules of a room may import those of another."""
    above = ROOMS.index(other) <= ROOMS.index(room)
    return above and (room not in NO_TORCH or other in NO_TORCH)


def imports_of(path: Path, *, top: bool = False) -> set[str]:
    """Modules that a file imports, anywhere in it; with `top` those that are imported with it."""
    found: set[str] = set()
    tree = ast.parse(path.read_text())
    for node in tree.body if top else ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            module = node.module or ""
            found.add(module)
            if module.split(".")[0] == "treeopt":  # a name may be a module
                found.update(name for name in (f"{module}.{a.name}" for a in node.names) if name in MODULES)
    return found


def module_files(package: Path = PACKAGE) -> dict[str, Path]:
    """Dotted name and file of every module of the package."""
    files = {}
    for path in sorted(package.rglob("*.py")):
        parts = [package.name, *path.relative_to(package).with_suffix("").parts]
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return files


MODULES = module_files()


def broken_rules(path: Path, module: str) -> list[str]:
    """What a file imports although its room may not."""
    room = room_of(module)
    faults = []
    for name in sorted(imports_of(path)):
        top = name.split(".")[0]
        if top == "treeopt" and not may_import(room, room_of(name)):
            faults.append(f"{module} ({room}) imports {name}")
        if top in HEAVY and room in NO_TORCH:
            faults.append(f"{module} ({room}) imports {name}")
        if room == "records" and top not in {*sys.stdlib_module_names, "numpy", "treeopt"}:
            faults.append(f"{module} ({room}) imports {name}")
    return faults


def test_every_folder_is_a_room() -> None:
    """Every module belongs to a room of the list, and every room of the list has modules."""
    assert {room_of(module) for module in MODULES} == set(ROOMS)


def test_imports_point_up() -> None:
    """No module imports a room below its own, and none without torch imports it."""
    faults = [fault for module, path in MODULES.items() for fault in broken_rules(path, module)]
    assert faults == []


def test_rule_finds_a_forbidden_import(tmp_path: Path) -> None:
    """The test of the test: an import from below, torch, a room with torch and a foreign library are all found."""
    wrong = tmp_path / "wrong.py"
    wrong.write_text("import torch\nfrom treeopt.decode.decoder import TreeDecoder\nfrom treeopt.files import trees\n")
    assert len(broken_rules(wrong, "treeopt.optimize.wrong")) == 2
    assert broken_rules(wrong, "treeopt.evaluate.wrong") == []
    wrong.write_text("import treeopt.models.heads\n")
    assert len(broken_rules(wrong, "treeopt.view.wrong")) == 1
    wrong.write_text("import yaml, numpy, json\n")
    assert broken_rules(wrong, "treeopt.tree") == ["treeopt.tree (records) imports yaml"]


def circle(edges: Mapping[str, Iterable[str]]) -> list[str]:
    """The modules of a circle of imports, the first again at the end; empty where there is none."""
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return []
        found = next((one for other in edges.get(module, ()) if (one := visit(other, [*path, module]))), [])
        done.add(module)
        return found

    return next((one for module in edges if (one := visit(module, []))), [])


def test_no_circle_of_imports() -> None:
    """No module imports itself over others, be it inside a function."""
    lazy = {"treeopt"}  # names its modules for type checkers only
    edges = {name: sorted(imports_of(path) & MODULES.keys()) for name, path in MODULES.items() if name not in lazy}
    assert circle(edges) == []


def test_circle_is_found() -> None:
    """The test of the test: a circle of three is found from outside it; a diamond is none."""
    assert circle({"x": ["a"], "a": ["b"], "b": ["c"], "c": ["a"]}) == ["a", "b", "c", "a"]
    assert circle({"x": ["a", "b"], "a": ["c"], "b": ["c"], "c": []}) == []


def test_heavy_libraries_stay_inside_functions_of_the_command_line() -> None:
    """Command modules import nothing heavy at their top, so `--help` is instant."""
    for module, path in MODULES.items():
        if room_of(module) == "cli" and module != "treeopt":
            heavy = {name for name in imports_of(path, top=True) if name.split(".")[0] in HEAVY}
            ours = {name for name in imports_of(path, top=True) if name.split(".")[0] == "treeopt"}
            heavy |= {name for name in ours if room_of(name) not in {*NO_TORCH, "cli"}}
            assert not heavy, f"{module} imports {heavy}"


# Import every child of the package before or after its public names are used; print the names that are modules then.
SHADOWS = """
import importlib, sys
import {name} as package
names = {names}
if {names_first}:
    for name in names:
        getattr(package, name)
for child in {children}:
    importlib.import_module("{name}." + child)
print([name for name in names if type(getattr(package, name)) is type(sys)])
"""


def shadowed(name: str, names: list[str], children: Iterable[str], *, names_first: bool, path: Path) -> str:
    """The names that are modules after all children were imported, by a fresh process."""
    code = SHADOWS.format(name=name, names=names, children=sorted(children), names_first=names_first)
    done = subprocess.run([sys.executable, "-c", code], cwd=path, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_no_room_bears_the_name_of_a_public_function() -> None:
    """`import treeopt.<room>` replaces no public name, whichever is imported first."""
    children = {name.split(".")[1] for name in MODULES if "." in name} - {"__main__"}
    assert children & set(treeopt.__all__) == set()
    light = ["Tree", "Calibration", "Drafter", "load_tree", "replay", "build_tree", "build_policy"]  # without torch
    for names_first in (False, True):
        assert shadowed("treeopt", light, children, names_first=names_first, path=PACKAGE.parent) == "[]"


def test_shadow_is_found(tmp_path: Path) -> None:
    """The test of the test: a room named as a public function takes its place when it is imported last."""
    (tmp_path / "house").mkdir()
    (tmp_path / "house" / "__init__.py").write_text("def validate(): ...\n")
    (tmp_path / "house" / "validate.py").touch()
    for names_first in (False, True):
        assert shadowed("house", ["validate"], ["validate"], names_first=names_first, path=tmp_path) == "['validate']"
