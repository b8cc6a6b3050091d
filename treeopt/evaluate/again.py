"""Compares a file with what its command makes again: equal, equal but for seconds, within a tolerance, or different."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from treeopt.errors import Code, TreeoptError
from treeopt.evaluate.comparison import FASTEST
from treeopt.files.calibrations import load_calibration
from treeopt.files.configurations import KEY, MADE_BY
from treeopt.files.parts import Place, parts_of

Verdict = Literal["identical", "equal", "within", "differs"]
Kind = Literal["result", "seconds", "environment", "name"]
STANDARD_ERRORS = 1.96  # of a normal 95 % interval
ROUNDING = 1e-5  # relative; of figures without a model, in files with six digits and more

_NUMBERS = (int, float)  # in files 1 may be 1.0, rounded
_ENVIRONMENT = {"made_by", MADE_BY, "versions", "device", "dtype", "threads", "attention"}
_NAMES = {"output", "csv", "chart", "command", "files", "file", "work", "adapter"}
# Parts that are measured in seconds, or chosen by them, by the command that measures.
_SPEEDS = {"tokens_per_second", "prefill_seconds", "overhead", "speedup", "speedup_vs_autoregressive", "quartiles"}
_SPEEDS |= {f"{name}_{end}" for name in ("tokens_per_second", "speedup") for end in ("low", "high")} | {"warnings"}
_TIMED = {
    "validate": _SPEEDS,
    "compare": {*_SPEEDS, "recommended"},
    "generate": _SPEEDS,
    "demo": _SPEEDS,
    "calibrate": {"seconds"},
    "learn": {"seconds", "plan", "recommended", "cost_ratio"}
    | {"tokens_per_second", "speedup", "replayed_speedup", "best_drafts", "best_replayed_drafts"},
    "profile": {"seconds", "low", "high", "drafting"},
}
_LINES = {".svg", ".dot", ".html"}  # formats whose lines are compared, and no numbers in them
_MODEL_FREE = {"build", "curve", "plan", "compile", "render", "export", "import", "lint", "merge", "report"}


@dataclass(frozen=True)
class Difference:
    """One part that differs.

    Args:
        place: where, with dots: `provenance.made_by.torch`.
        kind: what it is a part of: the result, seconds, the environment, or names of files and options.
        old: the file's; None where it has no such part.
        new: that of the new file.
    """

    place: str
    kind: Kind
    old: Any
    new: Any


@dataclass(frozen=True)
class Check:
    """A figure under a tolerance: |new - old| <= limit."""

    name: str
    old: float
    new: float
    limit: float

    @property
    def holds(self) -> bool:
        return abs(self.new - self.old) <= self.limit


@dataclass(frozen=True)
class Comparison:
    """How a file compares with what its command made again.

    Args:
        verdict: `identical` bytes; `equal` but for seconds, names and the environment; `within` the tolerance, which
            counts in another environment alone; or `differs`.
        differences: every part that differs.
        rule: the tolerance in words; empty where none was needed, or there is none.
        checks: the figures under the tolerance.
    """

    verdict: Verdict
    differences: tuple[Difference, ...] = ()
    rule: str = ""
    checks: tuple[Check, ...] = ()

    def of(self, kind: Kind) -> list[Difference]:
        """The differences of a kind."""
        return [one for one in self.differences if one.kind == kind]


def compare_files(old: Path, new: Path, command: str) -> Comparison:
    """Compare a file with the one that its command made again from the same inputs.

    On one machine, which is one with equal versions, device, precision and threads, the results must be equal. In
    another environment there is a tolerance; see `_tolerance`.

    Args:
        old: the file, or a folder of heads.
        new: what was made again.
        command: of both, without the name of the program.

    Raises:
        TreeoptError: E203 where one cannot be read, E207 where they are of other prompts, such as those of a set on
            the hub that has changed.
    """
    if old.is_file() and new.is_file() and old.read_bytes() == new.read_bytes():
        return Comparison("identical")
    one, other = parts_of(old), parts_of(new)
    _check_prompts(old, one, other)
    found = tuple(_differences(one, other, command))
    if not found and old.is_dir():
        return Comparison("identical")
    results = [each for each in found if each.kind == "result"]
    if not results:
        return Comparison("equal", found)
    if not any(each.kind == "environment" for each in found):
        return Comparison("differs", found)
    rule, checks, holds = _tolerance(old, new, one, other, command, results)
    return Comparison("within" if holds else "differs", found, rule, checks)


def _check_prompts(file: Path, old: Mapping[Place, Any], new: Mapping[Place, Any]) -> None:
    """Raise E207 where the SHA-256 of the prompts of two files differ."""
    first, second = ({str(place[-1])[:12] for place in parts if "prompts" in place[:-1]} for parts in (old, new))
    if first and second and first != second:
        at = f"sha256 {', '.join(sorted(second))}, was {', '.join(sorted(first))}"
        what = f"{file} is of other prompts than its command reads now"
        raise TreeoptError(Code.INPUT_CHANGED, what, at=at, fix="the prompts that it was made from")


def _differences(old: Mapping[Place, Any], new: Mapping[Place, Any], command: str) -> Iterator[Difference]:
    """The parts that differ, in the order of the file."""
    timed = _TIMED.get(command, set())
    by_seconds = {
        place[:-1]
        for parts in (old, new)
        for place, value in parts.items()
        if command == "compare" and place[-1] == "method" and str(value).endswith(FASTEST)
    }
    for place in dict.fromkeys([*old, *new]):
        one, other = old.get(place), new.get(place)
        if (place in old) != (place in new) or not _equal(one, other):
            chosen = any(place[:length] in by_seconds for length in range(1, len(place)))
            yield Difference(".".join(map(str, place)), "seconds" if chosen else _kind(place, timed), one, other)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    return type(one) is type(other) and bool(one == other)


def _kind(place: Place, timed: set[str]) -> Kind:
    if place[0] == KEY:
        return "environment" if MADE_BY in place else "name"
    if _ENVIRONMENT & set(place):
        return "environment"
    if timed & set(place):
        return "seconds"
    named = place[-1] in _NAMES or place == ("provenance", "drafter") or place[0] in _NAMES
    return "name" if named else "result"


def _tolerance(
    old: Path, new: Path, one: Mapping[Place, Any], other: Mapping[Place, Any], command: str, results: list[Difference]
) -> tuple[str, tuple[Check, ...], bool]:
    """The tolerance across environments in words, its figures, and whether they hold.

    Devices and versions round differently, which changes the greedy choice between two tokens of nearly equal logits,
    and the rest of that text. A calibration may differ by as much as its own figures are uncertain, since nothing that
    is built on it is known better. A validation has the spread of its steps for that. Weights, texts, pictures and
    reports have no tolerance.
    """
    schema = one.get(("schema",))
    if schema == "treeopt.calibration/1":
        return _of_calibration(old, new)
    if command == "validate" and ("acceptance_histogram",) in one:
        return _of_validation(one, other)
    if command in _MODEL_FREE and old.suffix.lower() not in _LINES:
        rule = f"numbers within {ROUNDING:g} of each other, relative to their size; all else equal"
        return rule, (), all(_close(each.old, each.new) for each in results)
    return "", (), False


def _of_calibration(old: Path, new: Path) -> tuple[str, tuple[Check, ...], bool]:
    rule = "accuracy of rank 0 at each level within 1.96 standard errors of the file's, clustered by text: 95 %"
    try:
        one, other = load_calibration(old), load_calibration(new)
    except TreeoptError:
        return rule, (), False
    if (one.prompt_ids, one.num_heads) != (other.prompt_ids, other.num_heads):
        return rule, (), False
    errors = one.standard_error(1)[:, 0]
    figures = zip(one.accuracy[:, 0], other.accuracy[:, 0], errors, strict=True)
    checks = tuple(
        Check(f"level {level}", float(before), float(after), STANDARD_ERRORS * float(error))
        for level, (before, after, error) in enumerate(figures, start=1)
    )
    return rule, checks, all(check.holds for check in checks)  # NaN, of a single text, does not hold


def _of_validation(one: Mapping[Place, Any], other: Mapping[Place, Any]) -> tuple[str, tuple[Check, ...], bool]:
    rule = "tokens per step within 1.96 standard errors of the file's, by the spread of its steps: 95 %; lossless alike"
    counts = np.asarray(one["acceptance_histogram",], dtype=np.float64)
    accepted, steps = np.arange(len(counts)), counts.sum()
    mean = (accepted * counts).sum() / steps
    error = math.sqrt((((accepted - mean) ** 2) * counts).sum() / max(steps - 1, 1) / steps)
    key: Place = ("tokens_per_step",)
    check = Check("tokens per step", float(one[key]), float(other[key]), STANDARD_ERRORS * error)
    alike = all(one.get((name,)) == other.get((name,)) for name in ("lossless", "texts", "nodes"))
    return rule, (check,), alike and check.holds


def _close(one: Any, other: Any) -> bool:
    """Whether numbers, and lists and arrays of numbers, are equal but for rounding."""
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        floats = one.dtype == other.dtype and one.shape == other.shape and one.dtype.kind == "f"
        return floats and bool(np.allclose(one, other, rtol=ROUNDING, atol=0.0, equal_nan=True))
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_close, one, other))
    if type(one) in _NUMBERS and type(other) in _NUMBERS and float in (type(one), type(other)):
        return math.isclose(one, other, rel_tol=ROUNDING)
    return _equal(one, other)
