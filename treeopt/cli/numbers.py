"""Numeric types of options: counts, finite numbers, temperatures, seeds and lists of numbers."""

import functools
import math
from typing import Any

import click

from treeopt.sampling import LARGEST_SEED, LEAST_TEMPERATURE

_MOST_DIGITS = 15  # more than any number of nodes, tokens or texts has
_SHOWN_CHARACTERS = 60
AUTO = "auto"  # as a number of nodes or tokens, and as the drafter
COUNT, NOT_NEGATIVE = click.IntRange(min=1), click.IntRange(min=0)
SEED = click.IntRange(0, LARGEST_SEED)


class NumberOrAuto(click.ParamType[int | str]):
    """A whole number in a range, or `auto`."""

    name = "N|auto"

    def __init__(self, within: click.IntRange) -> None:
        self.within = within

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        if value == AUTO:
            return AUTO
        if not str(value).lstrip("-").isdigit():
            self.fail(f"{value!r} is not a whole number or {AUTO}.", param, ctx)
        return self.within.convert(value, param, ctx)


class FiniteRange(click.FloatRange):
    """A range of finite numbers; `click.FloatRange` accepts NaN, as no comparison with NaN is true."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number.", param, ctx)
        return float(number)


ABOVE_ZERO = FiniteRange(min=0, min_open=True)
SHARE = FiniteRange(0, 1, min_open=True)


class Temperature(FiniteRange):
    """A temperature: 0, or a finite number from `LEAST_TEMPERATURE`."""

    def __init__(self, *, min_open: bool = False) -> None:
        super().__init__(min=0, min_open=min_open)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = super().convert(value, param, ctx)
        if 0 < number < LEAST_TEMPERATURE:
            self.fail(f"{value!r} is below {LEAST_TEMPERATURE}: logits divided by it overflow.", param, ctx)
        return number


def _numbers(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> tuple[int, ...]:
    """Whole numbers from 1, separated by commas, or from a repeated option."""
    parts = [part for text in value for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) <= _MOST_DIGITS and int(part) for part in parts):
        shown = ",".join(value)[:_SHOWN_CHARACTERS]
        raise click.BadParameter(f"{shown!r} is not a list of whole numbers from 1, such as 1,2,4", ctx, param)
    return tuple(map(int, parts))


numbers_option = functools.partial(click.option, multiple=True, callback=_numbers, metavar="N,N,...")
