"""The result of a calibration, and the merging of shards and calibrations, without a model."""

from __future__ import annotations

import itertools
import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from treeopt.calibration import Calibration
from treeopt.defaults import DEFAULT_TOP_K, HEADS
from treeopt.errors import Code, TreeoptError, counted
from treeopt.facts import Column, Part, Table, percent, picked
from treeopt.files.calibrations import Contents, calibration_from, content_of, load_calibration
from treeopt.files.configurations import DEFAULTS
from treeopt.files.strict_yaml import of_json, reading, schema_of
from treeopt.files.tensors import read_arrays, write_arrays
from treeopt.optimize.build_report import reliability_text
from treeopt.optimize.chains import chain_parts, predict_chains
from treeopt.optimize.per_step import calibration_error
from treeopt.texts.prompts import Skipped, skipped_text

if TYPE_CHECKING:
    from treeopt.drafting.learn import Learned
    from treeopt.texts.encode import Text


@dataclass(frozen=True)
class CalibrationRun:
    """The result of `run_calibration`."""

    calibration: Calibration
    skipped: tuple[Skipped, ...]  # prompts that were left out
    answers_cut: int  # given answers that were cut at the token budget
    heads: int  # H; a drafter may have more levels
    learned: Learned | None = None  # with `learning`
    texts: tuple[Text, ...] = ()  # the prompts with their answers
    part: CalibrationShard | None = None  # with `shard`, what `treeopt.calibrate.results.save_shard` writes


_Parts = Sequence[tuple[str, "CalibrationShard"]]  # names of files, and shards
_SHOWN = 8  # missing shards that a message names
_SHOWN_RANKS = 4


def merge_calibrations(paths: Sequence[str | os.PathLike[str]]) -> CalibrationRun:
    """Join the shards of one run, or calibrations of the same settings.

    Shards give the calibration of the run without `shard`, byte for byte, in any order. A prompt that is in several
    calibrations counts once.

    Args:
        paths: files that `treeopt calibrate` wrote, all with `--shard` or all without.

    Raises:
        TreeoptError: E201 and E203 where a file is missing or invalid, E221 where settings differ, E224 where a shard
            is missing or given twice, or there are shards and calibrations.
        ValueError: where there is no path.

    Example:
        >>> import treeopt
        >>> from treeopt.calibrate.results import Shard, save_shard
        >>> for i in range(2):
        ...     run = treeopt.run_calibration(
        ...         "pocket", "pocket", ["import os", "def main():"], max_new_tokens=12, batch_size=1, shard=Shard(i, 2)
        ...     )
        ...     save_shard(run.part, f"part{i}.safetensors")
        >>> treeopt.merge_calibrations(["part1.safetensors", "part0.safetensors"]).calibration.sequences
        2
    """
    if not paths:
        raise ValueError("there is no calibration to merge")
    names = sorted(os.fspath(path) for path in paths)
    shards = [name for name in names if Path(name).exists() and schema_of(Path(name)) == SCHEMA]
    others = [name for name in names if name not in shards]
    if shards and others:
        load_calibration(others[0])  # a file that is missing or damaged is named as such
        what = f"{shards[0]} is a shard of a calibration, and {others[0]} is not"
        raise TreeoptError(Code.SHARDS_INCOMPLETE, what, fix="merge all shards of the run first")
    if shards:
        return merge_shards([(name, load_shard(name)) for name in names])
    whole = _merged(load_calibration(name) for name in names)
    return CalibrationRun(whole, (), 0, whole.num_heads if not whole.provenance.drafter_id else 0)


def merge_shards(parts: _Parts) -> CalibrationRun:
    """The calibration of the run that these shards, with the names of their files, belong to: E221, E224."""
    _check_same(parts)
    _check_whole(parts)
    ordered = sorted((part for _, part in parts), key=lambda part: part.shard.index)
    skipped = (*ordered[0].skipped, *(one for part in ordered for one in part.turns_skipped))
    calibration = _merged(part.calibration for part in ordered)
    return CalibrationRun(calibration, skipped, ordered[0].answers_cut, ordered[0].heads)


def _merged(calibrations: Iterable[Calibration]) -> Calibration:
    first, *others = calibrations
    return first.merge(*others)


def _check_same(parts: _Parts) -> None:
    """Raise E221, with the settings that differ, unless all shards are of one run; E224 where n of i/n differs."""
    name, first = parts[0]
    for other, part in parts[1:]:
        one, two = _settings(first), _settings(part)
        differing = [key for key in dict.fromkeys([*one, *two]) if one.get(key) != two.get(key)]
        if differing:
            what = f"the shards {name} and {other} differ in {', '.join(differing)}"
            at = "\n".join(f"{key}: {json.dumps(one.get(key))} and {json.dumps(two.get(key))}" for key in differing)
            fix = "treeopt calibrate --shard again, with the same settings for all"
            raise TreeoptError(Code.CALIBRATION_MISMATCH, what, at=at, fix=fix)
        if part.shard.count != first.shard.count:
            what = f"{name} is one of {first.shard.count} shards, and {other} one of {part.shard.count}"
            raise TreeoptError(Code.SHARDS_INCOMPLETE, what, fix="the same n in --shard i/n for all")


