"""The option --temperature of commands that read a calibration."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import click

from treeopt.cli.numbers import Temperature
from treeopt.errors import Code, TreeoptError

if TYPE_CHECKING:
    from treeopt.calibration import Calibration


temperature_option = click.option(
    "--temperature",
    type=Temperature(),
    help="Refuse traces of texts at another temperature; 0 is greedy [default: that of the traces].",
)


def check_temperature_of(calibrations: Iterable[Calibration], temperature: float | None) -> None:
    """Raise E220 unless all texts are of this temperature."""
    if temperature is None:
        return
    for calibration in calibrations:
        if calibration.temperature == temperature:
            continue
        raise TreeoptError(
            Code.CALIBRATION_INVALID,
            f"the calibration is of {kind_of_texts(calibration)}",
            at=f"--temperature {temperature:g}",
            why="acceptance is traced on texts of the temperature that they will be decoded at",
            fix=f"treeopt calibrate --temperature {temperature:g}, with the same model and prompts",
        )


def kind_of_texts(calibration: Calibration) -> str:
    """How the texts of a calibration were made."""
    if calibration.temperature is None:
        return "given answers, or its temperature is not recorded"
    return f"texts sampled at temperature {calibration.temperature:g}" if calibration.temperature else "greedy texts"
