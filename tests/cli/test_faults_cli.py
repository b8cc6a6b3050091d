"""Commands on a disk that fails at one of their writes: one error, and no file changed, left or half-written."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path

import pytest
from broken_disk import BrokenDisk
from fault_runs import CHEAP, DEAR, Run, contents, faults_of, invoke, make_inputs, make_older
from looped import looped
from program import treeopt

RUNS = (*CHEAP, *(run for run in DEAR if run.name in ("calibrate", "distill")))


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The inputs of all commands, and a folder for each of their runs: files may hold its name."""
    folder = tmp_path_factory.mktemp("faults") / "inputs"
    folder.mkdir()
    make_inputs(folder)
    return folder


def fresh(inputs: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A new copy of the inputs, as the current folder."""
    folder = inputs.with_name("run")
    monkeypatch.chdir(inputs)
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(inputs, folder)
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.slow
@looped("run", RUNS)
def test_disk_that_fails(run: Run, inputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first change refused, the first write full for good, and the last rename in error over older files."""
    disk = BrokenDisk(fresh(inputs, monkeypatch))
    make_older(run)
    with disk.broken():
        assert invoke(run, "--force").exit_code == 0
    whole, calls = contents(), disk.calls
    write = next(i for i, call in enumerate(calls) if call.startswith("write"))
    rename = max(i for i, call in enumerate(calls) if call.startswith(("replace", "rename")))
    for failing, number in ((0, errno.EACCES), (write, errno.ENOSPC), (rename, errno.EIO)):
        broken = BrokenDisk(fresh(inputs, monkeypatch), failing, number, lasting=number == errno.ENOSPC)
        make_older(run)
        before = contents()
        with broken.broken():
            result = invoke(run, "--force")
        assert broken.failed
        assert faults_of(run, result, broken, before, whole) == []


def test_dot_shows_the_title() -> None:
    """The heading of a .dot file is that of --title; without one there is none."""
    treeopt("render", "mc_sim_7b_63", "--title", 'a "tree"', "-o", "a.dot")
    treeopt("render", "mc_sim_7b_63", "-o", "b.dot")
    assert "label=" + json.dumps('a "tree"') in Path("a.dot").read_text()
    assert "labelloc" not in Path("b.dot").read_text()
