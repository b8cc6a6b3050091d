"""The limits of the house: sizes of files and functions, repeats, private attributes, names of classes, the map.

Each check is a function from a folder of sources to a list of faults; each has a test on a planted fault.
"""

from __future__ import annotations

import ast
import functools
import io
import itertools
import re
import tokenize
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from conftest import ROOT_FOLDER
from looped import looped

PACKAGE = ROOT_FOLDER / "treeopt"
MAP = ROOT_FOLDER / "docs" / "develop" / "architecture.md"
FILE_LINES = 500
CODE_LINES = 40  # of a function's body: neither blank, comment nor docstring
PARAMETERS = 8  # self and cls not counted
# The first five are those that transformers passes to a `custom_generate`, the others are options of `model.generate`,
# which takes them by the names in this signature alone; those of `TreeDecoder` are the same. `train_jointly` has the
# parameters of `train_heads`, and heads.
WIDE = {"decode/generate.py tree_generate", "decode/decoder.py __init__", "train/medusa2.py train_jointly"}
REPEATED_LINES = 6

# Attributes of other libraries' objects that have no public name.
FOREIGN_PRIVATE = {
    "_replace",  # of named tuples, which is public
    "_forward_pre_hooks",  # torch, a module's: those of peft tell whether an adapter is that of all tokens
    "_attn_implementation",  # transformers, a model's config: the attention that it was loaded with
    "_n_gpu",  # transformers, training arguments: set, so that one process trains on one device
    "_prefix_allowed_tokens_fn",  # transformers, a logits processor: the function that it was given
    "_pad_token_tensor",  # transformers, a generation config: the token that stock generate pads with
    "_version",  # torch, a tensor: how often it was written in place
}

Fault = str
Check = Callable[[Path], list[Fault]]


parse = functools.cache(ast.parse)


def texts(folder: Path) -> Iterator[tuple[str, str]]:
    """Path below the folder and text of each source file."""
    for path in sorted(folder.rglob("*.py")):
        yield path.relative_to(folder).as_posix(), path.read_text(encoding="utf-8")


def sources(folder: Path) -> Iterator[tuple[str, str, ast.Module]]:
    """Path below the folder, text and syntax tree of each source file."""
    return ((name, text, parse(text)) for name, text in texts(folder))


@functools.cache
def walk(tree: ast.Module) -> list[ast.AST]:
    """All nodes, for several checks."""
    return list(ast.walk(tree))


def functions(tree: ast.Module) -> Iterator[tuple[ast.FunctionDef | ast.AsyncFunctionDef, bool]]:
    """Every function, and whether it is a method that is given self or cls."""
    methods = {id(one) for node in walk(tree) if isinstance(node, ast.ClassDef) for one in node.body}
    for node in walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            static = any(isinstance(one, ast.Name) and one.id == "staticmethod" for one in node.decorator_list)
            yield node, id(node) in methods and not static


def docstring_lines(tree: ast.Module) -> set[int]:
    """Lines that docstrings take."""
    lines: set[int] = set()
    for node in walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                lines.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return lines


@functools.cache
def code_lines(text: str) -> dict[int, str]:
    """Line number and stripped text of each line that is neither blank, comment nor docstring."""
    silent = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    numbers: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in silent:
            numbers.update(range(token.start[0], token.end[0] + 1))
    lines = text.splitlines()
    return {n: lines[n - 1].strip() for n in sorted(numbers - docstring_lines(parse(text))) if lines[n - 1].strip()}


def long_files(folder: Path) -> list[Fault]:
    """Files above the limit."""
    counted = ((name, len(text.splitlines())) for name, text in texts(folder))
    return [f"{name}: {lines} lines" for name, lines in counted if lines > FILE_LINES]


def long_functions(folder: Path) -> list[Fault]:
    """Functions whose body has too many lines of code."""
    faults = []
    for name, text, tree in sources(folder):
        code = code_lines(text)
        for function, _ in functions(tree):
            body = range(function.body[0].lineno, (function.end_lineno or 0) + 1)
            count = sum(number in code for number in body)
            if count > CODE_LINES:
                faults.append(f"{name}:{function.lineno} {function.name}: {count} lines of code")
    return faults


