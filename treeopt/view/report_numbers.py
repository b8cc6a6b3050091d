"""Numbers on the page of a report: each is a `data` element with the exact value of the embedded data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

NONE = "\u2013"  # a dash


def number(value: float | None, digits: int = 3) -> Any:
    """A number with so many digits; a dash for None. Whole numbers have separators and no digits."""
    if value is None:
        return NONE
    return _data(value, f"{value:,}" if isinstance(value, int) else f"{value:,.{digits}f}")


def percent(value: float | None, digits: int = 1) -> Any:
    """A share in percent."""
    return NONE if value is None else _data(value, f"{100 * value:.{digits}f} %")


def times(value: float | None) -> Any:
    """A speedup: `2.16x`, with the multiplication sign."""
    return NONE if value is None else _data(value, f"{value:.2f}\u00d7")


def milliseconds(value: float | None) -> Any:
    """Seconds as milliseconds."""
    return NONE if value is None else _data(value, f"{1000 * value:.2f} ms")


def _data(value: float, shown: str) -> Any:
    from markupsafe import Markup

    return Markup('<data value="{}">{}</data>').format(repr(value), shown)


FILTERS: Mapping[str, Callable[..., Any]] = {
    "number": number,
    "percent": percent,
    "times": times,
    "milliseconds": milliseconds,
}
