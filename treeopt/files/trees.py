"""Files of trees and policies: YAML with one line for each path, in runtime order, or for each rule of a step's tree.

Wherever a tree file is read, a file with a list of paths (`treeopt.files.choices`) is read as well.
"""

import dataclasses
import difflib
import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, FiniteFloat

from treeopt.errors import Code, TreeoptError, counted
from treeopt.files import strict_yaml
from treeopt.files.bundled import zoo
from treeopt.files.choices import is_choices, parse_choices
from treeopt.files.configurations import decimal, entries, flow_mapping, stored_lines
from treeopt.files.outputs import TREE, write_marked
from treeopt.files.read import path_beside, path_from
from treeopt.files.strict_yaml import (
    OURS,
    TREE_FORMATS,
    Document,
    Faults,
    Schema,
    check,
    decoded,
    faults_error,
    read_text,
    refusal,
)
from treeopt.files.tensors import canonical_json
from treeopt.policy import Plan, PolicyExpected, TreePolicy
from treeopt.schedule import Planned, Schedule
from treeopt.tree import MAX_RANK, Expected, Tree, path_faults
from treeopt.tree import Path as RankPath

SCHEMA = "treeopt.tree/1"
POLICY = "treeopt.policy/1"
GivenTree = Tree | str | os.PathLike[str] | Iterable[Sequence[int]]
_SUFFIXES = (".yaml", ".yml", ".json", ".py", ".txt")
_ROUNDED = 1 + 1e-6  # figures of files have seven digits


class PathLine(Schema):
    """One node: its ranks, one for each head, and the estimated probability that all of them are right."""

    path: tuple[Annotated[int, Field(ge=0, le=MAX_RANK)], ...]
    value: float | None = Field(default=None, ge=0.0, le=1.0)


class ExpectedLine(Schema):
    """Expected tokens per step (root counted), the number K of ranks, and the paths that these figures belong to.

    `paths_sha256` is the first 12 hexadecimal digits of the SHA-256 of the sorted paths as JSON.
    """

    independent: FiniteFloat = Field(ge=1.0)
    replay: FiniteFloat = Field(ge=1.0)
    top_k: int = Field(ge=1)
    cross_validated: FiniteFloat | None = Field(default=None, ge=1.0)
    low: FiniteFloat | None = Field(default=None, ge=0.0)
    high: FiniteFloat | None = Field(default=None, ge=0.0)
    paths_sha256: str


class DrafterLine(Schema):
    """The drafter of a tree: its id, and the path of its file relative to the tree's folder."""

    id: str
    file: str | None = None


class TreeFile(Schema):
    """The format `treeopt.tree/1`."""

    schema_name: Literal["treeopt.tree/1"] = Field(alias="schema")
    made_by: str | None = None
    reference: str | None = None
    nodes: int = Field(ge=1, description="the root counted: 1 + the number of paths")
    expected_tokens_per_step: ExpectedLine | None = None
    drafter: DrafterLine | None = None
    method: dict[str, str | int] | None = None
    calibration: dict[str, str | int] | None = None
    configuration: dict[str, dict[str, Any]] | None = None
    paths: list[PathLine]


class PolicyExpectedLine(Schema):
    """`treeopt.policy.PolicyExpected` in a file."""

    replay: FiniteFloat = Field(ge=1.0)
    estimated: FiniteFloat = Field(ge=1.0)
    nodes: FiniteFloat = Field(ge=1.0)
    low: FiniteFloat | None = Field(default=None, ge=0.0)
    high: FiniteFloat | None = Field(default=None, ge=0.0)


class SizeLines(Schema):
    """The sizes of a policy in a file: `nodes` or `path_tokens`."""

    kind: Literal["dynamic"]
    nodes: int | None = None
    path_tokens: int | None = None
    depth: int
    size_cost: tuple[tuple[int, FiniteFloat], ...] = ()


class PolicyFile(SizeLines):
    """The format `treeopt.policy/1`."""

    schema_name: Literal["treeopt.policy/1"] = Field(alias="schema")
    made_by: str | None = None
    expected_tokens_per_step: PolicyExpectedLine | None = None
    drafter: DrafterLine
    calibration: dict[str, str | int] | None = None
    configuration: dict[str, dict[str, Any]] | None = None


