"""Drafter files: fitted numbers and the table of transitions as safetensors."""

from __future__ import annotations

import dataclasses
import os
from typing import Any, Literal

from pydantic import Field

from treeopt.drafter import Drafter, Level, NgramTable
from treeopt.errors import Code, TreeoptError
from treeopt.files.schemas import Schema, reading
from treeopt.files.tensors import read_arrays, write_arrays

SCHEMA = "treeopt.drafter/1"
DEFAULT_FILE = "drafter.safetensors"


class LevelHeader(Schema):
    """`treeopt.drafter.Level` as it stands in a file."""

    head: float
    prior: float
    ngram: float
    prompt_lookup: list[float]
    other_logit: float
    calibration_map: list[list[float]]


class Header(Schema):
    """What a drafter file holds beside its arrays."""

    schema_name: Literal["treeopt.drafter/1"] = Field(alias="schema")
    num_heads: int
    top: int
    window: int
    num_tokens: int | None
    levels: list[LevelHeader]
    source: dict[str, Any]
    id: str


def save_drafter(drafter: Drafter, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """Write a drafter; equal content gives equal bytes.

    Raises:
        TreeoptError: E202 where the file exists and `overwrite` is off: drafters take long to learn.
    """
    table = drafter.ngram_table
    header: dict[str, Any] = {
        "schema": SCHEMA,
        "num_heads": drafter.num_heads,
        "top": drafter.top,
        "window": drafter.window,
        "num_tokens": None if table is None else table.num_tokens,
        "levels": [dataclasses.asdict(level) for level in drafter.levels],
        "source": dict(drafter.source),
        "id": drafter.id,
    }
    write_arrays(path, {} if table is None else table.arrays(), header, overwrite=overwrite)


def load_drafter(path: str | os.PathLike[str]) -> Drafter:
    """Read a drafter.

    Raises:
        TreeoptError: E201 where it is missing, with the command that makes it; E203 or E222 where it is not one.
    """
    if not os.path.exists(path):
        raise TreeoptError(
            Code.FILE_MISSING,
            f"there is no drafter {path}",
            why="corrected drafts need the transitions and numbers that were learned",
            fix=f"treeopt learn --heads HEADS_FOLDER --prompts PROMPTS -o {path}",
        )
    arrays, found = read_arrays(path, SCHEMA)
    with reading(path, "drafter"):
        header = Header.model_validate(found)
        table = NgramTable(**arrays, num_tokens=header.num_tokens) if header.num_tokens is not None else None
        drafter = Drafter(
            tuple(_level(level) for level in header.levels),
            header.num_heads,
            header.top,
            header.window,
            table,
            header.source,
        )
    if drafter.id != header.id:
        raise TreeoptError(Code.FILE_INVALID, f"{path} was changed since it was written: its hash is another")
    return drafter


def _level(level: LevelHeader) -> Level:
    pairs = tuple((float(a), float(b)) for a, b in level.calibration_map)
    return Level(level.head, level.prior, level.ngram, tuple(level.prompt_lookup), level.other_logit, pairs)
