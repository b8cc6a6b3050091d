"""What `treeopt calibrate` prints of accuracies and how sure they are."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from helpers import make_calibration, stretches
from looped import looped

from treeopt.calibrate.results import CalibrationRun
from treeopt.calibration import Calibration
from treeopt.cli.calibrate_command import report_calibration
from treeopt.cli.console import Console


def run_of(hashes: str) -> CalibrationRun:
    """A run over as many texts as there are letters, equal letters being equal texts."""
    made: Calibration = dataclasses.replace(stretches(1, len(hashes)), token_hashes=tuple(hashes))
    return CalibrationRun(made, (), 0, made.num_heads)


@looped("hashes", ["a", "aaaaaa"])
def test_one_text_in_any_number_of_copies_has_no_error(hashes: str, capsys: pytest.CaptureFixture[str]) -> None:
    """No standard error is printed, neither 0 nor nan, and programs read null."""
    report_calibration(Console(False, False), run_of(hashes), "c.safetensors", None)
    text = capsys.readouterr().out
    assert "±" not in text
    assert "nan" not in text
    assert f"{len(hashes)} text{'s' if len(hashes) > 1 else ''}, 1 distinct, " in text
    report_calibration(Console(True, False), run_of(hashes), "c.safetensors", None)
    data = json.loads(capsys.readouterr().out)
    assert data["standard_error_top_1"] == [None] * 3
    assert (data["prompts"], data["texts_distinct"]) == (len(hashes), 1)


def test_levels_that_no_text_reached_have_no_accuracy(capsys: pytest.CaptureFixture[str]) -> None:
    """A dash where there were no trials, not 0.0 %."""
    run = run_of("ab")
    short = make_calibration([np.zeros((3, 3), int)])  # the third level would guess the fourth token after the first
    report_calibration(Console(False, False), dataclasses.replace(run, calibration=short), "c.safetensors", None)
    *_, last = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("head")]
    assert last == ["head", "3", "-", "-", "-", "-", "-", "0"]
