"""The devices that a model runs on: one, or several by accelerate's `device_map`.

A divided model has hooks of accelerate, which move the inputs of each layer to its device. Weights may be offloaded to
host memory or disk: they are on torch's device `meta`, and the hooks load them for each forward.
"""

import contextlib
import importlib.util
import itertools
import os
import threading
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import torch
from accelerate.utils import align_module_device
from torch import Tensor, nn
from transformers import BitsAndBytesConfig, PreTrainedModel

from treeopt.errors import Code, TreeoptError, first_line

_RANK = "LOCAL_RANK"  # number of a process on its machine, set by torchrun


def pick_device(name: str) -> torch.device:
    """A device by name; `auto` is the accelerator of this process where there is a working one, else the CPU.

    Several processes have one device each: the kind of the accelerator alone, such as `cuda`, is the one of this
    process's LOCAL_RANK too.
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
    rank = int(os.environ.get(_RANK, "0"))
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


DeviceMap: TypeAlias = str | Mapping[str, int | str | torch.device]

_POLICIES = ("auto", "balanced", "balanced_low_0", "sequential")  # by which accelerate makes a map
_HOST = ("cpu", "disk")  # places of offloaded weights, where a map has an accelerator too


def placement(
    device: str, device_map: DeviceMap | None, *, load_in_4bit: bool = False
) -> tuple[torch.device, dict[str, Any]]:
    """The device of the first layers, or one that a map names, and the arguments of `from_pretrained` for it."""
    if device_map is not None and device != "auto":
        raise ValueError(f"device is {device!r} and device_map {device_map!r}: give either of them")
    options: dict[str, Any] = {}
    if device_map is None or isinstance(device_map, str):
        place = pick_device("auto" if device_map in _POLICIES else device_map or device)
        if device_map in _POLICIES and place.type != "cpu":
            options["device_map"] = device_map
    else:
        named = [_named(one) for one in dict.fromkeys(device_map.values()) if str(one) != "disk"]
        place = next((one for one in named if one.type != "cpu"), torch.device("cpu"))
        options["device_map"] = dict(device_map)
    if load_in_4bit:
        options = {"device_map": {"": place}} | options | _quantised(place)
    return place, options


def check_placed(model: PreTrainedModel, name: str, device_map: DeviceMap | None) -> None:
    """Check the map that accelerate has made for a model."""
    found = getattr(model, "hf_device_map", {})
    fix = "more or larger GPUs, --dtype bfloat16, or in Python a device_map with some layers on cpu or disk: slow"
    if device_map in _POLICIES:
        left = [part for part, place in found.items() if str(place) in _HOST]
        if left:
            what = f"{len(left)} of {len(found)} parts of {name} do not fit on the accelerators of this machine"
            why = f"accelerate would keep them in host memory or on disk, and load them for each forward: {left[0]}"
            raise TreeoptError(Code.OUT_OF_MEMORY, what, at=f"device_map={device_map!r}", why=why, fix=fix)
        if len(set(found.values())) > 1 and not getattr(model, "_no_split_modules", None):
            what = f"{name} ({type(model).__name__}) cannot be divided among devices"
            why = "its class in transformers has no _no_split_modules, which name the parts that stay on one device"
            raise TreeoptError(
                Code.MODEL_INVALID, what, why=why, fix="--device with one that holds it, or another model"
            )
    owners = {key: model.get_submodule(key.rpartition(".")[0]) for key, one in model.named_parameters() if one.is_meta}
    lost = [key for key, owner in owners.items() if not any(hook.offload for hook in _hooks(owner))]
    if lost:
        what = f"{len(lost)} weights of {name} have no values: {lost[0]} is on the device meta"
        raise TreeoptError(Code.OUT_OF_MEMORY, what, at=f"device_map={device_map!r}", fix=fix)


def check_one_device(model: PreTrainedModel, what: str, fix: str) -> None:
    """Raise E402 for a model that is divided among devices, or offloaded, where `what` needs one device."""
    places = list(dict.fromkeys(devices_of(model)))
    if len(places) > 1 or is_offloaded(model):
        shown = ", ".join(map(str, places)) + (", with offloaded weights" if is_offloaded(model) else "")
        raise TreeoptError(Code.DEVICE_UNUSABLE, f"{what} needs a model on one device", at=f"it is on {shown}", fix=fix)


def is_offloaded(model: nn.Module) -> bool:
    """Whether some weights are loaded from host memory or disk for each forward."""
    return any(weight.is_meta for weight in model.parameters())


def input_device(model: PreTrainedModel) -> torch.device:
    """The device of a model's inputs: that of its embeddings."""
    if not hasattr(model, "hf_device_map"):
        device: torch.device = model.device
        return device
    return next(devices_of(model.get_input_embeddings()))


