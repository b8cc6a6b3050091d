"""Scalars as YAML text that every reader understands alike, YAML 1.1 included."""

from __future__ import annotations

import json
import re
from typing import Any

_UNPRINTED = re.compile("[\x7f-\x9f\ufeff\ufffe\uffff]")


def flow(value: Any) -> str:
    """A scalar as YAML: JSON's notation of strings and numbers is also YAML's, but for characters it does not print."""
    if isinstance(value, str):  # a file name that is not UTF-8 must not make the file unreadable
        value = value.encode(errors="replace").decode()
    return _UNPRINTED.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(value, ensure_ascii=False))


def decimal(value: float) -> str:
    """The shortest notation that reads back equal, with the point that YAML 1.1 demands of a float."""
    text = repr(float(value))
    mantissa, exponent, power = text.partition("e")
    return text if not exponent or "." in mantissa else f"{mantissa}.0e{power}"
