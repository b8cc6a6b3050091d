"""Error messages for rows that are not prompts: the field, its value, and a row that would work."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_SHOWN = 40  # characters of a value
_SHOWN_FIELDS = 200  # characters of a row's field names
# Rows that work, by field, in the order in which fields are read.
_FIXES = {
    "messages": '{"messages": [{"role": "user", "content": "..."}]}',
    "turns": '{"turns": ["...", "..."]}',
    "instruction": '{"instruction": "..."}',
    "prompt": '{"prompt": "..."}',
    "text": '{"text": "..."}',
}
# Names of JSON's types; other types of parquet have Python's names.
_KINDS = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list", dict: "an object"}


def fault_of(row: Any) -> tuple[str, str]:
    """The fault of a row that `prompts.as_prompt` cannot use, to follow "row 3 of FILE", and a row that would work."""
    if isinstance(row, str):
        return "is an empty string", '"Name a bird." or {"instruction": "Name a bird."}'
    if not isinstance(row, dict):
        return f"is {shown(row)} and must be an object or a string", '{"instruction": "Name a bird."}'
    faults = [(_fault(name, row[name]), fix) for name, fix in _FIXES.items() if name in row]
    not_null = [one for one in faults if " null " not in one[0]]  # unused columns of parquet are null
    return (not_null or faults or [("has no usable field", '{"instruction": "..."} or {"text": "..."}')])[0]


def answer_fault(row: Mapping[str, Any], names: Sequence[str]) -> str:
    """The fault of a row's answer, to follow "row 3 of FILE"."""
    found = next((name for name in names if name in row), None)
    return "has no answer to score" if found is None else _fault(found, row[found])


def fields_of(row: Any) -> str:
    """The names of a row's fields, cut at `_SHOWN_FIELDS` characters."""
    names = ", ".join(map(str, row)) if isinstance(row, dict) else ""
    return names if len(names) <= _SHOWN_FIELDS else f"{names[:_SHOWN_FIELDS]}..."


def shown(value: Any) -> str:
    """The type of a value, and the value where it is short."""
    if value is None:
        return "null"
    kind = _KINDS.get(type(value), f"of the type {type(value).__name__}")
    if isinstance(value, (list, dict)):
        return kind
    text = json.dumps(value, default=str)
    return f"{kind} ({text})" if len(text) <= _SHOWN else kind


def _fault(name: str, value: Any) -> str:
    """The fault of a field."""
    if name == "messages":
        return _messages(value)
    if name == "turns" or (name == "prompt" and isinstance(value, list)):
        return _turns(name, value)
    if value == "":
        return f"has an empty string in the field `{name}`"
    return f"has a field `{name}` that is {shown(value)} and must be a string"


def _turns(name: str, turns: Any) -> str:
    """The fault of a list of user turns."""
    if not isinstance(turns, (list, tuple)):
        return f"has a field `{name}` that is {shown(turns)} and must be a list of strings"
    if not turns:
        return f"has an empty list in the field `{name}`"
    i, turn = next((i, turn) for i, turn in enumerate(turns) if not isinstance(turn, str) or not turn)
    if turn == "":
        return f"has an empty string in `{name}[{i}]`"
    return f"has a `{name}[{i}]` that is {shown(turn)} and must be a string"


def _messages(messages: Any) -> str:
    """The fault of a list of messages."""
    if not isinstance(messages, list):
        return f"has a field `messages` that is {shown(messages)} and must be a list of messages"
    if not messages:
        return "has an empty list in the field `messages`"
    found = next(_message_faults(messages), None)
    if found is not None:
        return found
    roles = ", ".join(dict.fromkeys(json.dumps(message["role"])[:_SHOWN] for message in messages))
    return f'has no message of the role "user" in the field `messages`: its roles are {roles}'


def _message_faults(messages: Sequence[Any]) -> Iterator[str]:
    """The faults of single messages."""
    for i, message in enumerate(messages):
        if not isinstance(message, dict):
            yield f"has a `messages[{i}]` that is {shown(message)} and must be an object with `role` and `content`"
            continue
        for key in ("role", "content"):
            if key not in message:
                yield f"has a `messages[{i}]` without `{key}`"
            elif not isinstance(message[key], str):
                yield f"has a `messages[{i}].{key}` that is {shown(message[key])} and must be a string"
