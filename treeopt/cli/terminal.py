"""The one place that prints: text from files, models and users reaches a terminal without its control characters.

An escape sequence in a tree file, a prompt's category or a file name could otherwise colour, erase or rename what the
terminal shows. JSON is printed in ASCII, where every such character is written as an escape by itself.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Mapping
from typing import Any

import click

# C0 and C1 control characters, DEL, marks that reorder text (bidirectional), line separators, and lone surrogates.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_LAYOUT = "\n\t"


def printable(text: str, *, keep: str = _LAYOUT) -> str:
    """The text with every control character written as an escape, such as `\\x1b`, except those in `keep`."""
    return _UNSAFE.sub(lambda found: found[0] if found[0] in keep else _escaped(found[0]), text)


def printable_cell(text: str) -> str:
    """`printable` for a cell of a table, where tabs and line ends are escaped too."""
    return printable(text, keep="")


def echo(text: str = "", *, err: bool = False, end: str = "\n") -> None:
    """Print text to standard output or standard error, without control characters other than line ends and tabs."""
    _write(printable(text) + end, err=err)


def echo_json(data: Mapping[str, Any], *, err: bool = False) -> None:
    """Print one JSON object on a line of its own."""
    _write(json.dumps(data, allow_nan=False) + "\n", err=err)


def _write(text: str, *, err: bool) -> None:
    """Print text; what standard error does not take is lost, and the exit status still says what happened."""
    with contextlib.suppress(OSError) if err else contextlib.nullcontext():
        click.echo(text, err=err, nl=False)


def escape_unencodable() -> None:
    """Let standard output and error write an escape where their encoding lacks a character, instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # None where the caller closed it; a test's own stream lacks the method
            stream.reconfigure(errors="backslashreplace")


def _escaped(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