def load_tree(name_or_path: str | os.PathLike[str]) -> Tree:
    """A tree from a file, or by its name in `treeopt list`.

    The file is YAML as `save_tree` writes it, or holds a `medusa_choices` list: `[[0], [0, 0], [1]]` in JSON or Python,
    in any order, with or without `name =` in front.

    Raises:
        TreeoptError: E104 where there is no such file or name; E203 where the file is not a tree.
        TypeError: where a list is given in place of a name: `Tree.from_paths` takes it.
    """
    plan = load_plan(name_or_path)
    if isinstance(plan, TreePolicy):
        raise TreeoptError(
            Code.FILE_INVALID,
            f"{os.fspath(name_or_path)} is a policy ({POLICY}): it has a tree for each step, not one tree",
            why="it has no paths to draw, compile or replay",
            fix="treeopt generate and treeopt validate use it, and treeopt render --example draws one of its trees; "
            "treeopt build --kind static makes one tree",
        )
    return plan


def load_plan(name_or_path: str | os.PathLike[str]) -> Plan:
    """A policy from a file; or a tree, as `load_tree` gives it.

    Raises:
        TreeoptError: as `load_tree`.
    """
    return plan_of_document(load_document(name_or_path))


def load_document(name_or_path: str | os.PathLike[str]) -> Document | Tree:
    """The document of a file of a tree, a policy or a schedule; the tree of a list of paths. Errors as `load_plan`."""
    if not isinstance(name_or_path, (str, os.PathLike)):
        what = f"a tree is loaded by the name of a file or of `treeopt list`, not by a {type(name_or_path).__name__}"
        raise TypeError(f"{what}; treeopt.Tree.from_paths makes a tree of a list of paths")
    name = os.fsdecode(name_or_path)
    path = Path(name)
    if not name or not os.path.exists(path):
        if name not in zoo():
            raise _unknown(name)
        path = zoo()[name]
    raw = read_text(path, TREE_FORMATS)
    text = raw.decode("utf-8-sig", errors="replace")
    if is_choices(text) or (path.suffix == ".py" and "schema:" not in text):
        decoded(path, raw, TREE_FORMATS)
        return parse_choices(path, text)
    try:
        return strict_yaml.parse(path, raw)
    except TreeoptError as error:
        raise TreeoptError(error.code, error.what, at=error.at, why=TREE_FORMATS, fix=error.fix) from error


def plan_of_document(document: Document | Tree) -> Plan:
    """The tree or policy of what `load_document` gives; E203 where it is of another kind."""
    if isinstance(document, Tree):
        return document
    return _policy_of(document) if schema_of_document(document) == POLICY else _tree_of(document)


def as_tree(tree: GivenTree) -> Tree:
    """A tree: given as a record, as a name of a file or of `treeopt list`, or as a list of paths in any order."""
    if isinstance(tree, (str, os.PathLike)):
        return load_tree(tree)
    return tree if isinstance(tree, Tree) else Tree.from_paths(tree)


def as_policy(policy: TreePolicy | str | os.PathLike[str]) -> TreePolicy:
    """A policy: given as a record, or as the name of a file."""
    found = load_plan(policy) if isinstance(policy, (str, os.PathLike)) else policy
    if not isinstance(found, TreePolicy):
        raise TypeError(f"a policy is a TreePolicy, or the name of its file; this is a {type(found).__name__}")
    return found


def plan_id(plan: Planned) -> str:
    """The id of a plan: equal where the same nodes are verified, whatever values and figures it has."""
    content: dict[str, Any] = {"drafter": plan.drafter}
    if isinstance(plan, Schedule):
        content |= {"cells": [[*cell.key, plan_id(cell.plan)] for cell in plan.cells]}
    elif isinstance(plan, TreePolicy):
        content |= {plan.unit: plan.nodes, "depth": plan.depth, "size_cost": plan.size_cost}
    else:
        content |= {"paths": sorted(plan.paths)}
    return hashlib.sha256(canonical_json(content).encode()).hexdigest()[:16]


def schema_of_document(document: Document) -> str | None:
    """The schema of a document; None where it has none."""
    found = document.data.get("schema") if isinstance(document.data, dict) else None
    return found if isinstance(found, str) else None


