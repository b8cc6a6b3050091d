"""Which device is taken, simulated: no test needs one, and the suite runs with any build of torch."""

from __future__ import annotations

import pytest
import torch
from looped import looped
from machines import accelerator

from treeopt.errors import Code, TreeoptError
from treeopt.models.devices import pick_device


@pytest.fixture(autouse=True)
def no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """One process, whatever started the tests."""
    monkeypatch.delenv("LOCAL_RANK", raising=False)


@looped("kind", ["cuda", "mps", "xpu"])
def test_auto_is_the_cpu_where_the_builds_accelerator_is_not_there(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA build of torch on a machine without a GPU runs on the CPU."""
    accelerator(monkeypatch, kind=kind, count=0)
    assert pick_device("auto") == torch.device("cpu")


@looped("rank, index", [(None, 0), ("0", 0), ("1", 1)])
def test_auto_is_the_accelerator_of_the_processs_rank(
    rank: str | None, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An accelerator that is there is taken, by the process's number on its machine."""
    accelerator(monkeypatch, kind="cpu", count=2)  # the CPU stands for it: its tensors can be made here
    if rank is not None:
        monkeypatch.setenv("LOCAL_RANK", rank)
    assert pick_device("auto") == torch.device("cpu", index)


@looped(
    "name, rank, expected",
    [("cuda", "1", "cuda:1"), ("cuda:0", "1", "cuda:0"), ("cuda", None, "cuda"), ("cpu", "1", "cpu")],
)
def test_kind_of_the_accelerator_is_the_one_of_the_processs_rank(
    name: str, rank: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--device cuda` in several processes gives each its own; a device with a number is taken as it is."""
    accelerator(monkeypatch, kind="cuda", count=2)
    made: list[torch.device] = []
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda size, device: (made.append(device), empty(size))[1])
    if rank is not None:
        monkeypatch.setenv("LOCAL_RANK", rank)
    assert pick_device(name) == torch.device(expected)
    assert made == [torch.device(expected)]


def test_auto_says_where_an_accelerator_that_is_there_does_not_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that cannot hold a number is an error with a way out, not another device in silence."""
    accelerator(monkeypatch, kind="cuda", count=1)

    def broken(_size: int, *, device: torch.device) -> torch.Tensor:
        raise RuntimeError(f"CUDA error: {device} is busy\nadvice")

    monkeypatch.setattr(torch, "empty", broken)
    with pytest.raises(TreeoptError, match="cuda:0") as caught:
        pick_device("auto")
    assert caught.value.code is Code.DEVICE_UNUSABLE
    assert (caught.value.why, caught.value.fix) == ("CUDA error: cuda:0 is busy", "--device cpu")


def test_rank_beyond_the_devices_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """More processes than devices end in an error that counts both."""
    accelerator(monkeypatch, kind="cuda", count=2)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(TreeoptError, match="cuda:2") as caught:
        pick_device("auto")
    assert caught.value.code is Code.DEVICE_UNUSABLE
    assert "LOCAL_RANK=2" in caught.value.why
    assert "there are 2 devices" in caught.value.why
    assert "--nproc-per-node 2" in caught.value.fix


def test_rank_without_accelerator_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several processes on a machine without accelerators share its CPU."""
    accelerator(monkeypatch, kind="cuda", count=0)
    monkeypatch.setenv("LOCAL_RANK", "7")
    assert pick_device("auto") == torch.device("cpu")


@looped("name", ["meta", "bogus", "hpu", "cuda:99", "cpu:-1", "", "cuda:99999999999", "vulkan"])
def test_device_that_holds_no_numbers_is_refused(name: str) -> None:
    """A device that is unknown, absent, or holds shapes alone is E402."""
    with pytest.raises(TreeoptError) as caught:
        pick_device(name)
    assert caught.value.code is Code.DEVICE_UNUSABLE
    assert caught.value.fix == "--device cpu"


def test_cpu_by_name() -> None:
    """The CPU is always there."""
    assert pick_device("cpu") == torch.device("cpu")
