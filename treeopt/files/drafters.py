"""Drafter files: fitted numbers and the n-gram table as safetensors."""

from __future__ import annotations

import dataclasses
import os
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, Field

from treeopt.defaults import HEADS, HEADS_NGRAM
from treeopt.drafter import Drafter, Level
from treeopt.errors import Code, TreeoptError
from treeopt.files.strict_yaml import Schema, reading
from treeopt.files.tensors import read_arrays, write_arrays
from treeopt.ngram_table import NgramTable
from treeopt.policy import Plan, PolicyExpected, TreePolicy
from treeopt.tree import Expected, Tree

SCHEMA = "treeopt.drafter/1"
_MAX_PATHS = 1 << 16  # of a recommended tree
_NAMES_OF_0: dict[str | bytes, str] = {"plain": HEADS, "corrected": HEADS_NGRAM}  # values of --drafter in 0.x


class LevelHeader(Schema):
    """`treeopt.drafter.Level` in a file; the second name of a key is that of files written by 0.x."""

    head: float
    prior: float
    ngram: float = Field(validation_alias=AliasChoices("ngram", "transition"))
    prompt_lookup: list[float] = Field(validation_alias=AliasChoices("prompt_lookup", "copied"))
    other_logit: float = Field(validation_alias=AliasChoices("other_logit", "outside"))
    calibration_map: list[list[float]] = Field(validation_alias=AliasChoices("calibration_map", "odds"))
    cache: list[float] = Field(default_factory=lambda: list(Level().cache))


class TreeHeader(Schema):
    """The recommended tree in a file."""

    kind: Literal["static"]
    paths: list[list[int]] = Field(max_length=_MAX_PATHS)
    values: list[float] | None = None
    expected: dict[str, float | int | None] | None


class PolicyHeader(Schema):
    """The recommended policy in a file."""

    kind: Literal["dynamic"]
    nodes: int
    depth: int
    size_cost: list[Annotated[list[int | float], Field(min_length=2, max_length=2)]]
    expected: dict[str, float | None] | None


class DrafterHeader(Schema):
    """The header of a drafter file. Files written by 0.x have the key `seen` for `num_tokens`."""

    schema_name: Literal["treeopt.drafter/1"] = Field(alias="schema")
    num_heads: int
    top: int
    window: int
    num_tokens: int | None = Field(validation_alias=AliasChoices("num_tokens", "seen"))
    cache_prior: float = 1.0
    voted: int = 0
    lm_head_levels: int = 0
    top_logprobs: int = 0
    draft: str = ""
    levels: list[LevelHeader]
    plan: Annotated[TreeHeader | PolicyHeader, Field(discriminator="kind")] | None = None
    source: dict[str, Any]
    id: str


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
        "levels": [dataclasses.asdict(level) for level in drafter.levels],
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
    if not os.path.exists(path):
        learn = f"treeopt learn --model MODEL [--heads HEADS] --prompts PROMPTS -o {path}"
        name = _NAMES_OF_0.get(os.fspath(path))
        raise TreeoptError(
            Code.FILE_MISSING,
            f"there is no drafter {path}",
            why="a drafter is its n-gram table and fitted numbers",
            fix=f"--drafter {name}, which was called {path}" if name else learn,
        )
    arrays, found = read_arrays(path, SCHEMA)
    with reading(path, "drafter"):
        header = DrafterHeader.model_validate(found)
        table = NgramTable(**arrays, num_tokens=header.num_tokens) if header.num_tokens is not None else None
        drafter = Drafter(
            tuple(_level(level) for level in header.levels),
            header.num_heads,
            header.top,
            header.window,
            table,
            header.source,
            header.cache_prior,
            header.voted,
            header.lm_head_levels,
            header.top_logprobs,
            header.draft,
        )
        drafter = dataclasses.replace(drafter, plan=_plan(header.plan, drafter.id, path))
    if drafter.id != header.id:
        raise TreeoptError(Code.FILE_INVALID, f"{path} was changed since it was written: its hash differs")
    return drafter


def _level(level: LevelHeader) -> Level:
    pairs = tuple((float(a), float(b)) for a, b in level.calibration_map)
    lookup, cache = tuple(level.prompt_lookup), tuple(level.cache)
    return Level(level.head, level.prior, level.ngram, lookup, level.other_logit, pairs, cache)


def _plan_header(plan: Plan) -> dict[str, Any]:
    expected = None if plan.expected is None else dataclasses.asdict(plan.expected)
    if isinstance(plan, Tree):
        paths, values = [list(path) for path in plan.paths], None if plan.values is None else list(plan.values)
        return {"kind": "static", "paths": paths, "values": values, "expected": expected}
    sizes = [list(pair) for pair in plan.size_cost]
    return {"kind": "dynamic", "nodes": plan.nodes, "depth": plan.depth, "size_cost": sizes, "expected": expected}


def _plan(header: TreeHeader | PolicyHeader | None, drafter_id: str, path: str | os.PathLike[str]) -> Plan | None:
    """The plan of a drafter that was read from `path`."""
    if header is None:
        return None
    source = {"drafter": os.fspath(path)}
    given: dict[str, Any] = header.expected or {}
    if isinstance(header, TreeHeader):
        expected = Expected(**given) if given else None
        return Tree.from_paths(header.paths, header.values, drafter=drafter_id, expected=expected, source=source)
    if not all(isinstance(size, int) for size, _ in header.size_cost):
        raise ValueError("the sizes in size_cost are not integers")
    sizes = tuple((int(size), float(cost)) for size, cost in header.size_cost)
    found = PolicyExpected(**given) if given else None
    return TreePolicy(header.nodes, header.depth, drafter_id, sizes, expected=found, source=source)
