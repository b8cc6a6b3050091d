"""Files of schedules: YAML with each different plan once, and a line for each batch and context.

And the plan of a decoder as it is given: a record, the name of a file, a list of paths, or what a drafter recommends.
"""

import math
import os
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from treeopt.defaults import KINDS, TOO_LARGE
from treeopt.drafter import Drafter
from treeopt.errors import Code, TreeoptError
from treeopt.files import trees
from treeopt.files.configurations import entries, flow_mapping, stored_lines
from treeopt.files.drafters import load_drafter
from treeopt.files.outputs import TREE, write_marked
from treeopt.files.strict_yaml import Document, Faults, Schema, check, faults_error
from treeopt.policy import Plan, TreePolicy
from treeopt.schedule import Planned, Schedule, ScheduledPlan
from treeopt.tree import Tree

SCHEMA = "treeopt.schedule/1"
_FIGURES = ("tokens_per_step", "speedup", "low", "high")


class NoneLine(Schema):
    """Plain decoding, without drafts."""

    kind: Literal["none"]


class StaticLine(Schema):
    """One tree for all steps."""

    kind: Literal["static"]
    paths: list[trees.PathLine] = Field(min_length=1)


class CellLine(Schema):
    """The plan of a batch and a context, by its place in `plans` from 0, with its expected figures."""

    batch: int = Field(ge=1, lt=TOO_LARGE)
    context: int = Field(ge=1, lt=TOO_LARGE)
    plan: int = Field(ge=0)
    tokens_per_step: float | None = Field(default=None, ge=1.0, allow_inf_nan=False)
    speedup: float | None = Field(default=None, ge=0.0, allow_inf_nan=False)
    low: float | None = Field(default=None, ge=0.0, allow_inf_nan=False)
    high: float | None = Field(default=None, ge=0.0, allow_inf_nan=False)


class ScheduleFile(Schema):
    """The format `treeopt.schedule/1`."""

    schema_name: Literal["treeopt.schedule/1"] = Field(alias="schema")
    made_by: str | None = None
    drafter: trees.DrafterLine | None = None
    calibration: dict[str, str | int] | None = None
    configuration: dict[str, dict[str, Any]] | None = None
    plans: list[Annotated[NoneLine | StaticLine | trees.SizeLines, Field(discriminator="kind")]] = Field(min_length=1)
    cells: list[CellLine] = Field(min_length=1)


def load_planned(name_or_path: str | os.PathLike[str]) -> Planned:
    """A schedule from a file, or a tree or policy as `treeopt.files.trees.load_plan` gives it.

    Raises:
        TreeoptError: as `load_plan`.
    """
    found = trees.load_document(name_or_path)
    if isinstance(found, Document) and trees.schema_of_document(found) == SCHEMA:
        return _schedule_of(found)
    return trees.plan_of_document(found)


def load_plan_for(name_or_path: str | os.PathLike[str]) -> tuple[Planned, Drafter | None]:
    """A tree, policy or schedule with the drafter that it names."""
    plan = load_planned(name_or_path)
    file = plan.source.get("drafter") if plan.drafter else None
    if file is not None and not os.path.exists(file):
        what = f"there is no {file}, the drafter that {name_or_path} names"
        why = "a tree is valid for one drafter only; learning again gives another drafter"
        raise TreeoptError(Code.FILE_MISSING, what, why=why, fix="--drafter FILE, or put the drafter back in its place")
    return plan, None if file is None else load_drafter(file)


def _schedule_of(document: Document) -> Schedule:
    """The schedule of a document; E203 with every fault (at most 10) and its place."""
    content = check(document, ScheduleFile, SCHEMA)
    source = content.model_dump(include={"made_by", "calibration", "configuration"}, exclude_none=True)
    fields = trees.drafter_fields(content.drafter, document.path, source)
    faults: Faults = []
    plans: list[Plan] = []
    for i, line in enumerate(content.plans):
        try:
            found = trees.paths_faults(line.paths) if isinstance(line, StaticLine) else []
            faults += [(("plans", i, *where), what) for where, what in found]
            plans += [] if found else [_plan_of(line, fields.get("drafter", ""))]
        except TreeoptError as error:
            faults.append((("plans", i), error.what))
    for i, cell in enumerate(content.cells):
        if cell.plan >= len(content.plans):
            faults.append((("cells", i, "plan"), f"there is no plan {cell.plan}: the first is 0"))
        if (cell.low or 0.0) > (math.inf if cell.high is None else cell.high):
            faults.append((("cells", i, "low"), "low is above high"))
    used = {cell.plan for cell in content.cells}
    faults += [(("plans", i), "no cell has this plan") for i in range(len(content.plans)) if i not in used]
    if not faults:
        try:
            cells = [
                ScheduledPlan(plan=plans[cell.plan], **cell.model_dump(exclude={"plan"})) for cell in content.cells
            ]
            return Schedule(tuple(cells), source=fields["source"])
        except TreeoptError as error:
            faults = [(("cells",), error.what)]
    raise faults_error(document, SCHEMA, faults)