def wide_functions(folder: Path) -> list[Fault]:
    """Functions with too many parameters."""
    faults = []
    for name, _, tree in sources(folder):
        for function, method in functions(tree):
            given = function.args
            count = len(given.posonlyargs) + len(given.args) + len(given.kwonlyargs) - method
            count += (given.vararg is not None) + (given.kwarg is not None)
            if count > PARAMETERS and f"{name} {function.name}" not in WIDE:
                faults.append(f"{name}:{function.lineno} {function.name}: {count} parameters")
    return faults


def comparable_lines(text: str, tree: ast.Module) -> list[tuple[int, str]]:
    """Code lines that hold a word and belong to no import."""
    imports: set[int] = set()
    for node in walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            imports.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return [(n, line) for n, line in code_lines(text).items() if n not in imports and re.search(r"\w", line)]


def repeats(folder: Path) -> list[Fault]:
    """Pairs of places with equal consecutive lines of code, the first line of each run named."""
    places: dict[tuple[str, ...], list[tuple[str, int, int]]] = defaultdict(list)
    for name, text, tree in sources(folder):
        lines = comparable_lines(text, tree)
        for i in range(len(lines) - REPEATED_LINES + 1):
            window = tuple(line for _, line in lines[i : i + REPEATED_LINES])
            places[window].append((name, i, lines[i][0]))
    faults, known = [], set()
    for window, found in places.items():
        for (one, i, line), (other, j, other_line) in itertools.pairwise(found):
            if one == other and j - i < REPEATED_LINES:
                continue
            if (one, i - 1, other, j - 1) not in known:
                faults.append(f"{one}:{line} = {other}:{other_line}: {window[0]}")
            known.add((one, i, other, j))
    return faults


def private_access(folder: Path) -> list[Fault]:
    """Private attributes of an object other than self or cls."""
    faults = []
    for name, _, tree in sources(folder):
        for node in walk(tree):
            if (
                not isinstance(node, ast.Attribute)
                or not re.match(r"_(?!_)", node.attr)
                or node.attr in FOREIGN_PRIVATE
            ):
                continue
            if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
                faults.append(f"{name}:{node.lineno} {ast.unparse(node)}")
    return faults


def class_names(folder: Path) -> list[Fault]:
    """Classes with the name of another one, each after the first."""
    faults, first = [], {}
    for name, _, tree in sources(folder):
        for node in walk(tree):
            if isinstance(node, ast.ClassDef):
                place = f"{name}:{node.lineno}"
                if first.setdefault(node.name, place) != place:
                    faults.append(f"{place} {node.name}: also {first[node.name]}")
    return faults


CHECKS: tuple[Check, ...] = (long_files, long_functions, wide_functions, repeats, private_access, class_names)
BENCHES = ROOT_FOLDER / "bench"
TESTS = ROOT_FOLDER / "tests"
PLACES = [*((PACKAGE, check) for check in CHECKS), *((BENCHES, check) for check in CHECKS[:3]), (TESTS, long_files)]


@looped(("folder", "check"), PLACES)
def test_house_keeps_its_limits(folder: Path, check: Check) -> None:
    """No file of treeopt/ breaks a limit, none of bench/ one of size, and no test file is too long."""
    faults = check(folder)
    assert not faults, "\n".join([f"{len(faults)} faults", *faults])


def lines_of(count: int, text: str = "    x = {}\n") -> str:
    """So many lines of code, each another."""
    return "".join(text.format(i) for i in range(count))