def _check_whole(parts: _Parts) -> None:
    """Raise E224 unless every shard is there once."""
    count = parts[0][1].shard.count
    found = Counter(part.shard.index for _, part in parts)
    twice = next((index for index in sorted(found) if found[index] > 1), None)
    if twice is not None:
        names = [name for name, part in parts if part.shard.index == twice]
        what = f"shard {twice}/{count} is given twice: {names[0]} and {names[1]}"
        raise TreeoptError(Code.SHARDS_INCOMPLETE, what, fix=f"leave out {names[1]}")
    number = count - len(found)
    if number:
        # Only those that are shown: the number of shards in a file may be any.
        missing = list(itertools.islice((str(Shard(i, count)) for i in range(count) if i not in found), _SHOWN))
        shown = ", ".join(missing) + (f" and {number - _SHOWN} more" if number > _SHOWN else "")
        what = f"{len(parts)} of {count} shards are given; {shown} {'is' if number == 1 else 'are'} missing"
        fix = f"the same treeopt calibrate command with --shard {missing[0]}"
        raise TreeoptError(Code.SHARDS_INCOMPLETE, what, fix=fix)


def _settings(part: CalibrationShard) -> Mapping[str, Any]:
    """All that is equal in the shards of one run: settings, the number of batches, and the options that files store."""
    found = {**part.settings, "batches": part.batches}
    for section, options in part.calibration.provenance.configuration.items():
        kind = " (default)" if section == DEFAULTS else ""
        found |= {f"--{name}{kind}": value for name, value in options.items()}
    return found


def run_parts(run: CalibrationRun, *, drafts: bool = False) -> Iterator[Part]:
    """What was traced; of a learned drafter its text, and where a model `drafts` its chains."""
    if run.learned is not None:
        yield from run.learned.lines()
    if drafts:
        yield from chain_parts(predict_chains(run.calibration, 0.0))
    yield _accuracy(run)
    yield from _counts(run)
    yield skipped_text(run.skipped)
    if run.answers_cut:
        yield f"{run.answers_cut} given answers were cut at --max-new-tokens"
    if run.calibration.steps is not None:
        yield reliability_text(run.calibration)


def run_as_dict(run: CalibrationRun) -> dict[str, Any]:
    """What programs read of it."""
    calibration, learned = run.calibration, run.learned
    top_k = min(DEFAULT_TOP_K, calibration.top_k)
    return {
        **picked(run, "heads", "answers_cut"),
        **picked(calibration, "positions", "temperature", "trials"),
        "levels": calibration.num_heads,
        "prompts": calibration.sequences,
        "texts_distinct": calibration.distinct,
        "skipped": len(run.skipped),
        "skipped_prompts": run.skipped,
        "top_k": top_k,
        "target_ranks": None if calibration.target is None else calibration.target.ranks,
        "accuracy": calibration.accuracy[:, :top_k],
        "standard_error_top_1": calibration.standard_error(1)[:, 0],
        "drafter": calibration.provenance.drafter_id or HEADS,
        "learned": None if learned is None else learned.as_dict(),
        "calibration_error": None if calibration.steps is None else calibration_error(calibration),
    }


def _accuracy(run: CalibrationRun) -> Table:
    """The accuracy of each head or level, by rank; the first with its error."""
    trials, accuracy = run.calibration.trials.tolist(), run.calibration.accuracy[:, :DEFAULT_TOP_K]
    top_k = accuracy.shape[1]
    errors = run.calibration.standard_error(1)[:, 0]

    def first(level: int) -> str:
        error = f" ± {errors[level]:.1%}" if math.isfinite(errors[level]) else ""
        return f"{accuracy[level, 0]:.1%}{error}"

    def later(rank: int) -> Column:
        return Column(f"rank {rank}", lambda level: accuracy[level, rank] if trials[level] else None, percent)

    columns = (
        Column("", lambda level: f"head {level + 1}" if level < run.heads else f"level {level + 1}"),
        Column("rank 0", lambda level: first(level) if trials[level] else None),
        *map(later, range(1, min(_SHOWN_RANKS, top_k))),
        Column(f"top-{top_k}", lambda level: accuracy[level].sum() if trials[level] else None, percent),
        Column("trials", lambda level: trials[level]),
    )
    return Table(columns, range(len(trials)))


def _counts(run: CalibrationRun) -> Iterator[str]:
    """What the accuracies are of."""
    calibration = run.calibration
    clustered = any(map(math.isfinite, calibration.standard_error(1)[:, 0].tolist()))
    yield (
        f"{counted(calibration.sequences, 'text')}, {calibration.distinct} distinct, {calibration.positions} positions"
        "; accuracy by rank" + ("; ± one standard error, clustered by text" if clustered else "")
    )
    if calibration.target is not None:
        yield (
            f"sampled at temperature {calibration.temperature:g}, with the target's probabilities of "
            f"{calibration.target.ranks} candidates per {'head' if run.heads == calibration.num_heads else 'level'}"
        )


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
