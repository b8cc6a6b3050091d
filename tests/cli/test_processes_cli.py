"""`--nproc` and torchrun on the command line: equal bytes, Ctrl-C, a process that is killed, and refusals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from conftest import ROOT_FOLDER
from looped import looped
from program import error_number, error_of, treeopt
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from treeopt.errors import Code, TreeoptError
from treeopt.files.drafters import load_drafter
from treeopt.runs.processes import check_device

LEARN = ["calibrate", "--model", "pocket", "--limit", "2", "--max-new-tokens", "8", "--learn-tokens", "60"]
SLOW = ["calibrate", "--limit", "8", "--max-new-tokens", "60", "--batch-size", "1", "--temperature", "0.8"]
PARTIAL = Path("calibration.safetensors.partial")


def files(folder: Path) -> dict[str, bytes]:
    """The contents of the files of a folder, by name."""
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


def environment() -> dict[str, str]:
    """That of a program outside of this process."""
    return {**os.environ, "PYTHONPATH": str(ROOT_FOLDER), "OMP_NUM_THREADS": "1"}


@pytest.mark.slow
@pytest.mark.usefixtures("whole_fit")
def test_three_processes_of_torchrun_give_the_bytes_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter learned from two prompts, and its traces: with one batch of each kind two processes make none."""
    for name in ("one", "three"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "one")
    treeopt(*LEARN)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "3", "-m", "treeopt", *LEARN]
    done = subprocess.run(
        command, env=environment(), cwd=tmp_path / "three", capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert files(tmp_path / "three") == files(tmp_path / "one")
    assert done.stdout.count("texts,") == done.stderr.count("wrote calibration.safetensors") == 1


@pytest.mark.slow
@pytest.mark.usefixtures("whole_fit")
def test_two_processes_of_torchrun_learn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one times trees and writes the drafter, whose table is that of one process; both end with status 0."""
    monkeypatch.chdir(tmp_path)
    learn = ["learn", *LEARN[1:], "--nodes", "4"]
    treeopt(*learn, "-o", "one.safetensors")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "treeopt", *learn]
    done = subprocess.run([*command, "-o", "two.safetensors"], env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    one, two = (load_drafter(f"{name}.safetensors") for name in ("one", "two"))
    assert one.id == two.id
    assert done.stderr.count("wrote two.safetensors") == 1


@pytest.mark.slow
def test_two_processes_distill_into_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With --force over an unfinished run: the bytes of one process, and neither is refused by the other's lock."""
    monkeypatch.chdir(tmp_path)
    distill = ["distill", "--self-talk", "4", "--max-new-tokens", "6", "--opening-tokens", "4", "--batch-size", "1"]
    treeopt(*distill, "-o", "one.jsonl")
    Path("two.jsonl.partial").mkdir()
    Path("two.jsonl.partial/begun.json").write_text("{}")
    command = [sys.executable, "-m", "treeopt", *distill, "-o", "two.jsonl", "--force", "--nproc", "2"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = files(tmp_path)
    assert found["two.jsonl"] == found["one.jsonl"]
    assert sorted(found) == sorted(f"{name}.jsonl{more}" for name in ("one", "two") for more in ("", ".treeopt.yaml"))


def started(*more: str) -> subprocess.Popen[str]:
    """A run of two processes that has stored some answers, and has more to make."""
    before = len(list(PARTIAL.glob("answers-*")))
    command = [sys.executable, "-m", "treeopt", *SLOW, "--nproc", "2", *more]
    run = subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    while run.poll() is None and len(list(PARTIAL.glob("answers-*"))) <= before:
        time.sleep(0.01)
    return run


def others(run: subprocess.Popen[str]) -> list[psutil.Process]:
    """The processes that a run has started for its work."""
    return [one for one in psutil.Process(run.pid).children() if "spawn_main" in " ".join(one.cmdline())]


@pytest.mark.slow
def test_interrupted_and_killed_runs_continue() -> None:
    """Ctrl-C ends both processes with status 130, a killed one its run with E405; one process ends with equal bytes."""
    treeopt(*SLOW, "-o", "unbroken.safetensors")
    run = started()
    [other] = others(run)
    os.killpg(run.pid, signal.SIGINT)  # as a terminal does
    output, errors = run.communicate()
    assert (run.returncode, output) == (130, ""), errors
    assert (errors.count("--resume continues with"), errors.count("interrupted\n")) == (1, 0)
    assert not other.is_running()
    run = started("--resume")
    [other] = others(run)
    other.kill()
    output, errors = run.communicate()
    assert (run.returncode, output) == (4, ""), errors
    assert errors.count("error[E405]: process 1 of 2 (numbered from 0) was ended by SIGKILL") == 1
    assert f"pid {other.pid}" in errors
    assert "Traceback" not in errors
    kept = len(list(PARTIAL.glob("answers-*")))
    assert 2 <= kept < 8
    treeopt(*SLOW, "--resume")
    assert Path("calibration.safetensors").read_bytes() == Path("unbroken.safetensors").read_bytes()
    assert not PARTIAL.exists()


def test_devices_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """More processes than accelerators are E402 with both numbers, and any number is allowed on a CPU."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    for device in ("auto", "cuda"):
        check_device(device, 2)
        with pytest.raises(TreeoptError, match="cannot be used") as caught:
            check_device(device, 3)
        assert caught.value.code is Code.DEVICE_UNUSABLE
        assert caught.value.why == "--nproc 3 needs 3 devices, and there are 2"
    check_device("cpu", 3)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    check_device("auto", 3)


def test_refusals_start_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A numbered device, a missing GPU, and a range of --nproc are refused before a process is started."""
    assert "give --device cuda" in treeopt("calibrate", "--nproc", "2", "--device", "cuda:1", status=2).stderr
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 0)
    assert error_number(treeopt("calibrate", "--nproc", "2", "--device", "cuda", status=4)) == "E402"
    assert error_number(treeopt("calibrate", "--nproc", "2", "--device", "foo", status=4)) == "E402"
    treeopt("learn", "--nproc", "0", status=2)
    for command in (["calibrate"], ["learn"], ["distill", "--model", "pocket", "--self-talk", "4", "-o", "d.jsonl"]):
        text = treeopt(*command, "--nproc", "2", "--batch-size", "auto", status=2).stderr
        assert "a --batch-size that is a number" in " ".join(text.split())
    assert not list(Path().iterdir())


def test_torchrun_with_nproc_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of torchrun start no others; and where torchrun cannot be reached the error is E405."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    alone = error_of("E405", "calibrate", status=4)
    assert "WORLD_SIZE is 2" in alone
    assert "unset WORLD_SIZE" in alone
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    given = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.port), "RANK": "0"}
    for name, value in {**given, "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(name, value)
    assert "leave out --nproc" in treeopt("calibrate", "--nproc", "2", status=2).stderr


def without_seconds(value: Any) -> Any:
    """A result of `--json` without all that depends on the clock."""
    timed = ("seconds", "second", "recommended", "speedup", "overhead", "prefill", "latency", "warnings")
    if isinstance(value, dict):
        kept = {name: without_seconds(one) for name, one in value.items()}
        return {name: one for name, one in kept.items() if not any(word in name for word in timed)}
    return [without_seconds(one) for one in value] if isinstance(value, list) else value


TEXTS = ["--limit", "3", "--max-new-tokens", "5"]


@looped(
    "command",
    [
        ["validate", *TEXTS, "--acceptance", "sample", "--repeats", "2", "--draws", "12"],
        ["compare", "--test-limit", "3", "--max-new-tokens", "8", "--methods", "recycling", "--repeats", "1"],
    ],
)
@pytest.mark.slow
def test_decoding_in_two_processes_gives_the_same_figures(command: list[str]) -> None:
    """Drawn texts, tests, tokens per step and quality are those of one process, and are printed once."""
    if command[0] != "compare":
        command = [*command, "--tree", "mc_sim_7b_63"]
    one, two = (
        without_seconds(json.loads(treeopt(*command, "--json", *more).stdout)) for more in ([], ["--nproc", "2"])
    )
    assert one == two
