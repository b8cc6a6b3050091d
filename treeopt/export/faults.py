"""Errors of files that do not follow the layout of their engine."""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from pathlib import Path

from treeopt.errors import Code, TreeoptError

Fault = Callable[[str], TreeoptError]  # what is wrong -> the error, which names the file

FORMATS = (
    "read are paths such as [[0], [1], [0, 0]] in JSON or Python, {0}, {1}, {0, 0} of Triton, token trees of NxD "
    "Inference, and growmaps of Sequoia (.pt or .json)"
)


def fault_of(path: Path, layout: str) -> Fault:
    """The function that makes the errors of a file in a layout: E206."""

    def fault(what: str) -> TreeoptError:
        fix = "correct it, or export it again from the program that made it"
        return TreeoptError(Code.ENGINE_FILE_INVALID, f"{path} is not {layout}: it {what}", at=str(path), fix=fix)

    return fault


def shown(value: object) -> str:
    """A value for a message, cut."""
    try:
        return reprlib.repr(value)
    except ValueError:  # a number of thousands of digits
        return f"a value of type {type(value).__name__}"
