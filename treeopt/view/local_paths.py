"""Local paths in what is written to be sent: each is written as its last name.

Local are absolute paths, and those that begin with `~` or `..`. Other relative paths stay, as names of models on a hub
look the same.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Mapping
from typing import Any

_PART = r"[^\s'\"/\\]+"
_IN_TEXT = re.compile(
    rf"(?<![\w.~:<>/\\])(?:(?:[A-Za-z]:)?[/\\](?:{_PART}[/\\])+|(?:~\w*|\.\.)[/\\](?:{_PART}[/\\])*)({_PART})[/\\]?"
)
_WHOLE = re.compile(r"(?:[A-Za-z]:)?[/\\]|(?:~\w*|\.\.)(?:[/\\]|$)")


def without_folders(data: Any, *, commands: Collection[str] = (), kept: Collection[str] = ()) -> Any:
    """Nested data in types of JSON with the last names of local paths.

    Args:
        data: what is to be sent.
        commands: keys of command lines, of which each word is taken as a text of its own.
        kept: keys whose values stay as they are, such as texts that a model wrote.
    """
    if isinstance(data, str):
        return last_name(data)
    if isinstance(data, list):
        return [without_folders(one, commands=commands, kept=kept) for one in data]
    if not isinstance(data, Mapping):
        return data
    found = {}
    for key, value in data.items():
        if key in commands and isinstance(value, str):
            value = _command(value)
        elif key not in kept:
            value = without_folders(value, commands=commands, kept=kept)
        found[last_name(key)] = value
    return found


def _command(line: str) -> str:
    try:
        return shlex.join(map(last_name, shlex.split(line)))
    except ValueError:  # not a command line: files of results are read as they are
        return last_name(line)


def last_name(text: str) -> str:
    """The last name of a local path; of other text, the text with the last names of the local paths in it.

    A path after `=` is one too, as in `--tree=/trees/a.yaml`.
    """
    name, equals, path = ("", "", text) if _WHOLE.match(text) else text.partition("=")
    if _WHOLE.match(path) and "\n" not in text and not _IN_TEXT.search(name):
        return f"{name}{equals}" + re.split(r"[/\\]", path.rstrip("/\\"))[-1]
    return _IN_TEXT.sub(r"\1", text)
