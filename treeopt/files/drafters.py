"""Drafter files: fitted numbers and the n-gram table as safetensors."""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from treeopt.defaults import MODEL
from treeopt.drafter import Drafter, Level
from treeopt.errors import Code, TreeoptError
from treeopt.files.read import check_there
from treeopt.files.strict_yaml import Schema, of_json, reading
from treeopt.files.tensors import read_arrays, write_arrays
from treeopt.ngram_table import NgramTable
from treeopt.policy import Plan, TreePolicy
from treeopt.tree import Tree

SCHEMA = "treeopt.drafter/1"
_MAX_PATHS = 1 << 16  # of a recommended tree
_OF_PLAN = ("paths", "values", "nodes", "depth", "size_cost", "path_tokens", "expected")  # of its fields
_KINDS = {"static": Tree, "dynamic": TreePolicy}


class DrafterHeader(Schema):
    """The header of a drafter file; its plan has the fields of `Tree` or `TreePolicy`."""

    schema_name: Literal["treeopt.drafter/1"] = Field(alias="schema")
    num_heads: int
    top: int
    window: int
    num_tokens: int | None
    cache_prior: float = 1.0
    voted: int = 0
    lm_head_levels: int = 0
    top_logprobs: int = 0
    draft: str = ""
    draft_kind: str = MODEL
    levels: tuple[Level, ...]
    plan: dict[str, Any] | None = None
    source: dict[str, Any]
    id: str


class _Plan(Schema):
    plan: Tree | TreePolicy


def save_drafter(drafter: Drafter, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """Write a drafter; equal content gives equal bytes.

    Raises:
        TreeoptError: E202 where the file exists and `overwrite` is off.
    """
    table, plan = drafter.ngram_table, None
    if drafter.plan is not None:
        kind = "static" if isinstance(drafter.plan, Tree) else "dynamic"
        fields = dataclasses.asdict(drafter.plan).items()
        plan = {"kind": kind, **{name: value for name, value in fields if name in _OF_PLAN}}
    header: dict[str, Any] = {
        "schema": SCHEMA,
        **{name: getattr(drafter, name) for name in DrafterHeader.model_fields if hasattr(drafter, name)},
        "num_tokens": None if table is None else table.num_tokens,
        "levels": [dataclasses.asdict(level) for level in drafter.levels],
        "plan": plan,
        "source": dict(drafter.source),
    }
    write_arrays(path, {} if table is None else table.arrays(), header, overwrite=overwrite)


def load_drafter(path: str | os.PathLike[str]) -> Drafter:
    """Read a drafter.

    Raises:
        TreeoptError: E201 where it is missing, with the command that makes it; E203 or E222 where it is invalid, E103
            where its plan is.
    """
    learn = f"treeopt learn --model MODEL [--heads HEADS] --prompts PROMPTS -o {path}"
    check_there(path, f"drafter {path}", why="a drafter is its n-gram table and fitted numbers", fix=learn)
    arrays, found = read_arrays(path, SCHEMA)
    with reading(path, "drafter"):
        header = of_json(DrafterHeader, found)
        table = NgramTable(**arrays, num_tokens=header.num_tokens) if header.num_tokens is not None else None
        fields = header.model_dump(exclude={"schema_name", "levels", "plan", "num_tokens", "id"})
        drafter = Drafter(header.levels, ngram_table=table, **fields)
        if header.plan is not None:
            drafter = dataclasses.replace(drafter, plan=_plan(header.plan, drafter.id, path))
    if drafter.id != header.id:
        raise TreeoptError(Code.FILE_INVALID, f"{path} was changed since it was written: its hash differs")
    return drafter


def _plan(given: Mapping[str, Any], drafter_id: str, path: str | os.PathLike[str]) -> Plan:
    """The plan of a drafter that was read from `path`."""
    fields = {name: value for name, value in given.items() if name != "kind"}
    if len(fields.get("paths") or ()) > _MAX_PATHS:
        raise ValueError(f"its plan has more than {_MAX_PATHS:,} paths")
    source = {"drafter": os.fspath(path)}
    added = {"expected": fields.get("expected") or None, "drafter": drafter_id, "source": source}
    plan = of_json(_Plan, {"plan": {**fields, **added}}).plan
    if not isinstance(plan, _KINDS[given["kind"]]):
        raise ValueError(f"its plan is not {given['kind']}")
    return plan
