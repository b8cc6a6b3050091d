"""Latency profiles as YAML: one sorted line for each point, so that two profiles can be compared by line.

An engine's own step times are read from CSV.
"""

import csv
import dataclasses
import os
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from treeopt.defaults import PROFILE_FILE
from treeopt.errors import Code, TreeoptError
from treeopt.files import strict_yaml
from treeopt.files.atomic import write_text
from treeopt.files.configurations import KEY, entries, flow_mapping, stored_lines
from treeopt.files.read import check_there, read_bytes
from treeopt.files.strict_yaml import Faults, Schema, check, faults_error
from treeopt.latency import LatencyPoint, LatencyProfile, repeated

SCHEMA = "treeopt.latency/1"
_COLUMNS = ("tokens", "batch", "context", "seconds")  # of a CSV file
_MOST_CSV = 1 << 22


class PointLine(Schema):
    """One measured size: nodes (root counted), batch, cached tokens; seconds of a step with its quartiles.

    Of per-step trees also the seconds of drafting, which are a part of the step.
    """

    nodes: int = Field(ge=1)
    batch: int = Field(ge=1)
    context: int = Field(ge=1)
    seconds: float = Field(gt=0.0, allow_inf_nan=False)
    low: float = Field(gt=0.0, allow_inf_nan=False)
    high: float = Field(gt=0.0, allow_inf_nan=False)
    drafting: float | None = Field(default=None, gt=0.0, allow_inf_nan=False)


class VersionsBlock(Schema):
    """The software below treeopt."""

    python: str | None = None
    torch: str | None = None
    transformers: str | None = None


class ProvenanceBlock(Schema):
    """What was measured, on which machine, and how often."""

    made_by: str | None = None
    model: str | None = None
    model_id: str | None = None
    heads: str | None = None
    heads_id: str | None = None
    kind: Literal["static", "dynamic", "chain"] | None = Field(default=None, description="see LatencyProfile.kind")
    unit: Literal["path tokens"] | None = Field(default=None, description="of the sizes `nodes`; absent for nodes")
    drafter: str | None = Field(default=None, description="id of the drafter; absent for the guesses of the heads")
    drafter_name: str | None = Field(default=None, description="heads, heads+ngram or ngram")
    device: str | None = None
    dtype: str | None = None
    threads: int | None = Field(default=None, ge=1)
    attention: str | None = None
    compiled: bool | None = Field(default=None, description="true where forwards over trees were compiled")
    repeats: int | None = Field(default=None, ge=1, description="rounds over all sizes; absent where modelled")
    modelled: str | None = Field(default=None, description="how, by treeopt plan; absent where measured")
    versions: VersionsBlock | None = None
    configuration: dict[str, dict[str, Any]] | None = None


class ProfileFile(ProvenanceBlock):
    """The format `treeopt.latency/1`."""

    schema_name: Literal["treeopt.latency/1"] = Field(alias="schema")
    points: list[PointLine] = Field(min_length=1)


def load_profile(path: str | os.PathLike[str] = PROFILE_FILE) -> LatencyProfile:
    """Read a latency profile; its points may be in any order.

    A file whose name ends in .csv has a line for each point and, in its first line, the names of the columns: `tokens`
    that a step verifies for each text (1 + drafts), `seconds`, and where several were measured `batch` and `context`.

    Raises:
        TreeoptError: E201 where it is missing, with the command that makes it; E203 where it is invalid.
    """
    why = "the time of a step is measured on the machine that will run it"
    make = f"treeopt profile --model MODEL [--heads HEADS] -o {path}"
    check_there(path, f"latency profile {path}", why=why, fix=make)
    if Path(path).suffix.lower() == ".csv":
        return _load_csv(path)
    document = strict_yaml.load(Path(path))
    content = check(document, ProfileFile, SCHEMA)
    points: list[LatencyPoint] = []
    faults: Faults = []
    for i, line in enumerate(content.points):
        try:
            points.append(LatencyPoint(**line.model_dump()))
        except TreeoptError as error:
            faults.append((("points", i), error.what))
    if not faults:
        faults = [(("points", i), "has the batch, context and nodes of an earlier point") for i in repeated(points)]
    if faults:
        raise faults_error(document, SCHEMA, faults)
    provenance = content.model_dump(include=set(ProvenanceBlock.model_fields), exclude_none=True)
    return LatencyProfile.from_points(points, provenance)


def _load_csv(path: str | os.PathLike[str]) -> LatencyProfile:
    """The points of a CSV file, without provenance: their drafter is not compared with that of a calibration."""
    csv.field_size_limit(_MOST_CSV)  # a longer cell is an error of another kind
    rows = csv.DictReader(read_bytes(path, _MOST_CSV).decode("utf-8-sig", errors="replace").splitlines())
    names = [(name or "").strip() for name in rows.fieldnames or ()]
    wrong = {name for name in names if name not in _COLUMNS or names.count(name) > 1}
    if wrong or not {"tokens", "seconds"} <= {*names}:
        why = "its first line names the columns: tokens and seconds, and batch and context where there are several"
        raise TreeoptError(Code.FILE_INVALID, f"{path} has the columns {', '.join(names) or 'none'}", why=why)
    rows.fieldnames = names
    points = []
    for row in rows:
        try:
            if None in row:
                raise TreeoptError(Code.FILE_INVALID, "has more cells than columns")
            nodes, batch, context = (int(row[name] if name in names else 1) for name in ("tokens", "batch", "context"))
            seconds = float(row["seconds"])
            points.append(LatencyPoint(nodes, batch, context, seconds, seconds, seconds))
        except (TypeError, ValueError, TreeoptError) as error:
            fault = error.what if isinstance(error, TreeoptError) else "has a cell that is not a number, or not whole"
            raise TreeoptError(Code.FILE_INVALID, f"{path}: line {rows.line_num} {fault}") from error
    try:
        return LatencyProfile.from_points(points)
    except TreeoptError as error:
        raise TreeoptError(Code.FILE_INVALID, f"{path}: {error.what}") from error


def save_profile(profile: LatencyProfile, path: str | os.PathLike[str]) -> None:
    """Write a profile as YAML; `load_profile` returns an equal one. An existing file is replaced."""
    write_text(path, profile_yaml(profile))


def profile_yaml(profile: LatencyProfile) -> str:
    """The text of a profile file."""
    try:
        ProvenanceBlock.model_validate(dict(profile.provenance))
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        what = f"a profile's provenance cannot hold {'.'.join(map(str, fault['loc']))}: {fault['msg']}"
        raise TreeoptError(Code.PROFILE_INVALID, what) from error
    lines = [
        "# seconds of one decode step: median, lower and upper quartile; nodes count the root; context in tokens",
        "# a step of 1 node drafts nothing; overhead = seconds / seconds of 1 node",
        f"schema: {SCHEMA}",
    ]
    blocks = {name: dict(sorted(one.items())) for name, one in profile.provenance.items() if isinstance(one, dict)}
    names = (name for name in ProvenanceBlock.model_fields if name != KEY)
    lines += entries({**profile.provenance, **blocks}, *names)
    lines += [*stored_lines(profile.provenance), "points:"]
    lines += [f"- {flow_mapping(dataclasses.asdict(point))}" for point in profile.points]
    return "\n".join(lines) + "\n"
