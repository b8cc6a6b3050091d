"""A strict reader of YAML: no aliases, tags, duplicate keys or ambiguous scalars, and bounded size and depth.

PyYAML reads YAML 1.1, where `010` is 8, `1:30` is 90 and `no` is False. It keeps the last of two equal keys and expands
aliases without a limit. Here each of these is an error with file, line and column.
"""

import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from treeopt.errors import Code, TreeoptError, counted
from treeopt.files.read import header_in, header_of, read_bytes, read_start, unreadable
from treeopt.tree import MAX_FAULTS

MAX_BYTES = 8 * 1024 * 1024  # about 200,000 paths of a tree
MAX_DEPTH = 20
MAX_VALUES = 3 << 20  # keys, values and lists; each takes about 500 bytes while a file is read
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_TAG = "tag:yaml.org,2002:"
_INTEGER = re.compile(r"-?(0|[1-9][0-9]*)")
_EXPONENT = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]{1,3}")
_SCALARS: dict[str, Callable[[str], Any]] = {
    "bool": {"true": True, "false": False}.get,
    "null": {"null": None, "~": None, "": None}.get,
    "float": lambda text: float(text.replace("_", "x")),
    "int": lambda text: int(text) if _INTEGER.fullmatch(text) else None,
}

Where = tuple[str | int, ...]  # keys and indices from the top of the document
Marks = dict[Where, tuple[int, int]]  # line and column, from 1
Faults = list[tuple[Where, str]]  # places in a document, and what is wrong there


@dataclass(frozen=True)
class Document:
    """The data of one file, and the line and column of each part."""

    path: Path
    data: Any
    marks: Marks

    def at(self, where: Where) -> str:
        """`file:line:column` of a part, or of the smallest known part around it."""
        while where and where not in self.marks:
            where = where[:-1]
        line, column = self.marks.get(where, (1, 1))
        return f"{self.path}:{line}:{column}"


def load(path: Path) -> Document:
    return parse(path, read_bytes(path, MAX_BYTES))


def parse(path: Path, raw: bytes) -> Document:
    """The document in the bytes of a file, at most `MAX_BYTES`; E203 where it is empty, not YAML, or breaks a rule."""
    text = decoded(path, raw)
    try:
        _check_events(path, text)
        node = yaml.compose(text, Loader=_LOADER)
    except yaml.MarkedYAMLError as error:
        raise _fault(path, error.problem_mark, f"is not YAML: {error.problem}") from error
    except yaml.YAMLError as error:
        raise _fault(path, None, f"is not YAML: {str(error).splitlines()[0]}") from error
    if node is None:
        raise _fault(path, None, "is empty")
    marks: Marks = {}
    return Document(path, _convert(path, node, (), marks), marks)


def decoded(path: Path, raw: bytes, formats: str = "") -> str:
    """The text of a file in UTF-8; E203, with the formats that are expected, where it is none."""
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise refusal(path, f"is not UTF-8 text (byte {error.start})", formats, at=f"{path}:{line}:1") from error


def _check_events(path: Path, text: str) -> None:
    """Refuse aliases, deep nesting and too many values before a recursive parser reads the document."""
    depth = count = 0
    for event in yaml.parse(text, Loader=_LOADER):
        if isinstance(event, yaml.AliasEvent):
            raise _fault(path, event.start_mark, "uses an alias (*name), which is not read")
        if isinstance(event, (yaml.ScalarEvent, yaml.CollectionStartEvent)) and event.tag is not None:
            raise _fault(path, event.start_mark, f"uses the tag {event.tag}, which is not read")
        count += isinstance(event, (yaml.ScalarEvent, yaml.CollectionStartEvent))
        if count > MAX_VALUES:
            raise _fault(path, event.start_mark, f"has more than {MAX_VALUES:,} values")
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > MAX_DEPTH:
                raise _fault(path, event.start_mark, f"is nested more than {MAX_DEPTH} deep")
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
        if not isinstance(key_node, yaml.ScalarNode):
            raise _fault(path, key_node.start_mark, "has a key that is not a word")
        key = key_node.value
        if key in data:
            raise _fault(path, key_node.start_mark, f"has the key {key!r} twice")
        data[key] = _convert(path, value_node, (*where, key), marks)
    return data


def _convert_scalar(path: Path, node: yaml.Node) -> Any:
    text: str = node.value
    kind = node.tag.removeprefix(_TAG)
    if kind in ("str", "timestamp"):  # dates remain text; numbers such as 5e-5, which YAML 1.1 reads as text, do not
        plain = not getattr(node, "style", None)
        return float(text) if plain and _EXPONENT.fullmatch(text) else text
    if kind in _SCALARS:
        try:
            value = _SCALARS[kind](text)
        except ValueError:
            value = None
        if value is not None or (kind == "null" and text in ("null", "~", "")):
            return value
    hint = "write it as a plain decimal number, true, false, or in quotes"
    raise _fault(path, node.start_mark, f"has {text!r}, which YAML readers disagree about; {hint}")


