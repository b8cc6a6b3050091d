"""Fixed shapes for a compiled forward: every step has the same number of rows and of nodes, and reads the same width.

So `torch.compile` captures the forward once for each number of rows and each capacity of the cache. A smaller tree is
padded with nodes that no other node attends to, and an ended row repeats the inputs of the first row, in its old place
in the cache. Both are cut from the results.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from treeopt.errors import Code, TreeoptError
from treeopt.models.base import Base
from treeopt.models.devices import check_one_device
from treeopt.verify.buffers import Buffers

_CAPTURES = 64  # of one forward: a number of rows and a capacity each; torch's limit of 8 would end in eager mode


def compiled(base: Base, nodes: int) -> Base:
    """The model with a compiled forward, whose inputs must have fixed shapes; on a CPU one for all trees of a size.

    Raises:
        TreeoptError: E401 where there is no C++ compiler, which code for a CPU needs; E402 where the model is divided
            among devices.
    """
    check_one_device(base.model, "a compiled forward", fix="a device that holds the model, or compile=False")
    if base.device.type == "cuda":  # a captured graph belongs to the buffers of one decoder
        return _compiled(base)
    if nodes not in base.compiled:
        if base.device.type == "cpu":
            _check_compiler()
        base.compiled[nodes] = _compiled(base)
    return base.compiled[nodes]


def _check_compiler() -> None:
    """Raise E401 where no C++ compiler is found."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        what = "there is no C++ compiler, which torch.compile needs on a CPU"
        raise TreeoptError(Code.PROGRAM_MISSING, what, fix="install g++ or clang++, or leave out --compile") from error


def _compiled(base: Base) -> Base:
    options: dict[str, Any] = {"dynamic": False, "recompile_limit": _CAPTURES, "isolate_recompiles": True}
    if base.device.type == "cuda":
        options["mode"] = "reduce-overhead"  # CUDA graphs: one launch replays the whole forward
    return dataclasses.replace(base, model=torch.compile(base.model, **options))


def with_standard_strides(values: Tensor) -> Tensor:
    """The tensor with the strides of a new one of its shape, which a capture depends on.

    `contiguous` leaves the strides of dimensions of size 1 as they are.
    """
    strides = [1]
    for size in values.shape[:0:-1]:
        strides.insert(0, strides[0] * size)
    return values if values.stride() == tuple(strides) else values.clone(memory_format=torch.contiguous_format)


def mark_static(*buffers: Tensor) -> None:
    """Declare that compiled forwards get these very buffers: a captured graph writes to them and makes no copies."""
    from torch._dynamo import mark_static_address  # takes a second to import

    for buffer in buffers:
        mark_static_address(buffer)


def padded(tree: Buffers, nodes: int) -> Buffers:
    """The tree with more nodes, as far as a forward reads it: mask and positions.

    The added nodes have depth 0 and attend to the prefix and themselves.
    """
    more = nodes - tree.nodes
    if not more:
        return tree
    mask = F.pad(tree.attention_mask, (0, more, 0, more))
    added = torch.arange(tree.nodes, nodes, device=mask.device)
    mask[..., added, added] = True
    return dataclasses.replace(tree, attention_mask=mask, position_ids=F.pad(tree.position_ids, (0, more)))


class Slots:
    """The rows of a forward whose number does not change, of which only some are in progress.

    Args:
        live: the slot of each row in progress, ascending.
        slots: their number, B.
        device: of the forward's inputs.
    """

    def __init__(self, live: Sequence[int], slots: int, device: torch.device) -> None:
        row_of = dict(zip(live, range(len(live)), strict=True))
        self._row = torch.tensor([row_of.get(slot, 0) for slot in range(slots)], device=device)
        self._live = torch.tensor(list(live), device=device)

    def fill(self, values: Tensor) -> Tensor:
        """The values of each slot: [b, ...] -> [B, ...]; of an ended one, those of the first row."""
        return values.index_select(0, self._row)

    def fill_trees(self, tree: Buffers) -> Buffers:
        """The tree of each slot, as far as a forward reads it."""
        if not tree.per_row:
            return tree
        mask, positions = self.fill(tree.attention_mask), self.fill(tree.position_ids)
        return dataclasses.replace(tree, attention_mask=mask, position_ids=positions)

    def live(self, values: Tensor) -> Tensor:
        """The values of the rows in progress: [B, ...] -> [b, ...]."""
        return values.index_select(0, self._live)
