"""Numeric types of options: finite numbers, temperatures and seeds."""

from __future__ import annotations

import math
from typing import Any

import click

from treeopt.sampling import LARGEST_SEED, LEAST_TEMPERATURE

SEED = click.IntRange(0, LARGEST_SEED)


class FiniteRange(click.FloatRange):
    """A range of finite numbers; `click.FloatRange` accepts NaN, as no comparison with NaN is true."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number.", param, ctx)
        return float(number)


class Temperature(FiniteRange):
    """A temperature: 0, or a finite number from `LEAST_TEMPERATURE`."""

    def __init__(self, *, min_open: bool = False) -> None:
        super().__init__(min=0, min_open=min_open)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = super().convert(value, param, ctx)
        if 0 < number < LEAST_TEMPERATURE:
            self.fail(f"{value!r} is below {LEAST_TEMPERATURE}: logits divided by it overflow.", param, ctx)
        return number
