"""A strict reader of YAML: no aliases, tags, duplicate keys or ambiguous scalars, and bounded size and depth.

PyYAML reads YAML 1.1, where `010` is 8, `1:30` is 90 and `no` is False. It keeps the last of two equal keys and expands
aliases without a limit. Here each of these is an error with file, line and column.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from treeopt.errors import Code, TreeoptError
from treeopt.files.read import read_bytes

MAX_BYTES = 8 * 1024 * 1024  # about 200,000 paths of a tree
MAX_DEPTH = 20
MAX_VALUES = 1 << 21  # keys, values and lists; each takes about 500 bytes while a file is read
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_TAG = "tag:yaml.org,2002:"
_INTEGER = re.compile(r"-?(0|[1-9][0-9]*)")
_SCALARS: dict[str, Callable[[str], Any]] = {
    "bool": {"true": True, "false": False}.get,
    "null": {"null": None, "~": None, "": None}.get,
    "float": lambda text: float(text.replace("_", "x")),
    "int": lambda text: int(text) if _INTEGER.fullmatch(text) else None,
}

Where = tuple[str | int, ...]  # keys and indices from the top of the document
Marks = dict[Where, tuple[int, int]]  # line and column, from 1


class Document:
    """The data of one file, and the line and column of each part."""

    def __init__(self, path: Path, data: Any, marks: Marks) -> None:
        self.path = path
        self.data = data
        self.marks = marks

    def at(self, where: Where) -> str:
        """`file:line:column` of a part, or of the smallest known part around it."""
        while where and where not in self.marks:
            where = where[:-1]
        line, column = self.marks.get(where, (1, 1))
        return f"{self.path}:{line}:{column}"


def load(path: Path) -> Document:
    """Read one YAML file.

    Raises:
        TreeoptError: E201 where it is missing; E203 where it is too large, empty, not YAML, or breaks a rule above.
    """
    return parse(path, read_bytes(path, MAX_BYTES))


def parse(path: Path, raw: bytes) -> Document:
    """The document in the bytes of a file.

    Raises:
        TreeoptError: E203 as `load`.
    """
    if len(raw) > MAX_BYTES:
        raise _fault(path, 1, 1, f"has {len(raw):,} bytes; at most {MAX_BYTES:,} are read")
    try:
        text = raw.decode()
        _check_events(path, text)
        node = yaml.compose(text, Loader=_LOADER)
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise _fault(path, line, 1, f"is not UTF-8 text (byte {error.start})") from error
    except yaml.MarkedYAMLError as error:
        raise _fault(path, *_place(error.problem_mark), f"is not YAML: {error.problem}") from error
    except yaml.YAMLError as error:
        raise _fault(path, 1, 1, f"is not YAML: {str(error).splitlines()[0]}") from error
    if node is None:
        raise _fault(path, 1, 1, "is empty")
    marks: Marks = {}
    return Document(path, _convert(path, node, (), marks), marks)


def _check_events(path: Path, text: str) -> None:
    """Refuse aliases, deep nesting and too many values before a recursive parser reads the document."""
    depth = count = 0
    for event in yaml.parse(text, Loader=_LOADER):
        line, column = _place(event.start_mark)
        if isinstance(event, yaml.AliasEvent):
            raise _fault(path, line, column, "uses an alias (*name), which is not read")
        if isinstance(event, (yaml.ScalarEvent, yaml.CollectionStartEvent)) and event.tag is not None:
            raise _fault(path, line, column, f"uses the tag {event.tag}, which is not read")
        count += isinstance(event, (yaml.ScalarEvent, yaml.CollectionStartEvent))
        if count > MAX_VALUES:
            raise _fault(path, line, column, f"has more than {MAX_VALUES:,} values")
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > MAX_DEPTH:
                raise _fault(path, line, column, f"is nested more than {MAX_DEPTH} deep")
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1


def _convert(path: Path, node: yaml.Node, where: Where, marks: Marks) -> Any:
    marks[where] = _place(node.start_mark)
    if isinstance(node, yaml.SequenceNode):
        return [_convert(path, child, (*where, i), marks) for i, child in enumerate(node.value)]
    if isinstance(node, yaml.MappingNode):
        return _convert_mapping(path, node, where, marks)
    return _convert_scalar(path, node)


def _convert_mapping(path: Path, node: yaml.MappingNode, where: Where, marks: Marks) -> dict[str, Any]:
    data: dict[str, Any] = {}
    for key_node, value_node in node.value:
        line, column = _place(key_node.start_mark)
        if not isinstance(key_node, yaml.ScalarNode):
            raise _fault(path, line, column, "has a key that is not a word")
        key = key_node.value
        if key in data:
            raise _fault(path, line, column, f"has the key {key!r} twice")
        data[key] = _convert(path, value_node, (*where, key), marks)
    return data


def _convert_scalar(path: Path, node: yaml.Node) -> Any:
    text: str = node.value
    kind = node.tag.removeprefix(_TAG)
    if kind in ("str", "timestamp"):  # dates remain text
        return text
    if kind in _SCALARS:
        try:
            value = _SCALARS[kind](text)
        except ValueError:
            value = None
        if value is not None or (kind == "null" and text in ("null", "~", "")):
            return value
    hint = "write it as a plain decimal number, true, false, or in quotes"
    raise _fault(path, *_place(node.start_mark), f"has {text!r}, which YAML readers disagree about; {hint}")


def _place(mark: Any) -> tuple[int, int]:
    """Line and column from 1 of one of PyYAML's marks, which can be missing."""
    return (mark.line + 1, mark.column + 1) if mark is not None else (1, 1)


def _fault(path: Path, line: int, column: int, what: str) -> TreeoptError:
    return TreeoptError(Code.FILE_INVALID, f"{path} {what}", at=f"{path}:{line}:{column}")
