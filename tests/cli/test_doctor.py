"""`treeopt doctor`: every line, with what it says where something is missing."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import huggingface_hub
import psutil
import pytest
import torch
from huggingface_hub import constants
from looped import looped
from program import treeopt, treeopt_json

from treeopt.cli import doctor_command as environment
from treeopt.cli.doctor_command import FAIL, OK, WARN, Check, check_environment
from treeopt.drafting.kernel import compiled
from treeopt.models import devices as device_module
from treeopt.models import hub

Monkey = pytest.MonkeyPatch


def found(check: Callable[[], Iterator[Check]], name: str) -> Check:
    """The finding of one name."""
    [one] = [one for one in check() if one.name == name]
    return one


def test_this_environment_is_usable() -> None:
    """All checks run here, none fails, and the built-in model accepts drafts."""
    shown = treeopt_json("doctor")
    statuses = {one["name"]: one["status"] for one in shown["checks"]}
    assert shown["usable"]
    assert len(statuses) == len(shown["checks"]) >= 14
    assert {statuses[name] for name in ("torch", "packages", "device", "decoding")} == {OK}
    [decoding] = [one for one in shown["checks"] if one["name"] == "decoding"]
    tokens, steps = (int(word) for word in decoding["found"].split() if word.isdigit())
    assert steps < tokens == environment.TOKENS


def test_failure_exits_with_4(monkeypatch: Monkey) -> None:
    """A check that fails gives the status of the environment, and its remedy; other checks are printed too."""
    findings = (Check("one", OK, "good"), Check("other", FAIL, "bad", "do this"))
    monkeypatch.setattr(environment, "CHECKS", (lambda: iter(findings),))
    result = treeopt("doctor", status=4)
    assert result.stdout.splitlines() == [
        "check\tstatus\tfound",
        "one\tok\tgood",
        "other\tfail\tbad",
        "fail other: do this",
    ]
    assert json.loads(treeopt("doctor", "--json", status=4).stdout)["usable"] is False


def test_exception_in_a_check_is_a_finding() -> None:
    """A broken package is described, and the next check runs."""

    def check_torch() -> Iterator[Check]:
        raise ImportError("libcudart.so.12: cannot open shared object file\nmore")

    one, other = check_environment((check_torch, lambda: iter([Check("other", OK, "")])))
    assert (one.name, one.status) == ("torch", FAIL)
    assert one.found == "ImportError: libcudart.so.12: cannot open shared object file"
    assert one.fix
    assert other.status == OK


def test_old_and_missing_packages(monkeypatch: Monkey) -> None:
    """Each requirement that is not met is a failure with the command that meets it; extras are not required."""
    needs = ["torch>=2.13.0", "numpy>=2.0.0", "nothing-like-this>=1", "peft>=9; extra == 'train'"]
    versions = {"torch": "2.12.1+cpu", "numpy": "2.4.6", "numba": "1", "transformers": "5"}

    def version(name: str) -> str:
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "requires", lambda _name: needs)
    monkeypatch.setattr(importlib.metadata, "version", version)
    checks = {one.name: one for one in environment.check_versions()}
    assert checks["torch"].status == checks["nothing-like-this"].status == FAIL
    assert checks["torch"].found == "2.12.1+cpu; treeopt needs torch>=2.13.0"
    assert checks["torch"].fix == "pip install --upgrade 'torch>=2.13.0'"
    assert checks["numpy"].status == OK
    assert not {"peft", "packages"} & checks.keys()


def test_gpu_that_torch_does_not_see(monkeypatch: Monkey) -> None:
    """An NVIDIA driver with a build of torch for the CPU, or with a driver that is too old."""
    monkeypatch.setattr(device_module, "pick_device", lambda _name: torch.device("cpu"))
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(torch.version, "cuda", None)
    gpu = found(environment.check_device, "gpu")
    assert gpu.status == WARN
    assert "install a build of torch" in gpu.fix
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert "driver" in found(environment.check_device, "gpu").fix
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    assert [one.name for one in environment.check_device()] == ["device"]


def test_too_many_threads(monkeypatch: Monkey) -> None:
    """More threads of torch than cores are a warning with the variable that sets them."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: {0, 1}, raising=False)
    one = found(environment.check_threads, "threads")
    assert (one.status, one.fix) == (WARN, "export OMP_NUM_THREADS=2")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert found(environment.check_threads, "threads").status == OK


