"""The docstrings of public names: every parameter of a wide function is named, and examples run as pasted."""

from __future__ import annotations

import doctest
import inspect
from pathlib import Path

import pytest
from looped import looped

import treeopt

FUNCTIONS = (
    "run_calibration",
    "validate",
    "distill",
    "train_heads",
    "train_jointly",
    "measure_profile",
    "plan_speedup",
)


def test_public_functions_say_what_they_take() -> None:
    """Each public name has a docstring; that of a function of more than three parameters names them."""
    for name in set(treeopt.__all__) - {"__version__"}:
        one = getattr(treeopt, name)
        said = one.__doc__ or ""
        assert len(said.split()) > 5, name
        parameters = [] if inspect.isclass(one) else inspect.signature(one).parameters
        if len(parameters) > 3:
            assert [each for each in parameters if each not in said] == [], name
            assert "Args:" in said, name


@looped("name", FUNCTIONS)
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
