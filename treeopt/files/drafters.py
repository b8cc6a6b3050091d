"""Drafter files: fitted numbers and the n-gram table as safetensors."""

from __future__ import annotations

import dataclasses
import os
from typing import Any, Literal

from pydantic import AliasChoices, Field

from treeopt.drafter import HEADS, HEADS_NGRAM, Drafter, Level, NgramTable
from treeopt.errors import Code, TreeoptError
from treeopt.files.schemas import Schema, reading
from treeopt.files.tensors import read_arrays, write_arrays

SCHEMA = "treeopt.drafter/1"
DEFAULT_FILE = "drafter.safetensors"
_NAMES_OF_0: dict[str | bytes, str] = {"plain": HEADS, "corrected": HEADS_NGRAM}  # values of --drafter in 0.x


class LevelHeader(Schema):
    """`treeopt.drafter.Level` in a file; the second name of a key is that of files written by 0.x."""

    head: float
    prior: float
    ngram: float = Field(validation_alias=AliasChoices("ngram", "transition"))
    prompt_lookup: list[float] = Field(validation_alias=AliasChoices("prompt_lookup", "copied"))
    other_logit: float = Field(validation_alias=AliasChoices("other_logit", "outside"))
    calibration_map: list[list[float]] = Field(validation_alias=AliasChoices("calibration_map", "odds"))


class Header(Schema):
    """The header of a drafter file. Files written by 0.x have the key `seen` for `num_tokens`."""

    schema_name: Literal["treeopt.drafter/1"] = Field(alias="schema")
    num_heads: int
    top: int
    window: int
    num_tokens: int | None = Field(validation_alias=AliasChoices("num_tokens", "seen"))
    levels: list[LevelHeader]
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
        "levels": [dataclasses.asdict(level) for level in drafter.levels],
        "source": dict(drafter.source),
        "id": drafter.id,
    }
    write_arrays(path, {} if table is None else table.arrays(), header, overwrite=overwrite)


def load_drafter(path: str | os.PathLike[str]) -> Drafter:
    """Read a drafter.

    Raises:
        TreeoptError: E201 where it is missing, with the command that makes it; E203 or E222 where it is invalid.
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
        raise TreeoptError(Code.FILE_INVALID, f"{path} was changed since it was written: its hash differs")
    return drafter


def _level(level: LevelHeader) -> Level:
    pairs = tuple((float(a), float(b)) for a, b in level.calibration_map)
    return Level(level.head, level.prior, level.ngram, tuple(level.prompt_lookup), level.other_logit, pairs)
