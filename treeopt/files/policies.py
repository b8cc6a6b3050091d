"""Policy files: YAML that describes per-step trees."""

from __future__ import annotations

import hashlib
import os
from typing import Any, Literal

from pydantic import AliasChoices, Field, FiniteFloat

from treeopt.drafter import Drafter
from treeopt.errors import Code, TreeoptError
from treeopt.files.configurations import decimal, entries, flow_mapping, stored_lines
from treeopt.files.drafters import load_drafter
from treeopt.files.outputs import TREE, write_marked
from treeopt.files.strict_yaml import Document, Schema, check, faults_error
from treeopt.files.tensors import canonical_json
from treeopt.files.trees import (
    POLICY,
    DrafterLine,
    drafter_fields,
    drafter_line,
    figure_faults,
    read_plan,
    save_tree,
    schema_of,
    tree_of,
)
from treeopt.policy import Plan, PolicyExpected, TreePolicy
from treeopt.tree import Tree

SCHEMA = POLICY


class PolicyExpectedLine(Schema):
    """`treeopt.policy.PolicyExpected` in a file."""

    replay: float = Field(ge=1.0)
    estimated: float = Field(ge=1.0)
    nodes: float = Field(ge=1.0)
    low: float | None = Field(default=None, ge=0.0)
    high: float | None = Field(default=None, ge=0.0)


class PolicyFile(Schema):
    """The format `treeopt.policy/1`. Files written by 0.x have the key `prices` for `size_cost`."""

    schema_name: Literal["treeopt.policy/1"] = Field(alias="schema")
    kind: Literal["dynamic"]
    made_by: str | None = None
    nodes: int
    depth: int
    expected_tokens_per_step: PolicyExpectedLine | None = None
    drafter: DrafterLine
    size_cost: tuple[tuple[int, FiniteFloat], ...] = Field((), validation_alias=AliasChoices("size_cost", "prices"))
    calibration: dict[str, str | int] | None = None
    configuration: dict[str, dict[str, Any]] | None = None


def plan_id(plan: Plan) -> str:
    """The id of a tree or policy: equal where the same nodes are verified, whatever values and figures it has."""
    content: dict[str, Any] = {"drafter": plan.drafter}
    if isinstance(plan, TreePolicy):
        content |= {"nodes": plan.nodes, "depth": plan.depth, "size_cost": plan.size_cost}
    else:
        content |= {"paths": sorted(plan.paths)}
    return hashlib.sha256(canonical_json(content).encode()).hexdigest()[:16]


def load_plan(name_or_path: str | os.PathLike[str]) -> Plan:
    """A policy from a file, or a tree as `treeopt.files.trees.load_tree` gives it.

    Raises:
        TreeoptError: as `load_tree`.
    """
    found = read_plan(name_or_path)
    if isinstance(found, Tree):
        return found
    return _policy_of(found) if schema_of(found) == POLICY else tree_of(found)


def as_policy(policy: TreePolicy | str | os.PathLike[str]) -> TreePolicy:
    """A policy: given as a record, or as the name of a file."""
    found = load_plan(policy) if isinstance(policy, (str, os.PathLike)) else policy
    if not isinstance(found, TreePolicy):
        raise TypeError(f"a policy is a TreePolicy, or the name of its file; this is a {type(found).__name__}")
    return found


def _policy_of(document: Document) -> TreePolicy:
    content = check(document, PolicyFile, SCHEMA)
    source = content.model_dump(include={"made_by", "calibration", "configuration"}, exclude_none=True)
    line = content.expected_tokens_per_step
    faults = figure_faults(line, content.depth)
    if faults:
        raise faults_error(document, SCHEMA, faults)
    try:
        return TreePolicy(
            nodes=content.nodes,
            depth=content.depth,
            size_cost=content.size_cost,
            expected=PolicyExpected(**line.model_dump()) if line else None,
            **drafter_fields(content.drafter, document.path, source),
        )
    except TreeoptError as error:
        raise faults_error(document, SCHEMA, [(("nodes",), error.what)]) from error


def load_plan_for(name_or_path: str | os.PathLike[str]) -> tuple[Plan, Drafter | None]:
    """A tree or policy with the drafter that it names."""
    plan = load_plan(name_or_path)
    file = plan.source.get("drafter") if plan.drafter else None
    if file is not None and not os.path.exists(file):
        raise TreeoptError(
            Code.FILE_MISSING,
            f"there is no {file}, the drafter that {name_or_path} names",
            why="a tree is valid for one drafter only; learning again gives another drafter",
            fix="--drafter FILE, or put the drafter back in its place",
        )
    return plan, None if file is None else load_drafter(file)


def save_policy(policy: TreePolicy | str | os.PathLike[str], path: str | os.PathLike[str]) -> None:
    """Write a policy as YAML; `load_plan` returns an equal one. An existing file is replaced."""
    write_marked(path, policy_yaml(as_policy(policy), path), TREE)


def save_plan(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write a tree or a policy as YAML, which `load_plan` reads. An existing file is replaced."""
    if isinstance(plan, TreePolicy):
        save_policy(plan, path)
    else:
        save_tree(plan, path)


def policy_yaml(policy: TreePolicy, path: str | os.PathLike[str] = "tree.yaml") -> str:
    """The text of a policy file that is to be written to `path`."""
    lines = [
        f"# at every step the {policy.nodes} most likely nodes, root counted",
        f"schema: {SCHEMA}",
        "kind: dynamic",
    ]
    if policy.size_cost:
        lines[0] = f"# at every step the most likely nodes, at most {policy.nodes}, by estimated tokens and cost"
    lines += [*entries(policy.source, "made_by"), f"nodes: {policy.nodes}", f"depth: {policy.depth}"]
    if policy.expected:
        lines += ["# tokens per step = 1 + accepted drafts per step, over the calibration's text"]
        lines += [f"expected_tokens_per_step: {flow_mapping(vars(policy.expected))}"]
    lines.append(drafter_line(policy.drafter, policy.source, path))
    if policy.size_cost:
        lines += ["# nodes, and the cost of a step of that size in tokens", "size_cost:"]
        lines += [f"- [{size}, {decimal(cost)}]" for size, cost in policy.size_cost]
    lines += [*entries(policy.source, "calibration"), *stored_lines(policy.source)]
    return "\n".join(lines) + "\n"
