"""Calibration files: rank traces and their provenance as safetensors."""

import dataclasses
import os
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from treeopt.calibration import Calibration, Provenance
from treeopt.defaults import CALIBRATION_FILE
from treeopt.files.read import check_there, path_beside, path_from
from treeopt.files.strict_yaml import Schema, of_json, reading
from treeopt.files.tensors import read_arrays, write_arrays
from treeopt.traces import StepTraces, TargetTraces

SCHEMA = "treeopt.calibration/1"
_STEPS = tuple(field.name for field in dataclasses.fields(StepTraces))  # arrays of per-step trees
_PROBABILITY, _PLACES = "target_probability", "target_places"


class Contents(Schema):
    """The traces' part of a header."""

    top_k: int
    prompt_ids: tuple[str, ...]
    token_hashes: tuple[str, ...]
    provenance: Provenance


class CalibrationHeader(Contents):
    """The header of a calibration file."""

    schema_name: Literal["treeopt.calibration/1"] = Field(alias="schema")


def save_calibration(calibration: Calibration, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """Write a calibration; equal content gives equal bytes.

    Raises:
        TreeoptError: E202 where the file exists and `overwrite` is off.
    """
    arrays, header = content_of(calibration, path)
    write_arrays(path, arrays, {"schema": SCHEMA, **header}, overwrite=overwrite)


def content_of(
    calibration: Calibration, path: str | os.PathLike[str]
) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """The arrays of a calibration and the header without its schema, for a file at that path."""
    provenance = dataclasses.asdict(calibration.provenance)
    if provenance["drafter"]:  # relative to the calibration's folder
        provenance["drafter"] = path_from(Path(path).parent, provenance["drafter"])
    if not provenance["configuration"]:
        del provenance["configuration"]
    header: dict[str, Any] = {
        "top_k": calibration.top_k,
        "prompt_ids": list(calibration.prompt_ids),
        "token_hashes": list(calibration.token_hashes),
        "provenance": provenance,
    }
    arrays: dict[str, NDArray[Any]] = {"ranks": calibration.ranks, "offsets": calibration.offsets}
    if calibration.steps is not None:
        arrays |= {name: array for name, array in vars(calibration.steps).items() if array is not None}
    if calibration.target is not None:
        arrays[_PROBABILITY] = calibration.target.probability
        if calibration.target.places is not None:
            arrays[_PLACES] = calibration.target.places
    return arrays, header


def load_calibration(path: str | os.PathLike[str] = CALIBRATION_FILE) -> Calibration:
    """Read a calibration.

    Raises:
        TreeoptError: E201 where it is missing, with the command that makes it; E203 or E220 where it is invalid.
    """
    make = f"treeopt calibrate --model MODEL [--heads HEADS] --prompts PROMPTS -o {path}"
    check_there(path, f"calibration {path}", why="a tree is built from measured traces", fix=make)
    arrays, found = read_arrays(path, SCHEMA)
    with reading(path, "calibration"):
        return calibration_from(arrays, of_json(CalibrationHeader, found), path)


def calibration_from(arrays: dict[str, NDArray[Any]], header: Contents, path: str | os.PathLike[str]) -> Calibration:
    """The calibration of arrays and a header that were read from a path; errors are those of `reading`."""
    provenance = header.provenance
    if provenance.drafter:
        provenance = dataclasses.replace(provenance, drafter=path_beside(Path(path).parent, provenance.drafter))
    return Calibration(
        ranks=arrays["ranks"],
        offsets=arrays["offsets"].astype(np.int64, casting="equiv"),
        prompt_ids=header.prompt_ids,
        token_hashes=header.token_hashes,
        top_k=header.top_k,
        provenance=provenance,
        steps=StepTraces(**steps) if (steps := {name: arrays[name] for name in _STEPS if name in arrays}) else None,
        target=TargetTraces(arrays[_PROBABILITY], arrays.get(_PLACES)) if _PROBABILITY in arrays else None,
    )
