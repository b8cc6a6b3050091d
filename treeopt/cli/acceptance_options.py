"""The option --acceptance and those of its rules, of commands that decode."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import click

from treeopt.cli.numbers import SEED, FiniteRange, Temperature

if TYPE_CHECKING:
    from treeopt.decode.rules import Rule

GREEDY, SAMPLE, TYPICAL, REJECTION = "greedy", "sample", "typical", "rejection"
_SAMPLING = ("temperature", "top_k", "top_p", "seed")
_OPTIONS: dict[str, tuple[str, ...]] = {
    GREEDY: (),
    SAMPLE: _SAMPLING,
    TYPICAL: ("temperature", "epsilon", "delta"),
    REJECTION: _SAMPLING,
}
_ALL_TOKENS = {"top_k": 0, "top_p": 1.0}


def acceptance_options(function: Callable[..., Any], *, rules: tuple[str, ...], what: str) -> Callable[..., Any]:
    """The options of an acceptance rule, for `acceptance_rule`.

    Args:
        function: the command.
        rules: the rules that it has.
        what: the help of --acceptance.
    """
    drawn = " and ".join(name for name in rules if _OPTIONS[name] is _SAMPLING)
    temperature = f"[default: 1 for {drawn}, 0.7 for {TYPICAL}]"
    for option in (
        click.option("--delta", type=FiniteRange(0, 1, min_open=True), help="For typical [default: 0.3]."),
        click.option("--epsilon", type=FiniteRange(0, 1, min_open=True), help="For typical [default: 0.09]."),
        click.option("--seed", type=SEED, help="Of sampling."),
        click.option(
            "--top-p",
            type=FiniteRange(0, 1, min_open=True),
            default=_ALL_TOKENS["top_p"],
            show_default=True,
            help="Of sampling.",
        ),
        click.option(
            "--top-k",
            type=click.IntRange(min=0),
            default=_ALL_TOKENS["top_k"],
            show_default=True,
            help="Of sampling; 0 is all tokens.",
        ),
        click.option("--temperature", type=Temperature(), help=temperature),
        click.option("--acceptance", type=click.Choice(rules), default=GREEDY, show_default=True, help=what),
    ):
        function = option(function)
    return function


def acceptance_rule(options: Mapping[str, Any], *, rules: tuple[str, ...]) -> Rule:
    """The acceptance rule of the options of a command that has these rules.

    Raises:
        click.UsageError: where a value is out of range, or an option of another rule is given.
    """
    name = options["acceptance"]
    _check_rule(options, rules)
    from treeopt.decode.rules import Greedy, Sample, Typical

    made: dict[str, Callable[..., Rule]] = {GREEDY: Greedy, SAMPLE: Sample, TYPICAL: Typical}
    if name == REJECTION:
        from treeopt.decode.rejection import Rejection

        made[REJECTION] = Rejection
    try:
        return made[name](**{one: options[one] for one in _OPTIONS[name] if options[one] is not None})
    except ValueError as error:
        raise click.UsageError(str(error)) from error


def _check_rule(options: Mapping[str, Any], rules: tuple[str, ...]) -> None:
    """Raise a usage error where an option of another rule has a value."""
    others = {name for rule in rules for name in _OPTIONS[rule]}.difference(_OPTIONS[options["acceptance"]])
    for name in sorted(others):
        if options[name] != _ALL_TOKENS.get(name):
            having = " and ".join(rule for rule in rules if name in _OPTIONS[rule])
            raise click.UsageError(f"--{name.replace('_', '-')} belongs to --acceptance {having}")
