"""Pretended devices: tensors of the CPU that say they are on others, and refuse operations of several devices.

`torch.device("privateuseone", i)` is a device of torch without a backend. Here its tensors hold tensors of the CPU, by
which every operation is computed, after a check that all its tensors are on one device, as CUDA requires it. So the
code for models on several devices runs without any, and a tensor that was not moved is an error. What it cannot show:
kernels, memory, and the order of work on real devices.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from accelerate import dispatch_model
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from treeopt.models.base import Base

KIND = "privateuseone"
# These take tensors of other devices: copies, and indices on the CPU.
_COPIES = {"aten::copy_", "aten::_to_copy"}
_INDEXED = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}


class Pretended(torch.Tensor):
    """A tensor of the CPU, `held`, that says it is on another device."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor, device: torch.device) -> Pretended:
        with torch.inference_mode(False):  # views of other tensors cannot be inference tensors
            made: Any = torch.Tensor._make_wrapper_subclass(
                cls,
                held.shape,
                strides=held.stride(),
                storage_offset=held.storage_offset(),
                dtype=held.dtype,
                device=device,
                requires_grad=held.requires_grad,
            )
        made.held = held
        return made

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def tolist(self) -> Any:
        return self.held.tolist()

    def numpy(self, *, force: bool = False) -> Any:
        assert force, "a tensor of another device has no array"
        return self.held.numpy(force=True)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


def is_pretended(device: torch.device | None) -> bool:
    return device is not None and device.type == KIND


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """One operation, on the tensors that are held; its results are on the device of its inputs, or the one it names."""
    if func._can_decompose() and torch.is_inference_mode_enabled():  # where it is not decomposed before
        with _Dispatch():
            return func.decompose(*args, **kwargs)
    name = func._schema.name
    tensors = _tensors((args, kwargs))
    place = _place(name, tensors, args)
    if "device" in kwargs and kwargs["device"] is not None:
        place = torch.device(kwargs["device"])
        if is_pretended(place):
            kwargs = {**kwargs, "device": torch.device("cpu")}
    held = _changed(lambda one: one.held if isinstance(one, Pretended) else one, (args, kwargs))
    found = func(*held[0], **held[1])
    given = {id(one.held): one for one in tensors if isinstance(one, Pretended)}

    def outer(one: Any) -> Any:
        if not isinstance(one, Tensor) or isinstance(one, Pretended):
            return one
        if id(one) in given:  # changed in place
            return given[id(one)]
        return Pretended(one, place) if is_pretended(place) else one

    return _changed(outer, found)


def _place(name: str, tensors: Sequence[Tensor], args: Any) -> torch.device | None:
    """The device of an operation; AssertionError where its tensors are on several."""
    if name in _COPIES:
        return tensors[0].device
    if name in _INDEXED:
        at = {id(index) for index in args[1] if index is not None and index.device.type == "cpu"}
        tensors = [one for one in tensors if id(one) not in at]
    return _check(tensors, name)


def _check(tensors: Sequence[Tensor], name: str = "indexing") -> torch.device | None:
    """The one device of tensors, of which numbers, without dimensions and on the CPU, may be anywhere."""
    places = {one.device for one in tensors if one.ndim or one.device.type != "cpu"}
    assert len(places) <= 1, f"{name} of tensors on {', '.join(map(str, sorted(places, key=str)))}"
    return places.pop() if places else (tensors[0].device if tensors else None)


def _tensors(values: Any) -> list[Tensor]:
    found: list[Tensor] = []
    _changed(lambda one: found.append(one) if isinstance(one, Tensor) else None, values)
    return found


def _changed(change: Callable[[Any], Any], values: Any) -> Any:
    """The values inside of lists, tuples and dictionaries, changed; torch's own function is several times slower."""
    if isinstance(values, (list, tuple)):
        return type(values)([_changed(change, one) for one in values])
    if isinstance(values, dict):
        return {key: _changed(change, one) for key, one in values.items()}
    return change(values)


class _Guard(torch._C._acc.DeviceGuard):
    """What torch's own code calls before it works on a device."""

    def type_(self) -> Any:
        return torch._C._autograd.DeviceType.PrivateUse1


class _Dispatch(TorchDispatchMode):
    """New tensors on pretended devices, and operations of none."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


class _Functions(TorchFunctionMode):
    """Makes the tensors that torch makes of lists without dispatch."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.tensor, torch.as_tensor) and kwargs.get("device") is not None:
            return func(*args, **{**kwargs, "device": None}).to(kwargs["device"])
        if func in (Tensor.__getitem__, Tensor.__setitem__):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            index = tuple(torch.tensor(one).to(args[0].device) if isinstance(one, list) else one for one in index)
            args = (args[0], index, *args[2:])
        return func(*args, **kwargs)


@contextlib.contextmanager
def devices() -> Iterator[tuple[torch.device, torch.device]]:
    """Two pretended devices, in a context in which tensors can be made on them."""
    if not hasattr(torch, KIND):
        module: Any = types.ModuleType(f"torch.{KIND}")
        module._is_in_bad_fork, module.manual_seed_all = (
            lambda: False,
            lambda seed: None,
        )  # torch.manual_seed calls them
        torch._register_device_module(KIND, module)
        torch._C._acc.register_python_privateuseone_device_guard(_Guard())
    with _Dispatch(), _Functions():
        yield torch.device(KIND, 0), torch.device(KIND, 1)


def divided(base: Base, *places: torch.device) -> Base:
    """A base whose layers are on these devices in turn, the embeddings on the first, the LM head on the last."""
    model = copy.deepcopy(base.model)
    layers = [name for name, _ in model.named_modules() if name.rpartition(".")[2].isdigit()]
    where = {name: places[i % len(places)] for i, name in enumerate(layers)}
    for name, module in model.named_modules():
        if name and not any(one.startswith(f"{name}.") or name.startswith(f"{one}.") for one in layers):
            where.setdefault(name, places[0] if isinstance(module, nn.Embedding) else places[-1])
    dispatch_model(model, where, skip_keys=model._skip_keys_device_placement)
    return dataclasses.replace(base, model=model)
