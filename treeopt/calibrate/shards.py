"""Shard files: the traces of some of a run's batches, which `treeopt merge` joins."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from treeopt.calibration import Calibration
from treeopt.files.calibrations import Contents, calibration_from, content_of
from treeopt.files.strict_yaml import of_json, reading
from treeopt.files.tensors import read_arrays, write_arrays
from treeopt.texts.prompts import Skipped

SCHEMA = "treeopt.shard/1"
_SAME, _LEFT_OUT = ("batches", "settings", "heads", "answers_cut"), ("skipped", "turns_skipped")


@dataclass(frozen=True)
class Shard:
    """One of `count` parts of a run; of its batches, numbered from 0, it has those with number % count == index.

    Raises:
        ValueError: unless 0 <= index < count.
    """

    index: int
    count: int

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"{self.count} shards: a run has at least one, and they are counted from 0")
        if not 0 <= self.index < self.count:
            raise ValueError(f"shard {self.index} of {self.count}: shards are counted from 0 to {self.count - 1}")

    def has(self, batch: int) -> bool:
        """Whether the batch belongs to this shard."""
        return batch % self.count == self.index

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"


@dataclass(frozen=True, eq=False)
class CalibrationShard:
    """The traces of one shard of a run."""

    calibration: Calibration  # the traces of its texts; there may be none
    shard: Shard  # which batches it has
    batches: int  # number of batches of the whole run
    settings: Mapping[str, Any]  # all that the traces of the run depend on; equal in all shards of the run
    heads: int  # H; a drafter may have more levels
    answers_cut: int = 0  # number of given answers of the whole run that were cut at the token budget
    skipped: tuple[Skipped, ...] = ()  # prompts of the whole run that were left out
    turns_skipped: tuple[Skipped, ...] = ()  # later turns of this shard's dialogues that were left out


class _ShardHeader(Contents):
    schema_name: Literal["treeopt.shard/1"] = Field(alias="schema")
    shard: int
    shards: int
    batches: int
    settings: dict[str, Any]
    heads: int
    answers_cut: int
    skipped: tuple[Skipped, ...]
    turns_skipped: tuple[Skipped, ...]


def save_shard(part: CalibrationShard, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """Write a shard; equal content gives equal bytes."""
    arrays, header = content_of(part.calibration, path)
    header |= {
        **{"schema": SCHEMA, "shard": part.shard.index, "shards": part.shard.count},
        **{name: getattr(part, name) for name in _SAME},
        **{name: list(map(vars, getattr(part, name))) for name in _LEFT_OUT},
    }
    write_arrays(path, arrays, header, overwrite=overwrite)


def load_shard(path: str | os.PathLike[str]) -> CalibrationShard:
    arrays, found = read_arrays(path, SCHEMA)
    with reading(path, "shard of a calibration"):
        header = of_json(_ShardHeader, found)
        more: dict[str, Any] = {name: getattr(header, name) for name in (*_SAME, *_LEFT_OUT)}
        return CalibrationShard(calibration_from(arrays, header, path), Shard(header.shard, header.shards), **more)