def _tree_of(document: Document) -> Tree:
    """The tree of a document; E203 with every fault (at most 10) and its place."""
    _check_kind(document)
    content = check(document, TreeFile, SCHEMA)
    paths = [line.path for line in content.paths]
    faults = paths_faults(content.paths)
    if len(paths) + 1 != content.nodes:
        faults.append((("nodes",), f"{content.nodes} nodes, but root and paths are {len(paths) + 1}"))
    expected = content.expected_tokens_per_step
    if expected and expected.paths_sha256 != _paths_sha256(tuple(paths)):
        expected = None  # the paths were edited, so the figures are those of another tree
    faults += _figure_faults(expected, max(map(len, paths), default=0))
    if faults:
        raise faults_error(document, SCHEMA, faults)
    known = [line.value for line in content.paths if line.value is not None]
    source = content.model_dump(
        include={"made_by", "reference", "method", "calibration", "configuration"}, exclude_none=True
    )
    return Tree.from_paths(
        paths,
        known if known else None,
        **drafter_fields(content.drafter, document.path, source),
        expected=Expected(**expected.model_dump(exclude={"paths_sha256"})) if expected else None,
    )


def _policy_of(document: Document) -> TreePolicy:
    content = check(document, PolicyFile, POLICY)
    source = content.model_dump(include={"made_by", "calibration", "configuration"}, exclude_none=True)
    line = content.expected_tokens_per_step
    faults = _figure_faults(line, content.depth)
    if faults:
        raise faults_error(document, POLICY, faults)
    expected = PolicyExpected(**line.model_dump()) if line else None
    try:
        return policy_of(content, expected=expected, **drafter_fields(content.drafter, document.path, source))
    except TreeoptError as error:
        raise faults_error(document, POLICY, [(("nodes",), error.what)]) from error


def policy_of(line: SizeLines, **fields: Any) -> TreePolicy:
    """The policy of the sizes in a file and its other fields; E103 where they are none."""
    sizes = [size for size in (line.nodes, line.path_tokens) if size is not None]
    if len(sizes) != 1:
        raise TreeoptError(Code.TREE_INVALID, "not a policy: it has either nodes or path_tokens")
    by_paths = line.path_tokens is not None
    return TreePolicy(sizes[0], line.depth, size_cost=line.size_cost, path_tokens=by_paths, **fields)


def _figure_faults(expected: Schema | None, depth: int) -> Faults:
    """Place and text of each figure that no tree of this depth has: a step gives 1 to 1 + depth tokens."""
    figures = {} if expected is None else expected.model_dump(exclude_none=True)
    faults: Faults = []
    for name in ("independent", "replay", "estimated", "cross_validated"):
        if name in figures and not 1.0 <= figures[name] <= (1.0 + depth) * _ROUNDED:
            what = f"{name} is {figures[name]:g}, and a step of a tree {depth} deep gives 1 to {1 + depth} tokens"
            faults.append((("expected_tokens_per_step", name), what))
    if figures.get("low", 0.0) > figures.get("high", float("inf")):
        faults.append((("expected_tokens_per_step", "low"), "low is above high"))
    return faults


def paths_faults(lines: Sequence[PathLine]) -> Faults:
    """Place and text of each fault of the lines of a tree's paths.

    No value is above that of its parent: a path is right at most as often as its beginning.
    """
    paths, values = [line.path for line in lines], [line.value for line in lines]
    known = dict(zip(paths, values, strict=True))
    faults: Faults = [(("paths", i), text) for i, text in path_faults(paths)]
    if None in values and any(value is not None for value in values):
        faults.append((("paths", values.index(None)), "has no value although others have one"))
    for i, (path, value) in enumerate(zip(paths, values, strict=True)):
        above = known.get(path[:-1])
        if above is not None and value is not None and value > above * _ROUNDED:
            faults.append((("paths", i), f"has the value {value:g}, above {above:g}, the value of its parent"))
    return faults


def _check_kind(document: Document) -> None:
    """Raise E203 where a document is not a tree, with its kind."""
    path, data, schema = document.path, document.data, schema_of_document(document)
    if schema in OURS:
        kind, use = OURS[schema]
        raise refusal(path, f"is {kind} ({schema}), not a tree", TREE_FORMATS, at=document.at(("schema",)), fix=use)
    if not isinstance(data, dict) or "schema" not in data:
        fix = "treeopt import FILE reads the trees of engines"
        raise refusal(path, f"has no schema, and is not a {SCHEMA} file", TREE_FORMATS, fix=fix)


def drafter_fields(line: DrafterLine | None, path: Path, source: dict[str, Any]) -> dict[str, Any]:
    """The fields of a record about its drafter, whose file is relative to the record's folder."""
    if line is None:
        return {"source": source}
    if line.file is not None:
        source["drafter"] = path_beside(path.parent, line.file)
    return {"drafter": line.id, "source": source}