@looped(("free", "status"), [(2 * 10**8, FAIL), (2 * 10**9, WARN), (2 * 10**10, OK)])
def test_memory(free: int, status: str, monkeypatch: Monkey) -> None:
    """Too little for the built-in model fails, too little for larger ones is a warning."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=free))
    one = found(environment.check_memory, "memory")
    assert one.status == status
    assert bool(one.fix) == (status != OK)


def test_hub_is_left_alone_in_offline_mode(monkeypatch: Monkey) -> None:
    """No request is sent."""

    def session() -> NoReturn:
        raise AssertionError("a request was sent")

    monkeypatch.setattr(constants, "is_offline_mode", lambda: True)
    monkeypatch.setattr(huggingface_hub, "get_session", session)
    one = found(environment.check_hub, "hub")
    assert one.status == OK
    assert "offline" in one.found


@looped("answers", [True, False])
def test_hub(answers: bool, monkeypatch: Monkey) -> None:
    """A hub that does not answer is a warning."""
    monkeypatch.setattr(constants, "is_offline_mode", lambda: False)
    monkeypatch.setattr(hub, "hub_reachable", lambda: answers)
    one = found(environment.check_hub, "hub")
    assert one.status == (OK if answers else WARN)
    assert ("HF_ENDPOINT" in one.fix) == (not answers)


def test_cache(monkeypatch: Monkey, tmp_path: Path) -> None:
    """A folder that need not exist yet; one that cannot be written and a full disk are warnings."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "a" / "b"))
    assert found(environment.check_cache, "cache").status == OK
    monkeypatch.setattr(shutil, "disk_usage", lambda _place: SimpleNamespace(free=10**6))
    assert "free some space" in found(environment.check_cache, "cache").fix
    monkeypatch.setattr(os, "access", lambda *_given: False)
    one = found(environment.check_cache, "cache")
    assert (one.status, one.fix) == (WARN, "export HF_HOME=FOLDER")


def test_compiler(monkeypatch: Monkey, tmp_path: Path) -> None:
    """Machine code that no folder can hold is compiled at every start."""
    monkeypatch.setattr(compiled, "machine_code_folder", lambda: None)
    assert found(environment.check_compiler, "compiler").status == WARN
    monkeypatch.setattr(compiled, "machine_code_folder", lambda: tmp_path)
    one = found(environment.check_compiler, "compiler")
    assert (one.status, one.found) == (OK, f"machine code is kept in {tmp_path}")


def test_programs(monkeypatch: Monkey) -> None:
    """Graphviz and peft are needed by a few options only."""

    def missing(name: str) -> NoReturn:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(shutil, "which", lambda _name: None)
    monkeypatch.setattr(importlib.metadata, "version", missing)
    checks = list(environment.check_programs())
    assert [(one.name, one.status) for one in checks] == [("dot", WARN), ("peft", WARN)]
    assert "pip install peft" in checks[1].fix
    monkeypatch.setattr(shutil, "which", lambda _name: "/usr/bin/dot")
    assert found(environment.check_programs, "dot") == Check("dot", OK, "/usr/bin/dot")


def test_decoding_that_is_not_lossless(monkeypatch: Monkey) -> None:
    """Another text than that of `generate` is a failure."""
    from treeopt.evaluate import baselines

    wrong = SimpleNamespace(tokens=[1] * environment.TOKENS)
    monkeypatch.setattr(baselines, "with_generate", lambda _base: lambda _prompts, _tokens, _call: [wrong])
    assert found(environment.check_decoding, "decoding").status == FAIL