def _place(mark: Any) -> tuple[int, int]:
    """Line and column from 1 of one of PyYAML's marks, which can be missing."""
    return (mark.line + 1, mark.column + 1) if mark is not None else (1, 1)


def _fault(path: Path, mark: Any, what: str) -> TreeoptError:
    line, column = _place(mark)
    return refusal(path, what, at=f"{path}:{line}:{column}")


class Schema(BaseModel):
    """Base class of all schemas: unknown keys and implicit conversions are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, populate_by_name=True)


S = TypeVar("S", bound=Schema)


def of_json(schema: type[S], data: Any) -> S:
    """Data of JSON by a schema that has dataclasses and tuples, which objects and lists become."""
    return schema.model_validate_json(json.dumps(data))


def check(document: Document, schema: type[S], name: str) -> S:
    """The document as a record of `schema`; E203 with every fault (at most 10) and its place."""
    data = document.data
    found = data.get("schema") if isinstance(data, dict) else None
    if found != name:
        what = f"{document.path} says schema {found!r}, but this treeopt reads {name!r}"
        raise TreeoptError(Code.FILE_INVALID, what, at=document.at(("schema",)))
    try:
        return of_json(schema, data)
    except ValidationError as error:
        faults = [(tuple(fault["loc"]), fault["msg"]) for fault in error.errors(include_url=False)]
        raise faults_error(document, name, faults) from error


@contextmanager
def reading(path: str | os.PathLike[str], kind: str) -> Iterator[None]:
    """Context in which a record is made of a header and arrays: errors name the file; E203 or the record's own."""
    try:
        yield
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        what = f"{path} has a damaged header: {'.'.join(map(str, fault['loc']))}: {fault['msg']}"
        raise TreeoptError(Code.FILE_INVALID, what) from error
    except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
        raise TreeoptError(Code.FILE_INVALID, f"{path} lacks a part of a {kind}: {error}") from error
    except TreeoptError as error:
        raise TreeoptError(error.code, f"{path}: {error.what}", at=error.at, why=error.why, fix=error.fix) from error


def faults_error(document: Document, name: str, faults: Faults) -> TreeoptError:
    """One error that lists the faults of a file, each with its place."""
    lines = [f"{document.at(where)}  {'.'.join(map(str, where))}: {what}" for where, what in faults[:MAX_FAULTS]]
    if len(faults) > MAX_FAULTS:
        lines.append(f"and {len(faults) - MAX_FAULTS} more")
    what = f"{document.path} is not a {name} file: {counted(len(faults), 'fault')}"
    fix = "correct these places, or make the file again"
    return TreeoptError(Code.FILE_INVALID, what, at="\n".join(lines), fix=fix)


TREE_FORMATS = (
    "a tree is a YAML file of treeopt (treeopt.tree/1), a list of paths such as [[0], [1], [0, 0]] in JSON or Python, "
    "or a name from `treeopt list`"
)
# Schema of treeopt's other files -> their kind and their use.
OURS = {
    "treeopt.calibration/1": ("a calibration", "treeopt build --calibration FILE makes a tree of it"),
    "treeopt.shard/1": ("a shard of a calibration", "treeopt merge SHARDS -o FILE makes a calibration of all shards"),
    "treeopt.drafter/1": ("a drafter", "treeopt calibrate --drafter FILE, and treeopt build, make a tree for it"),
    "treeopt.memory/1": ("a memory of texts", "give it to treeopt generate --memory"),
    "treeopt.buffers/1": ("a compiled tree", "give the tree that it was compiled from"),
    "treeopt.latency/1": ("a latency profile", "treeopt build --nodes auto --profile FILE makes a tree with it"),
    "treeopt.prompts/1": ("a description of prompts", "give it to --prompts"),
    "treeopt.policy/1": ("a policy, with a tree for each step", "give it to treeopt generate"),
    "treeopt.schedule/1": ("a schedule, with a plan by batch and context", "give it to treeopt generate"),
}


def read_text(path: Path, formats: str) -> bytes:
    """The bytes of a file that may be UTF-8 text; E203, with the formats that are expected, where it cannot be."""
    try:
        raw, size = read_start(path, MAX_BYTES + 1)
    except IsADirectoryError as error:
        raise refusal(path, "is a folder", formats, at=str(path), fix="name a file in it") from error
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error
    if (header := header_in(raw)) is not None:
        kind, use = OURS.get(str(header.get("schema")), ("a safetensors file", ""))
        raise refusal(path, f"is {kind}", formats, fix=use)
    if len(raw) > MAX_BYTES:
        raise refusal(path, f"has {size:,} bytes; at most {MAX_BYTES:,} are read", formats)
    return raw


def schema_of(path: Path) -> str:
    """The schema of a safetensors file of treeopt; empty for any other file, a folder and a pipe."""
    return str((header_of(path) or {}).get("schema", ""))


def refusal(path: Path, what: str, formats: str = "", *, at: str = "", fix: str = "") -> TreeoptError:
    """E203: a file is not of the expected formats."""
    return TreeoptError(Code.FILE_INVALID, f"{path} {what}", at=at or f"{path}:1:1", why=formats, fix=fix)
