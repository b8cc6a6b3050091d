"""Errors of the operating system as ours."""

from __future__ import annotations

import errno
import os

from looped import looped
from safetensors import SafetensorError

from treeopt.errors import Code, TreeoptError, system_error


@looped(
    ("error", "code", "what"),
    [
        (MemoryError(), Code.OUT_OF_MEMORY, "out of memory"),
        (MemoryError("no room for 8 GB\nof numbers"), Code.OUT_OF_MEMORY, "no room for 8 GB"),
        (OSError(errno.ENOSPC, "disk full", "a.yaml"), Code.OUT_OF_MEMORY, "disk full"),
        (OSError(errno.EIO, "broken", "a.yaml"), Code.SYSTEM_REFUSED, "broken"),
    ],
)
def test_errors_of_the_system_have_a_code(error: Exception, code: Code, what: str) -> None:
    """Memory and disk that are used up are E403, others E404, with the system's words and the file."""
    found = system_error(error)
    assert isinstance(found, TreeoptError)
    assert (found.code, found.what) == (code, what)
    assert found.at == ("a.yaml" if isinstance(error, OSError) else "")


def test_other_exceptions_are_not_of_the_system() -> None:
    """An exception without an error number stays what it is."""
    assert system_error(ValueError("no")) is None
    assert system_error(OSError("no number")) is None


@looped(("number", "code"), [(28, Code.OUT_OF_MEMORY), (13, Code.SYSTEM_REFUSED)])
def test_numbers_in_messages_of_safetensors(number: int, code: Code) -> None:
    """Its errors of writing have the number of the system in their text alone."""
    found = system_error(SafetensorError(f"Error while serializing: I/O error: any words (os error {number})"))
    assert found is not None
    assert (found.code, found.what) == (code, os.strerror(number))
    assert system_error(SafetensorError("Error while serializing: invalid shape")) is None
