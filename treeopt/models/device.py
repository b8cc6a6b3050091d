"""The device that a model runs on."""

from __future__ import annotations

import os

import torch

from treeopt.errors import Code, TreeoptError, first_line

_RANK = "LOCAL_RANK"  # number of a process on its machine, set by torchrun
_LONG = 10  # more digits than any number of a process has


def pick_device(name: str) -> torch.device:
    """A device by name; `auto` is the accelerator of this process where there is a working one, else the CPU.

    Several processes have one device each: the kind of the accelerator alone, such as `cuda`, is the one of this
    process's LOCAL_RANK too.

    Raises:
        TreeoptError: E402 where there is no such device, it holds no data (meta), or LOCAL_RANK is invalid.
    """
    device = _process_device() if name == "auto" else None
    try:
        device = device or _of_this_process(torch.device(name))
        held = torch.empty(1, device=device)
    except (RuntimeError, AssertionError, ImportError) as error:  # the types vary by backend
        raise unusable(str(device or name), first_line(error)) from error
    if held.is_meta:
        raise unusable(name, "it holds shapes without data")
    return device


def unusable(device: str, why: str, fix: str = "--device cpu") -> TreeoptError:
    """E402 for one device."""
    return TreeoptError(Code.DEVICE_UNUSABLE, f"the device {device!r} cannot be used here", why=why, fix=fix)


def _process_device() -> torch.device:
    """The accelerator of this process's rank, else the CPU."""
    rank = _local_rank()
    # A build of torch names its accelerator even where the machine has none.
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if found is None:
        return torch.device("cpu")
    count = torch.accelerator.device_count()
    if rank >= count:
        why = f"this process has {_RANK}={rank}, and there are {count} devices, counted from 0"
        fix = f"start {count} processes a machine (torchrun --nproc-per-node {count}), or --device cpu"
        raise unusable(f"{found.type}:{rank}", why, fix)
    return torch.device(found.type, rank)


def _of_this_process(device: torch.device) -> torch.device:
    """The device, with the number of this process's where it names the accelerator without one, and a rank is given."""
    if device.index is not None or device.type == "cpu" or _RANK not in os.environ:
        return device
    found = _process_device()
    return found if found.type == device.type else device


def _local_rank() -> int:
    given = os.environ.get(_RANK, "0")
    if not (given.isascii() and given.isdigit() and len(given) < _LONG):
        what = f"the environment variable {_RANK} is {given!r}, not a number from 0"
        fix = f"unset {_RANK}, or start the processes with torchrun"
        raise TreeoptError(Code.DEVICE_UNUSABLE, what, fix=fix)
    return int(given)
