"""Results of commands that were saved from `--json`: of `validate`, `compare` and `generate`, for reports.

Only the parts that a report shows are read; other parts are ignored, so results of later versions stay readable.
"""

import dataclasses
import math
import os
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from treeopt.errors import Code, TreeoptError
from treeopt.files.read import check_there, parse_json
from treeopt.files.strict_yaml import read_text

_FORMATS = "a result is the JSON object that treeopt {0} --json prints, of one setting: treeopt {0} --json > {0}.json"


class _Part(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)


class MadeWith(_Part):
    """Ids of what a result was measured with; `drafter_id` and `tree_id` are None where it is not of one tree."""

    model: str
    model_id: str
    dtype: str
    heads_id: str = ""
    drafter_id: str | None = None
    tree_id: str | None = None


class Result(_Part):
    """What all results have; older ones have no `made_with`."""

    command: str | None = None
    made_by: dict[str, Any] = Field(default_factory=dict)
    made_with: MadeWith | None = None


class _Depths(_Part):
    measured: list[float]
    predicted: list[float]


class _Quartiles(_Part):
    overhead: tuple[float, float] | None = None
    speedup: tuple[float, float] | None = None


class ValidationResult(Result):
    """What `treeopt validate --json` prints; see `Measured` for the fields."""

    acceptance: str
    lossy: bool
    lossless: bool | None = None
    nodes: int | None = None
    texts: int
    tokens: int
    steps: int
    differing: int | None = None
    tokens_per_step: float
    predicted_tokens_per_step: float
    expected_tokens_per_step: float | None = None
    num_draft_tokens: int
    num_accepted_tokens: int
    acceptance_by_depth: _Depths
    repeats: int
    batch_size: int
    overhead: float | None = None
    speedup: float | None = None
    quartiles: _Quartiles = _Quartiles()


class _Row(_Part):
    method: str
    nodes: int | None = None
    mean_acceptance_length: float | None = None
    tokens_per_second: float | None = None
    speedup: float | None = None
    lossless: bool | None = None
    same_texts: int | None = None
    left_out: str | None = None
    quartiles: _Quartiles = _Quartiles()


class ComparisonResult(Result):
    """What `treeopt compare --json` prints; see `Comparison`."""

    rows: list[_Row] = Field(min_length=1)
    texts: int
    learned: int
    repeats: int


class _Step(_Part):
    tokens: list[int] = Field(min_length=1)
    texts: list[str]
    sources: list[dict[str, int | None]]

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        if not len(self.tokens) == len(self.texts) == len(self.sources):
            raise ValueError("a step has as many texts and sources as tokens")
        return self


class DecodingResult(Result):
    """What `treeopt generate --json` prints; see `DecodedStep` for the steps."""

    prompt: str
    model: str
    nodes: int
    acceptance: str
    lossy: bool
    tokens_per_step: float
    tokens_per_second: float | None = None
    prompt_tokens: int
    steps: list[_Step] = Field(min_length=1)


_COMMANDS = {ValidationResult: "validate", ComparisonResult: "compare", DecodingResult: "generate"}
Record = TypeVar("Record", ValidationResult, ComparisonResult, DecodingResult)


def load_result(path: str | os.PathLike[str], schema: type[Record]) -> Record:
    """The result of the command whose `--json` prints this schema."""
    formats = _FORMATS.format(_COMMANDS[schema])
    check_there(path, f"file {path}", fix=formats)
    try:
        return schema.model_validate(parse_json(read_text(Path(path), formats)))
    except ValidationError as error:
        faults = error.errors(include_url=False)
        lines: list[str] = [f"{'.'.join(map(str, one['loc'])) or 'the file'}: {one['msg']}" for one in faults[:10]]
        what = f"{path} is not a result of treeopt {_COMMANDS[schema]}"
        raise TreeoptError(Code.FILE_INVALID, what, at="\n".join([str(path), *lines]), why=formats) from error
    except ValueError as error:
        raise TreeoptError(Code.FILE_INVALID, f"{path} is not JSON: {error}", at=str(path), why=formats) from error


def plain(data: Any) -> Any:
    """Data in types of JSON: records are objects of their fields, arrays lists, and what is not finite is null."""
    if isinstance(data, Enum):
        return data.value
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        return {field.name: plain(getattr(data, field.name)) for field in dataclasses.fields(data)}
    if isinstance(data, Mapping):
        return {str(key): plain(value) for key, value in data.items()}
    if hasattr(data, "tolist"):
        return plain(data.tolist())
    if isinstance(data, (list, tuple)):
        return [plain(value) for value in data]
    if isinstance(data, float):
        return data if math.isfinite(data) else None
    return data if data is None or isinstance(data, (bool, int, str)) else str(data)
