"""Scalars as YAML text that YAML 1.1 and 1.2 read alike."""

from __future__ import annotations

import json
import re
from typing import Any

_UNPRINTED = re.compile("[\x7f-\x9f\ufeff\ufffe\uffff]")


def flow(value: Any) -> str:
    """A scalar in JSON notation, which is also YAML, with the characters escaped that YAML does not allow."""
    if isinstance(value, str):  # a file name that is not UTF-8 would make the file unreadable
        value = value.encode(errors="replace").decode()
    return _UNPRINTED.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(value, ensure_ascii=False))


def decimal(value: float) -> str:
    """The shortest notation that reads back equal, with the decimal point that YAML 1.1 requires."""
    text = repr(float(value))
    mantissa, exponent, power = text.partition("e")
    return text if not exponent or "." in mantissa else f"{mantissa}.0e{power}"
