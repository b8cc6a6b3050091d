"""The loop over cases runs each, with folders and patches of its own, and names the one that fails."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
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
