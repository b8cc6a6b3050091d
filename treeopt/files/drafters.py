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
_KEYS_OF_0 = {
    "seen": "num_tokens",
    "transition": "ngram",
    "copied": "prompt_lookup",
    "outside": "other_logit",
    "odds": "calibration_map",
}  # in files written by 0.x
_MAX_PATHS = 1 << 16  # of a recommended tree
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
    table = drafter.ngram_table
    header: dict[str, Any] = {
        "schema": SCHEMA,
        "num_heads": drafter.num_heads,
        "top": drafter.top,
        "window": drafter.window,
        "num_tokens": None if table is None else table.num_tokens,
        "cache_prior": drafter.cache_prior,
        "voted": drafter.voted,
        "lm_head_levels": drafter.lm_head_levels,
        "top_logprobs": drafter.top_logprobs,
        "draft": drafter.draft,
        **({"draft_kind": drafter.draft_kind} if drafter.draft_kind != MODEL else {}),
        "levels": [_level_header(level) for level in drafter.levels],
        "plan": None if drafter.plan is None else _plan_header(drafter.plan),
        "source": dict(drafter.source),
        "id": drafter.id,
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
        found = _renamed(found) | {"levels": [_renamed(level) for level in found["levels"]]}
        header = of_json(DrafterHeader, found)
        table = NgramTable(**arrays, num_tokens=header.num_tokens) if header.num_tokens is not None else None
        fields = header.model_dump(exclude={"schema_name", "levels", "plan", "num_tokens", "id"})
        drafter = Drafter(header.levels, ngram_table=table, **fields)
        if header.plan is not None:
            drafter = dataclasses.replace(drafter, plan=_plan(header.plan, drafter.id, path))
    if drafter.id != header.id:
        raise TreeoptError(Code.FILE_INVALID, f"{path} was changed since it was written: its hash differs")
    return drafter


def _renamed(found: Mapping[str, Any]) -> dict[str, Any]:
    return {_KEYS_OF_0.get(name, name): value for name, value in dict(found).items()}


def _level_header(level: Level) -> dict[str, Any]:
    found = dataclasses.asdict(level)
    return found if level.confidence else {name: value for name, value in found.items() if name != "confidence"}


def _plan_header(plan: Plan) -> dict[str, Any]:
    kept = "paths", "values", "nodes", "depth", "size_cost", "path_tokens", "expected"
    kind = "static" if isinstance(plan, Tree) else "dynamic"
    return {"kind": kind, **{name: value for name, value in dataclasses.asdict(plan).items() if name in kept}}


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
