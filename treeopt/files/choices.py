"""Trees as a `medusa_choices` list: `mc_sim_7b_63 = [[0], [0, 0], [1], ...]`.

A file holds one list (or tuple) of lists of integers, in JSON or as a Python literal with comments and trailing commas,
with or without one assignment in front, or several assignments of which one is chosen by name. No code is executed.
"""

import ast
import contextlib
import json
import re
import reprlib
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from treeopt.errors import Code, TreeoptError, first_line
from treeopt.files.read import parse_json
from treeopt.files.strict_yaml import TREE_FORMATS, refusal
from treeopt.tree import Tree

MAX_PYTHON = 1_000_000  # characters of a Python literal: its parser takes a thousand times as much memory
# White space and comments, then a bracket, `name =`, or `name: list[list[int]] = [`.
_BEGIN = re.compile(r"(?:\s|#[^\n]*(?:\n|\Z))*(?:[\[(]|\w+\s*=(?!=)|\w+\s*:[\w\s.,\[\]]*=\s*[\[(])")
_SHOWN = 20  # names in a message
_FIX = "a list such as [[0], [1], [0, 0]], with or without `name =` in front of it"


def is_choices(text: str) -> bool:
    """Whether a text begins as a list of paths does, with a bracket or with `name =`; a tree file does not."""
    return _BEGIN.match(text) is not None


def choices_text(tree: Tree) -> str:
    """The tree's paths in runtime order, as one line that is JSON and Python alike."""
    return json.dumps([list(path) for path in tree.paths])


def parse_choices(path: Path, text: str) -> Tree:
    """The tree of a text that holds one list of paths, in any order; E203 with the place where it does not."""
    return tree_of_literal(path, literal(path, text))


def tree_of_literal(path: Path, found: Any) -> Tree:
    """The tree of the value of a file, which must be a list of paths, in any order."""
    if not isinstance(found, (list, tuple)):
        raise _fault(path, 1, 1, f"holds a value of type {type(found).__name__}, not a list of paths")
    try:
        return Tree.from_paths(found)
    except TreeoptError as error:
        what = f"{path} holds a list that is not a tree: {error.what.removeprefix('not a tree: ')}"
        raise TreeoptError(Code.FILE_INVALID, what, at=error.at, why=error.why, fix=_FIX) from error


def literal(path: Path, text: str, name: str = "") -> Any:
    """The value of a text in JSON, or of one Python literal with or without `name =`; nothing is executed.

    Of several assignments it is that of `name`.
    """
    if "\0" in text:
        raise _fault(path, 1, 1, "holds zero bytes, as text in UTF-16 does, and is not UTF-8 text")
    with contextlib.suppress(ValueError):  # Python, or not a list
        found = parse_json(text, finite=False)
        if name:
            raise _fault(path, 1, 1, f"holds one list without a name, not {name}")
        return found
    if len(text) > MAX_PYTHON:
        what = f"is not JSON, and has {len(text):,} characters; a list in Python may have {MAX_PYTHON:,}"
        raise _fault(path, 1, 1, what)
    begun = text.lstrip()  # a list pasted from a class is indented
    above = text.count("\n", 0, len(text) - len(begun))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the parser, about text that is refused below
            body = ast.increment_lineno(ast.parse(begun), above).body
    except SyntaxError as error:
        line, column = above + (error.lineno or 1), error.offset or 1
        raise _fault(path, line, column, f"is not a list of paths: {error.msg}") from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise _fault(path, 1, 1, f"is not a list of paths: {first_line(error)}") from error
    value = _named_value(path, body, name) if name else _only_value(path, body)
    for keys in (node.keys for node in ast.walk(value) if isinstance(node, ast.Dict)):
        counts = Counter(key.value for key in keys if isinstance(key, ast.Constant))
        if twice := [key for key, count in counts.items() if count > 1]:  # Python would keep the last one
            raise _fault(path, 1, 1, f"has the key {reprlib.repr(twice[0])} twice")
    try:
        return ast.literal_eval(value)
    except (ValueError, TypeError, RecursionError, MemoryError) as error:
        what = "is not a list of paths: it holds more than lists and whole numbers"
        raise _fault(path, value.lineno, value.col_offset + 1, what) from error


def _only_value(path: Path, body: list[ast.stmt]) -> ast.expr:
    """The value of the one assignment, or the one expression."""
    names = list(_assigned(body))
    if len(names) == len(body) > 1:
        what = f"holds {len(body)} lists, not one: {', '.join(names[:_SHOWN])}{', ...' if len(names) > _SHOWN else ''}"
        raise refusal(path, what, TREE_FORMATS, at=f"{path}:{body[1].lineno}:1", fix="treeopt import FILE --name NAME")
    if len(body) != 1:
        second = body[1] if body else None
        what = f"holds {len(body)} statements, not one list"
        raise _fault(path, second.lineno if second else 1, 1, what)
    match body[0]:
        case ast.Expr(value) | ast.Assign([ast.Name()], value) | ast.AnnAssign(ast.Name(), _, ast.expr() as value):
            return value
        case line:
            raise _fault(path, line.lineno, line.col_offset + 1, "is not a list of paths")


def _named_value(path: Path, body: list[ast.stmt], name: str) -> ast.expr:
    """The value that is assigned to a name, once."""
    assigned = list(_assigned(body))
    if assigned.count(name) != 1:
        has = ", ".join(dict.fromkeys(assigned[:_SHOWN])) or "none"
        how = "twice or more" if name in assigned else f"not; it assigns {has}"
        raise refusal(path, f"assigns {name} {how}", TREE_FORMATS, at=f"{path}:1:1", fix="--name with one of its lists")
    return next(_only_value(path, [line]) for line in body if list(_assigned([line])) == [name])


def _assigned(body: list[ast.stmt]) -> Iterator[str]:
    """The names that are assigned, in their order."""
    for line in body:
        match line:
            case ast.Assign([ast.Name(name)], _) | ast.AnnAssign(ast.Name(name), _, ast.expr()):
                yield name


def _fault(path: Path, line: int, column: int, what: str) -> TreeoptError:
    return refusal(path, what, TREE_FORMATS, at=f"{path}:{line}:{column}", fix=_FIX)
