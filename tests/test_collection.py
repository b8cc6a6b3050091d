"""The suite is whole: what the test commands collect is every test file on disk."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT_FOLDER


def collected_by_the_test_command() -> set[Path]:
    """The files that `python -m pytest` collects in another process with every marker, whatever this run collects."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "-m", ""]
    listed = subprocess.run(command, cwd=ROOT_FOLDER, capture_output=True, text=True, check=True).stdout
    return {ROOT_FOLDER / line.partition("::")[0] for line in listed.splitlines() if "::" in line}


@pytest.mark.slow
def test_every_test_file_is_collected(request: pytest.FixtureRequest) -> None:
    """The test commands collect from each file that is named test_*.py.

    In a run of the whole suite this process has collected them all, as one worker of several as well.
    """
    on_disk = set((ROOT_FOLDER / "tests").rglob("test_*.py"))
    assert len(on_disk) > 80
    missing = on_disk - request.config.collected_files
    if missing:
        missing -= collected_by_the_test_command()
    assert missing == set()


def test_every_marker_has_a_target(pytestconfig: pytest.Config) -> None:
    """`make test` leaves out the markers of ours, and `make test-all` runs each of them."""
    markers = {
        line.partition(":")[0]
        for line in pytestconfig.getini("markers")
        if "(make test-" in line or "(make docs" in line
    }
    assert (
        set(re.findall(r"not (\w+)", " ".join(pytestconfig.getini("addopts"))))
        == markers
        == {"slow", "bench", "browser", "docs", "smollm2"}
    )
    makefile = (ROOT_FOLDER / "Makefile").read_text()
    targets = re.search(r"^test-all: (.+)$", makefile, re.MULTILINE)
    assert targets
    recipes = dict(re.findall(r"^([\w-]+):.*\n((?:\t.*\n)+)", makefile, re.MULTILINE))
    run = " ".join(recipes.get(name, "") for name in targets[1].split())
    assert {marker for marker in markers if f"-m {marker}" in run} == markers
    assert "pytest -n $(WORKERS) --dist" in run