def drafter_line(drafter: str, source: Mapping[str, Any], path: str | os.PathLike[str]) -> str:
    """The line about a record's drafter; its file is relative to the folder that the record is written to."""
    file = source.get("drafter")
    relative = None if file is None else path_from(Path(path).parent, file)
    return f"drafter: {flow_mapping({'id': drafter, 'file': relative})}"


def save_tree(tree: GivenTree, path: str | os.PathLike[str]) -> None:
    """Write a tree as YAML; `load_tree` returns an equal one. An existing file is replaced."""
    write_marked(path, tree_yaml(as_tree(tree), path), TREE)


def save_policy(policy: TreePolicy | str | os.PathLike[str], path: str | os.PathLike[str]) -> None:
    """Write a policy as YAML; `load_plan` returns an equal one. An existing file is replaced."""
    write_marked(path, policy_yaml(as_policy(policy), path), TREE)


def save_plan(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write a tree or a policy as YAML, which `load_plan` reads. An existing file is replaced."""
    save_policy(plan, path) if isinstance(plan, TreePolicy) else save_tree(plan, path)


def tree_yaml(tree: Tree, path: str | os.PathLike[str] = "tree.yaml") -> str:
    """The text of a tree file that is to be written to `path`."""
    lines = [
        f"# {counted(tree.nodes, 'node')} = 1 root + {counted(len(tree.paths), 'draft')}, depth {tree.depth}, "
        f"{counted(len(tree.leaves), 'leaf')}",
        f"schema: {SCHEMA}",
    ]
    lines += [*entries(tree.source, "made_by", "reference"), f"nodes: {tree.nodes}"]
    if tree.expected:
        lines.append("# tokens per step = 1 + accepted drafts per step, over the calibration's text")
        figures = {**dataclasses.asdict(tree.expected), "paths_sha256": _paths_sha256(tree.paths)}
        lines.append(f"expected_tokens_per_step: {flow_mapping(figures)}")
    if tree.drafter:
        lines.append(drafter_line(tree.drafter, tree.source, path))
    lines += [*entries(tree.source, "method", "calibration"), *stored_lines(tree.source)]
    lines.append("paths:" if tree.paths else "paths: []")
    return "\n".join([*lines, *path_lines(tree)]) + "\n"


def path_lines(tree: Tree) -> Iterator[str]:
    """A line for each path of a tree."""
    for ranks, value in zip(tree.paths, tree.values or (None,) * len(tree.paths), strict=True):
        tail = "" if value is None else f", value: {decimal(value)}"
        yield f"- {{path: {list(ranks)}{tail}}}"


def policy_yaml(policy: TreePolicy, path: str | os.PathLike[str] = "tree.yaml") -> str:
    """The text of a policy file that is to be written to `path`."""
    lines = [f"# at every step {policy.chosen}", f"schema: {POLICY}", "kind: dynamic"]
    lines += [*entries(policy.source, "made_by"), size_line(policy), f"depth: {policy.depth}"]
    if policy.expected:
        lines += ["# tokens per step = 1 + accepted drafts per step, over the calibration's text"]
        lines += [f"expected_tokens_per_step: {flow_mapping(vars(policy.expected))}"]
    lines.append(drafter_line(policy.drafter, policy.source, path))
    if policy.size_cost:
        lines += [f"# {policy.unit}, and the cost of a step of that size in tokens", "size_cost:"]
        lines += cost_lines(policy)
    lines += [*entries(policy.source, "calibration"), *stored_lines(policy.source)]
    return "\n".join(lines) + "\n"


def size_line(policy: TreePolicy) -> str:
    """The size of a policy as an entry of a file."""
    return f"{'path_tokens' if policy.path_tokens else 'nodes'}: {policy.nodes}"


def cost_lines(policy: TreePolicy) -> list[str]:
    """A line for each size of a policy and its cost."""
    return [f"- [{size}, {decimal(cost)}]" for size, cost in policy.size_cost]


def _paths_sha256(paths: Sequence[RankPath]) -> str:
    return hashlib.sha256(canonical_json(sorted(paths)).encode()).hexdigest()[:12]


def _unknown(name: str) -> TreeoptError:
    if name.endswith(_SUFFIXES) or os.sep in name:
        return TreeoptError(Code.FILE_MISSING, f"there is no tree file {name}", fix="treeopt build -o " + name)
    near = difflib.get_close_matches(name, zoo(), n=3)
    fix = f"did you mean {' or '.join(near)}?" if near else "treeopt list prints the names; treeopt build makes a tree"
    return TreeoptError(Code.TREE_UNKNOWN, f"there is no tree {name!r}: no file, and not one of treeopt list", fix=fix)
