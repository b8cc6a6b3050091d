"""Errors for outputs that are not finite, and a check of stock `generate`, to which the argmax of NaN is a token."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from treeopt.errors import Code, TreeoptError


class Named(Protocol):
    """What is read of a `Base`, which imports this module."""

    @property
    def name(self) -> str: ...

    @property
    def model(self) -> nn.Module: ...

    @property
    def dtype_name(self) -> str: ...


def not_finite(base: Named, *, outputs: str = "logits or hidden states") -> TreeoptError:
    """E504 for a base or draft model, with its name."""
    what = f"the model {base.name} gives {outputs} that are not finite"
    why = f"its weights are damaged, or too large for {base.dtype_name}"
    return TreeoptError(Code.NOT_FINITE, what, why=why, fix="--dtype float32, or another copy of the model")


def check_base_finite(base: Named, *outputs: Tensor) -> None:
    """Raise E504 where logits or hidden states of the base model are NaN or +inf."""
    # Some models give -inf for tokens that they never generate.
    if not all((values < torch.inf).all() for values in outputs):
        raise not_finite(base)


@contextmanager
def numbers_only(base: Named, *, sampled: bool) -> Iterator[None]:
    """Raise E504 where a model gives NaN while a block runs stock `generate` on it.

    The largest logit of each forward's last position is NaN where any is. Greedy choices are looked at when the block
    ends, so that no step waits for the device. A draw from NaN ends a process on some devices, so that with `sampled`
    each forward is looked at before its draw.
    """
    largest: list[Tensor] = []

    def look(_model: nn.Module, _inputs: Any, out: Any) -> None:
        largest.append(out.logits[:, -1].amax())  # one number: threads may share a model
        if sampled:
            check()

    def check() -> None:
        if largest and torch.stack(largest).isnan().any():
            raise not_finite(base, outputs="logits")
        largest.clear()

    handle = base.model.register_forward_hook(look)
    try:
        yield
        check()
    finally:
        handle.remove()