FUNCTION = 'def f():\n    """A docstring\n\n    of three lines."""\n\n    # a comment\n'
SAME = lines_of(6)
PLANTED: tuple[tuple[Check, str, str], ...] = (  # check, a source at the limit, a source beyond it
    (long_files, "x = 1\n" * 500, "x = 1\n" * 501),
    (long_functions, FUNCTION + lines_of(40), FUNCTION + lines_of(41)),
    (long_functions, FUNCTION + lines_of(40), "class A:\n    def f(self):\n" + lines_of(41, "        x = {}\n")),
    (wide_functions, "def f(a, b, c, d, e, f, g, *, h): ...\n", "def f(a, b, c, d, e, f, g, *, h, **i): ...\n"),
    (
        wide_functions,
        "class A:\n    def f(self, a, b, c, d, e, f, g, h): ...\n",
        "class A:\n    def f(self, a, b, c, d, e, f, g, h, i): ...\n",
    ),
    (
        repeats,
        f"def f():\n{lines_of(5)}def g():\n{lines_of(5)}",
        f"def f():\n{SAME}    y = 1\ndef g():\n    # other\n{SAME}",
    ),
    (repeats, "x = 1\n" * 11, lines_of(6, "x = {}\n") * 2),
    (
        repeats,
        "y = (\n" + lines_of(4, "{},\n") + ")\ny = (\n" + lines_of(4, "{},\n") + ")\n",
        lines_of(6, "y({})\n") * 2,
    ),
    (repeats, "from a import (\n    b,\n    c,\n    d,\n    e,\n)\n" * 2, f"if a:\n{SAME}else:\n{SAME}"),
    (private_access, "self._a = cls._b = a.__b__ = config._attn_implementation\n", "a._b = 1\n"),
    (private_access, "self._a.b()\n", "self._a._b()\n"),
    (class_names, "class A: ...\nclass B: ...\n", "class A: ...\ndef f():\n    class A: ...\n"),
)


@looped(("check", "allowed", "fault"), PLANTED)
def test_check_finds_a_planted_fault(check: Check, allowed: str, fault: str, tmp_path: Path) -> None:
    """A source at the limit passes, one beyond it is found once, with its file."""
    path = tmp_path / "planted.py"
    path.write_text(allowed)
    assert check(tmp_path) == []
    path.write_text(fault)
    assert [one.split(":")[0] for one in check(tmp_path)] == ["planted.py"]


def section(text: str, heading: str) -> str:
    """The lines below a heading, up to the next heading."""
    found = re.search(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#|\Z)", text, flags=re.MULTILINE | re.DOTALL)
    assert found, f"no section {heading!r}"
    return found[1]


def map_faults(text: str, package: Path) -> list[Fault]:
    """Packages and records of the map that do not exist, and those that it leaves out."""
    listed = re.findall(r"^\| `(\w+)/` \|", section(text, "The packages"), flags=re.MULTILINE)
    folders = {path.parent.name for path in package.glob("*/__init__.py")} | {
        path.name for path in package.iterdir() if path.is_dir() and path.name == "data"
    }
    records = re.findall(r"^\| `(\w+)\.py` \|", section(text, "The records"), flags=re.MULTILINE)
    modules = {path.stem for path in package.glob("*.py") if not path.stem.startswith("__")}
    faults = [f"package {name}" for name in sorted(set(listed) ^ folders)]
    faults += [f"record {module}" for module in sorted(set(records) ^ modules)]
    return faults


def test_map_lists_the_packages() -> None:
    """docs/develop/architecture.md names exactly the packages and records that exist."""
    assert map_faults(MAP.read_text(), PACKAGE) == []


def test_map_check_finds_planted_faults(tmp_path: Path) -> None:
    """A package that is missing, one that is not there, and a record are found."""
    for name in ("files", "new", "decode"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    (tmp_path / "tree.py").touch()
    (tmp_path / "policy.py").touch()
    lines = ["## The packages", "| `files/` | a |", "| `decode/` | b |", "| `gone/` | c |"]
    lines += ["## The records", "| `tree.py` | a |"]
    assert map_faults("\n".join(lines) + "\n", tmp_path) == ["package gone", "package new", "record policy"]


def missing_files(text: str, names: Iterable[str]) -> list[str]:
    """Files that a page names in backticks, such as `grow.py` or `optimize/grow.py`, and that are not there."""
    known = [f"/{name}" for name in names]
    named = re.findall(r"`([\w/]+\.py)`", text)
    return sorted({name for name in named if not any(one.endswith(f"/{name}") for one in known)})


def test_pages_name_files_that_exist() -> None:
    """The map and CONTRIBUTING name no file of before; a planted name is found."""
    files = [path.relative_to(ROOT_FOLDER).as_posix() for path in ROOT_FOLDER.glob("[a-z]*/**/*.py")]
    for page in (MAP, ROOT_FOLDER / "CONTRIBUTING.md"):
        assert missing_files(page.read_text(), files) == []
    assert missing_files("`optimize/grow.py`, `grow.py`, `row.py`, `decode/grow.py`", files) == [
        "decode/grow.py",
        "row.py",
    ]
