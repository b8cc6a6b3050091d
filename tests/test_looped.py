"""The suite is whole: every test file is collected, every marker has a target, and a loop over cases runs each."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT_FOLDER
from looped import looped

VALUES = {"ran": 0}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a file."""
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "file").write_text("before")
    monkeypatch.chdir(tmp_path / "below")
    return tmp_path


@pytest.mark.usefixtures("here")
@looped("a", [1, 2])
@looped(("b", "c"), {3: "x", 4: "y"}.items())
def test_every_case_is_apart(a: int, b: int, c: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A case finds the files of the fixtures in a folder of its own, and no patch of another one."""
    assert Path("file").read_text() == (tmp_path / "below" / "file").read_text() == "before"
    Path("file").write_text("after")
    assert VALUES["ran"] == 0
    monkeypatch.setitem(VALUES, "ran", a)
    assert {3: "x", 4: "y"}[b] == c


def test_every_case_runs_and_a_failing_one_is_named(tmp_path: Path) -> None:
    """Cases multiply in order; the error has notes; the fixtures are the parameters that no case gives."""
    ran = []

    @looped("a", [1, 2])
    @looped("b, c", [(3, 4), (5, 6)])
    def test(a: int, b: int, c: int, other: str) -> None:
        ran.append((a, b, c, other))
        assert (a, b) != (2, 5)

    assert list(inspect.signature(test).parameters) == ["tmp_path", "other"]
    with pytest.raises(AssertionError) as caught:
        test(other="o", tmp_path=tmp_path)
    assert ran == [(1, 3, 4, "o"), (1, 5, 6, "o"), (2, 3, 4, "o"), (2, 5, 6, "o")]
    assert caught.value.__notes__ == ["case 2 of 2: 5, 6", "case 2 of 2: 2"]


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
    for marker in markers:  # a target that names files names all that have the marker
        [line] = re.findall(rf"pytest .*-m {marker}\b.*|pytest .*tests.* -m {marker}\b.*", run.replace("\t", "\n"))
        named = re.findall(r"tests[\w/.]*", line)
        marked = [
            path.relative_to(ROOT_FOLDER).as_posix()
            for path in (ROOT_FOLDER / "tests").rglob("test_*.py")
            if re.search(rf"^(pytestmark = |@)pytest\.mark\.{marker}\b", path.read_text(), re.MULTILINE)
        ]
        assert marked
        assert [path for path in marked if named and not path.startswith(tuple(named))] == []
    assert "pytest -n $(WORKERS) --dist" in run
