"""Whether the inputs of `treeopt report` belong together: one model, its heads, and the drafter and tree of the page.

Files that do not name what they were made with, such as published trees and results of before `made_with`, pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from treeopt.calibration import Calibration
from treeopt.defaults import HEADS
from treeopt.errors import Code, TreeoptError
from treeopt.files.policies import plan_id
from treeopt.files.results import Result, ValidationResult
from treeopt.latency import LatencyProfile
from treeopt.policy import Plan

_FLOAT32 = "float32"  # the dtype of older files, which do not state it


@dataclass(frozen=True)
class Origin:
    """The models that a file was made with. The id of a base is that of its weights in `dtype`; heads may be empty."""

    file: str
    model: str
    model_id: str
    dtype: str
    heads_id: str

    @classmethod
    def of(cls, file: str, source: Mapping[str, Any]) -> Origin:
        """That of a file with this source."""
        dtype = str(source.get("dtype") or _FLOAT32)
        return cls(
            file, str(source.get("model") or ""), str(source["model_id"]), dtype, str(source.get("heads_id") or "")
        )


def origins(
    read: Sequence[tuple[str, Calibration]],
    tree: str | None,
    plan: Plan | None,
    profile_path: str | None,
    profile: LatencyProfile | None,
) -> Iterator[Origin]:
    """The models of the calibrations, of the tree and of the profile, where they name them."""
    for path, one in read:
        yield Origin.of(path, {**vars(one.provenance), "dtype": one.provenance.settings.get("dtype")})
    sources = [] if plan is None else [(str(tree), plan.source.get("calibration") or {})]
    if profile is not None and not profile.provenance.get("modelled"):
        sources.append((str(profile_path), profile.provenance))
    yield from (Origin.of(name, source) for name, source in sources if source.get("model_id"))


def result_origins(results: Sequence[tuple[str, Result]]) -> Iterator[Origin]:
    """The models of results of other commands, where they name them."""
    for path, one in results:
        if one.made_with is not None:
            yield Origin.of(path, one.made_with.model_dump())


def check_calibrations(read: Sequence[tuple[str, Calibration]]) -> None:
    """Raise E220 or E221 where a calibration holds no text, or they are of different models in any dtypes."""
    for path, one in read:
        if not one.positions:
            raise TreeoptError(Code.CALIBRATION_INVALID, f"{path} holds no text", at=path, fix="leave it out")
        first, made = (Origin.of(name, vars(of.provenance)) for name, of in (read[0], (path, one)))
        if made.model_id != first.model_id:
            raise _other_model(first, made, "models")


def check_models(files: Sequence[Origin], results: Sequence[Origin]) -> None:
    """Raise E221 where two inputs of one dtype are of different models, or a result is of heads that no file is of.

    The id of a base differs between dtypes, as the weights do, so only ids of the same dtype are compared. Calibrations
    may be of several heads, which are then compared.
    """
    bases: dict[str, Origin] = {}
    for one in (*files, *results):
        first = bases.setdefault(one.dtype, one)
        if one.model_id != first.model_id:
            raise _other_model(first, one, "models")
    heads = {one.heads_id: one for one in files if one.heads_id}
    for one in results:
        if heads and one.heads_id and one.heads_id not in heads:
            raise _other_model(next(iter(heads.values())), one, "heads")


def _other_model(first: Origin, other: Origin, what: str) -> TreeoptError:
    ids = [(one.model, one.heads_id if what == "heads" else one.model_id) for one in (first, other)]
    return TreeoptError(
        Code.CALIBRATION_MISMATCH,
        f"{first.file} and {other.file} are of different {what}",
        at="\n".join(f"{one.file}: {name} ({found})" for one, (name, found) in zip((first, other), ids, strict=True)),
        why="a report is of one model",
        fix="make a report for each model",
    )


def check_drafters(
    tree: str | None, plan: Plan | None, read: Sequence[tuple[str, Calibration]], results: Sequence[tuple[str, Result]]
) -> None:
    """Raise E223 where the tree is of none of the calibrations' drafters, or a result of none of these and the tree."""
    known = {one.provenance.drafter_id for _, one in read}
    if plan is not None:
        _check_drafter(str(tree), plan.drafter, known, "the calibrations are")
        known.add(plan.drafter)
    for path, one in results:
        if one.made_with is not None and one.made_with.drafter_id is not None:
            _check_drafter(path, one.made_with.drafter_id, known, "the tree and the calibrations are")


def _check_drafter(name: str, drafter: str, known: set[str], others: str) -> None:
    if known and drafter not in known:
        shown = ", ".join(sorted(one or HEADS for one in known))
        raise TreeoptError(
            Code.DRAFTER_MISMATCH,
            f"{name} is of drafter {drafter or HEADS}, and {others} of {shown}",
            at=name,
            fix="give the calibration of its drafter, or leave it out",
        )


def check_headline(tree: str, plan: Plan, path: str, validation: ValidationResult) -> None:
    """Raise E203 where the first validation, whose figures are beside the tree's, is of another tree."""
    made_with = validation.made_with
    found = None if made_with is None else made_with.tree_id
    other = validation.nodes not in (None, plan.nodes) if found is None else found != plan_id(plan)
    if not other:
        return
    sizes = f", of {validation.nodes} nodes, and {tree} has {plan.nodes}" if validation.nodes != plan.nodes else ""
    raise TreeoptError(
        Code.FILE_INVALID,
        f"{path} is of another tree than {tree}{sizes}",
        at=path,
        why="the first validation is the headline of the report, beside the figures of its tree",
        fix=f"give that of the tree first: treeopt validate --tree {tree} --json > validate.json",
    )
