"""Shard files: the traces, or the answers, of some of a run's batches, which `treeopt merge` joins."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from treeopt.calibration import Calibration
from treeopt.files.calibrations import Contents, calibration_from, content_of
from treeopt.files.configurations import KEY
from treeopt.files.strict_yaml import Schema, of_json, reading
from treeopt.files.tensors import read_arrays, write_arrays
from treeopt.runs.work import ROWS, Chunk, chunk_name, rows_fault

SCHEMA = "treeopt.shard/1"
ANSWERS_SCHEMA = "treeopt.answers/1"


def answers_name(batch: int) -> str:
    """The name of the chunk with the answers of a batch."""
    return chunk_name("answers", batch)


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
    """The traces of one shard of a run.

    Args:
        calibration: the traces of its texts; there may be none.
        shard: which batches it has.
        batches: number of batches of the whole run.
        settings: all that the traces of the run depend on; equal in all shards of the run.
        heads: H; a drafter may have more levels.
        answers_cut: number of given answers of the whole run that were cut at the token budget.
        skipped: prompts of the whole run that were left out, in the fields of `treeopt.texts.prompts.Skipped`.
        turns_skipped: later turns of this shard's dialogues that were left out.
    """

    calibration: Calibration
    shard: Shard
    batches: int
    settings: Mapping[str, Any]
    heads: int
    answers_cut: int = 0
    skipped: tuple[Mapping[str, Any], ...] = field(default=())
    turns_skipped: tuple[Mapping[str, Any], ...] = field(default=())


@dataclass(frozen=True, eq=False)
class AnswerShard:
    """The answers of one shard of a run that learns a drafter.

    Args:
        shard: which batches it has.
        batches: number of batches of the whole run.
        settings: all that the answers and the rest of the run depend on; equal in all shards of the run.
        chunks: the answers of each batch of the shard, by the name that `answers_name` gives its number.
        configuration: of the command that writes the file; none outside of commands.

    Raises:
        ValueError: unless there are the chunks of all batches of the shard, and no others.
    """

    shard: Shard
    batches: int
    settings: Mapping[str, Any]
    chunks: Mapping[str, Chunk]
    configuration: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        numbers = range(self.shard.index, self.batches, self.shard.count)
        if len(numbers) != len(self.chunks):  # compared first, as the number of batches in a file may be any
            raise ValueError(f"{len(self.chunks)} batches; shard {self.shard} of {self.batches} has {len(numbers)}")
        missing = next((name for name in map(answers_name, numbers) if name not in self.chunks), None)
        if missing is not None:
            raise ValueError(f"there is no {missing}, a batch of shard {self.shard}")


class _ShardPart(Schema):
    shard: int
    shards: int
    batches: int
    settings: dict[str, Any]


class _AnswerHeader(_ShardPart):
    schema_name: Literal["treeopt.answers/1"] = Field(alias="schema")
    chunks: dict[Annotated[str, Field(pattern=r"^answers-[0-9]{6,}$")], dict[str, Any]]  # names of files in `fill_work`
    configuration: dict[str, dict[str, Any]] = Field(default_factory=dict)


class _SkippedHeader(Schema):
    prompt_id: str
    tokens: int
    reason: str


class _ShardHeader(Contents, _ShardPart):
    schema_name: Literal["treeopt.shard/1"] = Field(alias="schema")
    heads: int
    answers_cut: int
    skipped: list[_SkippedHeader]
    turns_skipped: list[_SkippedHeader]


def save_shard(part: CalibrationShard, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """Write a shard; equal content gives equal bytes."""
    arrays, header = content_of(part.calibration, path)
    header |= {
        **_shared(part, SCHEMA),
        **{name: getattr(part, name) for name in ("heads", "answers_cut")},
        **{name: list(map(dict, getattr(part, name))) for name in ("skipped", "turns_skipped")},
    }
    write_arrays(path, arrays, header, overwrite=overwrite)


def _shared(part: CalibrationShard | AnswerShard, schema: str) -> dict[str, Any]:
    place = {"shard": part.shard.index, "shards": part.shard.count, "batches": part.batches}
    return {"schema": schema, **place, "settings": dict(part.settings)}


def load_shard(path: str | os.PathLike[str]) -> CalibrationShard:
    arrays, found = read_arrays(path, SCHEMA)
    with reading(path, "shard of a calibration"):
        header = of_json(_ShardHeader, found)
        return CalibrationShard(
            calibration=calibration_from(arrays, header, path),
            shard=Shard(header.shard, header.shards),
            batches=header.batches,
            settings=header.settings,
            heads=header.heads,
            answers_cut=header.answers_cut,
            skipped=tuple(one.model_dump() for one in header.skipped),
            turns_skipped=tuple(one.model_dump() for one in header.turns_skipped),
        )


def save_answers(part: AnswerShard, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """Write a shard of answers; equal content gives equal bytes."""
    header = {
        **_shared(part, ANSWERS_SCHEMA),
        "chunks": {name: dict(data) for name, (_, data) in part.chunks.items()},
        **({KEY: part.configuration} if part.configuration else {}),
    }
    arrays = {f"{name}/{key}": array for name, (found, _) in part.chunks.items() for key, array in found.items()}
    write_arrays(path, arrays, header, overwrite=overwrite)


def load_answers(path: str | os.PathLike[str]) -> AnswerShard:
    arrays, found = read_arrays(path, ANSWERS_SCHEMA)
    with reading(path, "shard of answers"):
        header = of_json(_AnswerHeader, found)
        chunks = {name: ({key: arrays[f"{name}/{key}"] for key in ROWS}, data) for name, data in header.chunks.items()}
        fault = next(filter(None, (rows_fault(rows) for rows, _ in chunks.values())), "")
        if fault:
            raise ValueError(fault)
        shard = Shard(header.shard, header.shards)
        return AnswerShard(shard, header.batches, header.settings, chunks, header.configuration)