def _plan_of(line: NoneLine | StaticLine | trees.SizeLines, drafter: str) -> Plan:
    if isinstance(line, trees.SizeLines):
        return trees.policy_of(line, drafter=drafter)
    lines = line.paths if isinstance(line, StaticLine) else []
    values = [one.value for one in lines if one.value is not None]
    return Tree.from_paths([one.path for one in lines], values or None, drafter=drafter)


def save_schedule(schedule: Schedule, path: str | os.PathLike[str]) -> None:
    """Write a schedule as YAML; `load_planned` returns an equal one. An existing file is replaced."""
    write_marked(path, schedule_yaml(schedule, path), TREE)


def schedule_yaml(schedule: Schedule, path: str | os.PathLike[str] = "schedule.yaml") -> str:
    """The text of a schedule file that is to be written to `path`."""
    lines = ["# the plan of a step by the texts in progress and the cached tokens of the longest", f"schema: {SCHEMA}"]
    lines += entries(schedule.source, "made_by")
    if schedule.drafter:
        lines.append(trees.drafter_line(schedule.drafter, schedule.source, path))
    lines += [*entries(schedule.source, "calibration"), *stored_lines(schedule.source), "plans:"]
    for plan in schedule.plans:
        lines += _plan_lines(plan)
    lines += ["# a step takes the smallest batch and context that are as large as its own, else the largest", "cells:"]
    for cell in schedule.cells:
        figures = {name: getattr(cell, name) for name in _FIGURES}
        index = schedule.index(*cell.key)
        lines.append(f"- {flow_mapping({'batch': cell.batch, 'context': cell.context, 'plan': index, **figures})}")
    return "\n".join(lines) + "\n"


def _plan_lines(plan: Plan) -> Iterator[str]:
    if isinstance(plan, TreePolicy):
        yield from (f"- kind: {KINDS[1]}", f"  {trees.size_line(plan)}", f"  depth: {plan.depth}")
        if plan.size_cost:
            yield from ("  size_cost:", *(f"  {line}" for line in trees.cost_lines(plan)))
    elif plan.paths:
        yield from (f"- kind: {KINDS[0]}", "  paths:", *(f"  {line}" for line in trees.path_lines(plan)))
    else:
        yield "- kind: none"


GivenPlan = trees.GivenTree | TreePolicy | Schedule


def as_plan(tree: GivenPlan) -> Planned:
    """The plan: given as a record, as a name of a file or of `treeopt list`, or as a list of paths."""
    if isinstance(tree, (Tree, TreePolicy, Schedule)):
        return tree
    return load_planned(tree) if isinstance(tree, (str, os.PathLike)) else trees.as_tree(tree)


def as_plan_for(
    tree: GivenPlan | None, drafter: Drafter | str | os.PathLike[str] | None = None
) -> tuple[Planned, Drafter | None]:
    """The plan with the drafter that is given or, without one, that the tree's file names.

    Without a tree, the plan is the one that the drafter recommends; ValueError without both.
    """
    if isinstance(tree, (str, os.PathLike)) and drafter is None:
        return load_plan_for(tree)
    record = load_drafter(drafter) if isinstance(drafter, (str, os.PathLike)) else drafter
    if tree is not None:
        return as_plan(tree), record
    if record is None:
        what = "give a tree, or a drafter with the tree that it recommends (treeopt learn); heads alone are not enough"
        raise ValueError(what)
    return plan_of(record, os.fspath(drafter) if isinstance(drafter, (str, os.PathLike)) else ""), record


def plan_of(drafter: Drafter, file: str = "") -> Plan:
    """The plan that a drafter recommends; E223, which names its file, where it recommends none."""
    if drafter.plan is None:
        model = drafter.source.get("model")
        named = f"drafter {drafter.id}" + (f" of {model}" if model else "")
        what = f"{f'{file}, {named},' if file else named} recommends no tree, and none was given"
        fix = "give a tree too: treeopt generate --tree FILE, treeopt render FILE"
        raise TreeoptError(Code.DRAFTER_MISMATCH, what, why="treeopt learn stores one; calibrate does not", fix=fix)
    return drafter.plan
