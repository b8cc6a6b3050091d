"""What tests of several commands share: calibrations in the folder of a test, and models that must not be loaded."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, NoReturn

import pytest
from helpers import stretches
from made import made_once, make_heads, make_ngram

from treeopt.calibration import Calibration
from treeopt.files.calibrations import save_calibration
from treeopt.models import base as base_module
from treeopt.models import given as pair_module


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test runs in an empty folder of its own, before the fixtures of its file."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session")
def heads_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of the built-in model with its heads, which no test changes."""
    return made_once(tmp_path_factory, "heads", make_heads)


@pytest.fixture(scope="session")
def ngram_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of the built-in model without heads, which no test changes."""
    return made_once(tmp_path_factory, "ngram", make_ngram)


@pytest.fixture
def calibration() -> Calibration:
    """Sixty texts under the default name."""
    made = stretches(1)
    save_calibration(made, "calibration.safetensors")
    return made


@pytest.fixture
def tasks() -> list[Calibration]:
    """Every other text of `stretches(1)` in `one.safetensors`, the rest in `two.safetensors`."""
    made = [stretches(1).select(range(first, 60, 2)) for first in (0, 1)]
    for name, task in zip(("one", "two"), made, strict=True):
        save_calibration(task, f"{name}.safetensors")
    return made


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """No model can be loaded."""

    def load(*_names: Any, **_options: Any) -> NoReturn:
        raise AssertionError("a model was loaded first")

    importlib.import_module("treeopt.export.heads")  # keeps the function that it finds when it is first imported
    monkeypatch.setattr("treeopt.load_base", load)
    monkeypatch.setattr(base_module, "load_base", load)
    monkeypatch.setattr(pair_module, "load_pair", load)
