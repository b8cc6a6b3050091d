"""Tree files: one line a path, in runtime order, so that two trees differ line by line."""

from __future__ import annotations

import difflib
import json
import os
import re
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from treeopt.errors import Code, TreeoptError
from treeopt.files import strict_yaml
from treeopt.files.atomic import write_text
from treeopt.files.bundled import zoo
from treeopt.files.schemas import Schema, check, faults_error
from treeopt.tree import Expected, Tree, path_faults

SCHEMA = "treeopt.tree/1"
_UNPRINTED = re.compile("[\x7f-\x9f\ufeff\ufffe\uffff]")
_SUFFIXES = (".yaml", ".yml")


class PathLine(Schema):
    """One node: its ranks, one a head, and the estimated probability that all of them are right."""

    path: list[int]
    value: float | None = Field(default=None, ge=0.0, le=1.0)


class ExpectedLine(Schema):
    """Tokens per step (root counted) that the calibration expects, by both estimates, with K."""

    independent: float = Field(ge=1.0)
    replay: float = Field(ge=1.0)
    top_k: int = Field(ge=1)


class TreeFile(Schema):
    """The format `treeopt.tree/1`."""

    schema_name: Literal["treeopt.tree/1"] = Field(alias="schema")
    made_by: str | None = None
    reference: str | None = None
    nodes: int = Field(ge=1, description="the root counted: 1 + the number of paths")
    expected_tokens_per_step: ExpectedLine | None = None
    method: dict[str, str | int] | None = None
    calibration: dict[str, str | int] | None = None
    paths: list[PathLine]


def load_tree(name_or_path: str | os.PathLike[str]) -> Tree:
    """A tree from a YAML file, or from the zoo by its name (`treeopt list`).

    Raises:
        TreeoptError: E104 where there is no such file or name; E203 where the file is not a tree.
    """
    path = Path(name_or_path)
    if not os.path.exists(path):
        if str(name_or_path) not in zoo():
            raise _unknown(str(name_or_path))
        path = zoo()[str(name_or_path)]
    document = strict_yaml.load(path)
    content = check(document, TreeFile, SCHEMA)
    paths = [tuple(line.path) for line in content.paths]
    values = [line.value for line in content.paths]
    faults: list[tuple[tuple[str | int, ...], str]] = [(("paths", i), text) for i, text in path_faults(paths)]
    if len(paths) + 1 != content.nodes:
        faults.append((("nodes",), f"{content.nodes} nodes, but root and paths are {len(paths) + 1}"))
    if None in values and any(value is not None for value in values):
        faults.append((("paths", values.index(None)), "has no value although others have one"))
    if faults:
        raise faults_error(document, SCHEMA, faults)
    known = [value for value in values if value is not None]
    expected = content.expected_tokens_per_step
    source = content.model_dump(include={"made_by", "reference", "method", "calibration"}, exclude_none=True)
    return Tree.from_paths(
        paths,
        known if known else None,
        expected=Expected(**expected.model_dump()) if expected else None,
        source=source,
    )


def save_tree(tree: Tree, path: str | os.PathLike[str]) -> None:
    """Write a tree as YAML; `load_tree` gives back an equal one. An existing file is replaced: trees are cheap."""
    write_text(path, tree_yaml(tree))


def tree_yaml(tree: Tree) -> str:
    """The text of a tree file."""
    lines = [
        f"# {tree.nodes} nodes = 1 root + {len(tree.paths)} drafts, depth {tree.depth}, {len(tree.leaves)} leaves",
        f"schema: {SCHEMA}",
    ]
    for key in ("made_by", "reference"):
        if key in tree.source:
            lines.append(f"{key}: {_flow(tree.source[key])}")
    lines.append(f"nodes: {tree.nodes}")
    if tree.expected:
        e = tree.expected
        lines.append("# tokens per step = 1 + accepted drafts per step, over the calibration's text")
        lines.append(
            f"expected_tokens_per_step: {{independent: {_decimal(e.independent)}, replay: {_decimal(e.replay)}, "
            f"top_k: {e.top_k}}}"
        )
    for key in ("method", "calibration"):
        if tree.source.get(key):
            lines.append(f"{key}:")
            lines.extend(f"  {name}: {_flow(value)}" for name, value in tree.source[key].items())
    lines.append("paths:" if tree.paths else "paths: []")
    values = tree.values or (None,) * len(tree.paths)
    for ranks, value in zip(tree.paths, values, strict=True):
        tail = "" if value is None else f", value: {_decimal(value)}"
        lines.append(f"- {{path: {list(ranks)}{tail}}}")
    return "\n".join(lines) + "\n"


def _flow(value: Any) -> str:
    """A scalar as YAML: JSON's notation of strings and numbers is also YAML's, but for characters it does not print."""
    if isinstance(value, str):  # a file name that is not UTF-8 must not make the file unreadable
        value = value.encode(errors="replace").decode()
    return _UNPRINTED.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(value, ensure_ascii=False))


def _decimal(value: float) -> str:
    """The shortest notation that reads back equal, with the point that YAML 1.1 demands of a float."""
    text = repr(float(value))
    mantissa, exponent, power = text.partition("e")
    return text if not exponent or "." in mantissa else f"{mantissa}.0e{power}"


def _unknown(name: str) -> TreeoptError:
    if name.endswith(_SUFFIXES) or os.sep in name:
        return TreeoptError(Code.FILE_MISSING, f"there is no tree file {name}", fix="treeopt build -o " + name)
    near = difflib.get_close_matches(name, zoo(), n=3)
    fix = f"did you mean {' or '.join(near)}?" if near else "treeopt list prints the names; treeopt build makes a tree"
    return TreeoptError(Code.TREE_UNKNOWN, f"there is no tree {name!r}: no file, and not in the zoo", fix=fix)
