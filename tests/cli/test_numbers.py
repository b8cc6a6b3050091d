"""Numeric options: NaN, infinities and numbers that no generator takes are refused in every command."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

import click
from looped import looped
from program import treeopt

from treeopt.cli.app import COMMANDS
from treeopt.cli.numbers import SEED, FiniteRange, Temperature


def options() -> Iterator[tuple[str, click.Option]]:
    """Every option of every command."""
    for name in COMMANDS:
        command: click.Command = importlib.import_module(f"treeopt.cli.{name}_command").command
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                yield name, parameter


FLOATS = [(name, option) for name, option in options() if isinstance(option.type, click.types.FloatParamType)]


def test_every_float_option_is_finite() -> None:
    """No command takes a float by a type that lets NaN pass."""
    assert len(FLOATS) > 10
    assert {name for name, option in FLOATS if not isinstance(option.type, FiniteRange)} == set()


@looped("value", ["nan", "inf", "-inf", "1e999", "NaN"])
def test_not_finite_is_a_usage_error(value: str) -> None:
    """Every float option refuses it, by name, before anything is loaded."""
    for name, option in FLOATS:
        result = treeopt(name, f"{option.opts[0]}={value}", status=2)
        assert option.opts[0] in result.stderr, result.stderr


def test_every_seed_fits_every_generator() -> None:
    """A seed beyond 63 bits, or a negative one, is a usage error in every command that has one."""
    seeds = [(name, option) for name, option in options() if "--seed" in option.opts]
    assert len(seeds) >= 5
    for name, option in seeds:
        assert option.type is SEED
        for value in ("-1", str(2**63), "9" * 400):
            assert "--seed" in treeopt(name, f"--seed={value}", status=2).stderr


@looped(("text", "number"), [("0.5", 0.5), ("1e-300", 1e-300), ("1", 1.0)])
def test_finite_numbers_pass(text: str, number: float) -> None:
    """What is finite and in the range is taken as it is."""
    assert FiniteRange(min=0).convert(text, None, None) == number


def test_every_temperature_is_one_that_logits_can_be_divided_by() -> None:
    """Below 1e-6 logits would overflow: a usage error in every command that samples, but for 0."""
    temperatures = [(name, option) for name, option in options() if "--temperature" in option.opts]
    assert len(temperatures) >= 4
    for name, option in temperatures:
        assert isinstance(option.type, Temperature)
        assert "1e-06" in treeopt(name, "--temperature=1e-300", status=2).stderr
    assert Temperature().convert("0", None, None) == 0.0
    assert Temperature().convert("1e-6", None, None) == 1e-6
