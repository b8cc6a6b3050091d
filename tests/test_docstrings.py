"""The examples in the docstrings of the functions that take models and prompts run as pasted."""

from __future__ import annotations

import doctest
from pathlib import Path

import pytest

import treeopt

FUNCTIONS = (
    "run_calibration",
    "validate",
    "distill",
    "train_heads",
    "train_jointly",
    "save_merged",
    "measure_profile",
    "plan_speedup",
)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_example_runs_as_pasted(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example runs with what `treeopt` exports, in an empty folder, and prints what it says."""
    monkeypatch.chdir(tmp_path)
    function = getattr(treeopt, name)
    assert "treeopt." in function.__doc__
    example = doctest.DocTestParser().get_doctest(function.__doc__, {}, name, function.__module__, 0)
    assert len(example.examples) >= 3
    assert all(name in treeopt.__all__ for name in _used(example))
    said: list[str] = []
    result = doctest.DocTestRunner(verbose=False).run(example, out=said.append)
    assert result.failed == 0, "".join(said)


def _used(example: doctest.DocTest) -> set[str]:
    """Names that the example takes from `treeopt`."""
    words = " ".join(line.source for line in example.examples).replace("(", " ").replace(",", " ").split()
    return {word.partition(".")[2].partition(".")[0] for word in words if word.startswith("treeopt.")}
