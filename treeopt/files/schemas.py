"""Validation of files by pydantic models, with errors that list several faults as `file:line:column`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from treeopt.errors import Code, TreeoptError
from treeopt.files.strict_yaml import Document
from treeopt.tree import MAX_FAULTS


class Schema(BaseModel):
    """Base class of all schemas: unknown keys and implicit conversions are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, populate_by_name=True)


S = TypeVar("S", bound=Schema)


def check(document: Document, schema: type[S], name: str) -> S:
    """The document as a record of `schema`.

    Raises:
        TreeoptError: E203 with every fault (at most 10) and its place.
    """
    data = document.data
    found = data.get("schema") if isinstance(data, dict) else None
    if found != name:
        what = f"{document.path} says schema {found!r}, but this treeopt reads {name!r}"
        raise TreeoptError(Code.FILE_INVALID, what, at=document.at(("schema",)))
    try:
        return schema.model_validate(data)
    except ValidationError as error:
        faults = [(tuple(fault["loc"]), fault["msg"]) for fault in error.errors(include_url=False)]
        raise faults_error(document, name, faults) from error


@contextmanager
def reading(path: str | os.PathLike[str], kind: str) -> Iterator[None]:
    """Turn errors of the block, which makes a record from a header and arrays, into errors that name the file.

    Raises:
        TreeoptError: E203 for an invalid header and for missing or invalid parts; the code of the record where the
            record refuses its content.
    """
    try:
        yield
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        what = f"{path} has a damaged header: {'.'.join(map(str, fault['loc']))}: {fault['msg']}"
        raise TreeoptError(Code.FILE_INVALID, what) from error
    except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
        raise TreeoptError(Code.FILE_INVALID, f"{path} lacks a part of a {kind}: {error}") from error
    except TreeoptError as error:
        raise TreeoptError(error.code, f"{path}: {error.what}", at=error.at, why=error.why, fix=error.fix) from error


def faults_error(document: Document, name: str, faults: list[tuple[tuple[str | int, ...], str]]) -> TreeoptError:
    """One error that lists the faults of a file, each with its place."""
    lines = [f"{document.at(where)}  {'.'.join(map(str, where))}: {what}" for where, what in faults[:MAX_FAULTS]]
    if len(faults) > MAX_FAULTS:
        lines.append(f"and {len(faults) - MAX_FAULTS} more")
    count = "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
    what = f"{document.path} is not a {name} file: {count}"
    return TreeoptError(
        Code.FILE_INVALID, what, at="\n".join(lines), fix="correct these places, or make the file again"
    )
