"""The suite is whole: what the test command collects is every test file on disk."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT_FOLDER


def collected(request: pytest.FixtureRequest) -> set[Path]:
    """The files that `python -m pytest` collects; asked of another process where this run was told to collect less."""
    config = request.config
    if config.args_source is config.ArgsSource.TESTPATHS and not (config.option.keyword or config.option.markexpr):
        return {item.path for item in request.session.items}
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    listed = subprocess.run(command, cwd=ROOT_FOLDER, capture_output=True, text=True, check=True).stdout
    return {ROOT_FOLDER / line.partition("::")[0] for line in listed.splitlines() if "::" in line}


def test_every_test_file_is_collected(request: pytest.FixtureRequest) -> None:
    """The test command collects from each file that is named test_*.py."""
    on_disk = set((ROOT_FOLDER / "tests").rglob("test_*.py"))
    assert len(on_disk) > 80
    assert on_disk - collected(request) == set()