def devices_of(model: nn.Module) -> Iterator[torch.device]:
    """The device on which each module with weights of its own is run, in the order of the modules."""
    for module in model.modules():
        weight = next(module.parameters(recurse=False), None)
        if weight is not None and not weight.is_meta:
            yield weight.device
        elif weight is not None:  # offloaded: the hook of the module moves its inputs and weights
            places = [hook.execution_device for hook in _hooks(module) if hook.execution_device is not None]
            yield torch.device(places[-1] if places else "meta")


def device_names(model: nn.Module) -> str:
    """The kind of the devices of a model, such as `NVIDIA H200` or `cpu`.

    Of several kinds, which round differently: each with its number of modules, in their order.
    """
    kinds = [_kind(device) for device in devices_of(model)]
    if len(set(kinds)) == 1:
        return kinds[0]
    return ", ".join(f"{kind} ({len(list(run))} modules)" for kind, run in itertools.groupby(kinds))


@contextlib.contextmanager
def kept_before(lm_head: nn.Module, positions: Tensor) -> Iterator[None]:
    """A context in which an LM head reads only the states at these positions of each row, int64 [B, n].

    A stock forward with `logits_to_keep` needs them on the device of the last layer, and accelerate moves them to that
    of another one before. Forwards of other threads are not changed.
    """
    thread = threading.get_ident()

    def keep(_: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if threading.get_ident() != thread:
            return given
        return (torch.take_along_dim(given[0], positions.to(given[0].device)[..., None], dim=1),)

    with lm_head.register_forward_pre_hook(keep):
        yield


def weight_of(model: nn.Module, name: str) -> Tensor:
    """A weight by its name, with its values: one that is offloaded is loaded."""
    owner, _, leaf = name.rpartition(".")
    module = model.get_submodule(owner)
    with align_module_device(module):
        weight: Tensor = getattr(module, leaf)
    return weight


def _hooks(module: nn.Module) -> Iterator[Any]:
    """The hooks of accelerate on a module that place its weights and inputs."""
    hook = getattr(module, "_hf_hook", None)
    for one in getattr(hook, "hooks", (hook,)):
        if hasattr(one, "execution_device") and hasattr(one, "offload"):
            yield one


def _kind(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _named(place: int | str | torch.device) -> torch.device:
    """A device of a map, after checking that it can be used; a number is one of the accelerator's."""
    if isinstance(place, int) and not isinstance(place, bool):
        kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        if kind is None:
            raise unusable(str(place), "there is no accelerator")
        return pick_device(f"{kind.type}:{place}")
    return pick_device(str(place))


def _quantised(place: torch.device) -> dict[str, Any]:
    if place.type != "cuda":
        what = f"a base in 4 bits needs a CUDA device; this one is {place}"
        raise TreeoptError(Code.DEVICE_UNUSABLE, what, fix="leave out --load-in-4bit")
    if importlib.util.find_spec("bitsandbytes") is None:
        what = "a base in 4 bits needs the package bitsandbytes"
        raise TreeoptError(Code.PROGRAM_MISSING, what, fix="pip install bitsandbytes")
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
    return {"quantization_config": config}
