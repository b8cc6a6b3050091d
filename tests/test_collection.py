"""The suite is whole: what the test command collects is every test file on disk."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT_FOLDER


def collected_by_the_test_command() -> set[Path]:
    """The files that `python -m pytest` collects in another process, whatever this run collects."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    listed = subprocess.run(command, cwd=ROOT_FOLDER, capture_output=True, text=True, check=True).stdout
    return {ROOT_FOLDER / line.partition("::")[0] for line in listed.splitlines() if "::" in line}


def test_every_test_file_is_collected(request: pytest.FixtureRequest) -> None:
    """The test command collects from each file that is named test_*.py.

    In a run of the whole suite this process has collected them all, as one worker of several as well.
    """
    on_disk = set((ROOT_FOLDER / "tests").rglob("test_*.py"))
    assert len(on_disk) > 80
    missing = on_disk - {item.path for item in request.session.items}
    if missing:
        missing -= collected_by_the_test_command()
    assert missing == set()
