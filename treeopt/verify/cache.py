"""A key-value cache for trees, which is written in place and keeps only the accepted nodes.

The growing cache of `transformers` copies all entries at each step, and its sliding layers drop entries that are needed
after a draft is rejected. Here every layer has the full length, and sliding windows are part of the mask. The capacity
is one of a few sizes (`bucket`); a longer text moves to the next one.

With one text, entries are written and moved by slices. In a batch each row continues where its text ends: entry i of a
row is the token at position i, and entries after a row's text are hidden by the mask until they are overwritten.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from treeopt.errors import Code, TreeoptError
from treeopt.models.base import Base
from treeopt.models.devices import check_one_device
from treeopt.verify.buffers import Buffers

ALIGN = 8  # elements: attention kernels read masks in groups of this many
_STEP = 256  # entries between the smallest buckets
_STEPS_UP_TO = 1024  # beyond, buckets are 3/4 and 4/4 of powers of 2


def bucket(entries: int) -> int:
    """The capacity of a cache for so many entries a row: 256, 512, 768, 1024, 1536, 2048, 3072, ...

    Few sizes mean few captures of a compiled forward. At most 255 entries, or a third, are unused.
    """
    if entries <= _STEPS_UP_TO:
        return _STEP * max(1, -(-entries // _STEP))
    power = 1 << (entries - 1).bit_length()
    return power * 3 // 4 if entries <= power * 3 // 4 else power


def aligned(entries: int) -> int:
    """The least multiple of `ALIGN` that is not below `entries`."""
    return -(-entries // ALIGN) * ALIGN


class Arena:
    """The memory of one cache at a time, which later caches use again, whatever their rows and capacity.

    A block of one shape always begins at the same address, unless a larger one was needed in between.
    """

    def __init__(self) -> None:
        self._memory: dict[int, Tensor] = {}

    @property
    def bytes(self) -> int:
        """Bytes of all memory held."""
        return sum(memory.nbytes for memory in self._memory.values())

    def zeros(self, number: int, shape: Sequence[int], like: Tensor) -> Tensor:
        """Block `number` as zeros of this shape, with dtype and device of `like`.

        Masked entries are multiplied by 0, and 0 * NaN, from unset memory or from an earlier text, would be NaN.
        """
        size = math.prod(shape)
        if self._holds(number, size, like):
            return self._memory[number][:size].view(*shape).zero_()
        self._memory.pop(number, None)  # freed first, unless a cache still reads it
        self._memory[number] = like.new_zeros(size)
        return self._memory[number].view(*shape)

    def grown(self, number: int, block: Tensor, capacity: int, used: int) -> Tensor:
        """Block `number` with another capacity and the same first `used` entries: [.., capacity, head size]."""
        shape = (*block.shape[:-2], capacity, block.shape[-1])
        entries = block[..., :used, :]
        if self._holds(number, math.prod(shape), block):
            entries = entries.clone()  # both blocks begin at the same address
        larger = self.zeros(number, shape, block)
        larger[..., :used, :] = entries
        return larger

    def _holds(self, number: int, size: int, like: Tensor) -> bool:
        memory = self._memory.get(number)
        return (
            memory is not None
            and len(memory) >= size
            and (memory.dtype, memory.device) == (like.dtype, like.device)
            and memory.is_inference() == torch.is_inference_mode_enabled()  # such tensors are not written outside
        )


@dataclass
class Store:
    """The data that the layers of a cache share.

    Blocks hold keys and values [m, B, heads, capacity, head size]: the first those of all layers of one shape
    (m = 2 * layers), so that entries of all of them move at once, the others those of other layers (m = 1).
    """

    arena: Arena = field(default_factory=Arena)
    layers: int = 0  # all of one shape and on one device; 0 if unknown
    whole: bool = False  # forwards with `entries` read the whole capacity: no number in them changes between steps
    entries: Tensor | None = None  # int64 [B, n], indices of each row's next entries; None appends
    rows: Tensor | None = None  # int64 [B, 1], the numbers of the rows, where `entries` is given
    width: int = 0  # of entries that the next forward reads at least; unused ones are hidden by its mask
    blocks: list[Tensor] = field(default_factory=list)
    taken: int = 0  # number of layers in the first block, where it is that of several
    moved: dict[torch.device, tuple[Tensor, Tensor]] = field(default_factory=dict)  # both on other layers' devices

    def indices(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """`entries` and `rows` on the device of a layer."""
        assert self.entries is not None
        assert self.rows is not None
        if self.entries.device == device:
            return self.entries, self.rows
        if device not in self.moved:
            self.moved[device] = self.entries.to(device), self.rows.to(device)
        return self.moved[device]

    def places(self, keys: Tensor, values: Tensor, capacity: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Block and index in it for a new layer's keys and values."""
        shape = (*keys.shape[:2], capacity, keys.shape[3])
        alike = values.shape == keys.shape
        if not self.blocks and alike and self.layers:
            self.blocks.append(self.arena.zeros(0, (2 * self.layers, *shape), keys))
        at, kind = 2 * self.taken, (shape, keys.dtype, keys.device)
        room = [block for block in self.blocks[:1] if alike and at + 1 < len(block)]
        if room and (room[0].shape[1:], room[0].dtype, room[0].device) == kind:
            self.taken += 1
            return (0, at), (0, at + 1)
        number = len(self.blocks)
        for one in (keys, values):
            shape = (1, *one.shape[:2], capacity, one.shape[3])
            self.blocks.append(self.arena.zeros(len(self.blocks), shape, one))
        return (number, 0), (number + 1, 0)


class TreeLayer(DynamicLayer):
    """One layer's keys and values, [B, heads, capacity, head size], of which the first `length` are in use."""

    is_sliding = False

    def __init__(self, capacity: int, store: Store | None = None) -> None:
        self.capacity = capacity
        self.length = 0
        self.store = store or Store()
        self.is_initialized = False

    @property
    def keys(self) -> Tensor:
        return self.key_buffer[:, :, : self.length]

    @property
    def values(self) -> Tensor:
        return self.value_buffer[:, :, : self.length]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.device, self.is_initialized = key_states.device, True
        self.places = self.store.places(key_states, value_states, self.capacity)
        self.attach()

    def attach(self) -> None:
        """Read the buffers of the store anew, after its blocks were replaced."""
        (keys, at), (values, next_at) = self.places
        self.key_buffer, self.value_buffer = self.store.blocks[keys][at], self.store.blocks[values][next_at]
        if self.store.whole:  # a captured graph then writes to these addresses, and copies no cache
            from torch._dynamo import mark_static_address  # takes a second to import

            mark_static_address(self.key_buffer)
            mark_static_address(self.value_buffer)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        store = self.store
        if store.entries is not None and store.whole:
            # Compiled code: nothing here may depend on a number that changes between steps.
            self._scatter(key_states, value_states)
            return self.key_buffer, self.value_buffer
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, count = self.length, key_states.shape[2]
        read = max(start + count, store.width) if store.entries is None else store.width
        assert read <= self.capacity, f"{read} entries for a cache of {self.capacity}"
        if store.entries is None:
            self.key_buffer.narrow(2, start, count).copy_(key_states)
            self.value_buffer.narrow(2, start, count).copy_(value_states)
            self.length = start + count
        else:
            self._scatter(key_states, value_states)
            self.length = read
        return self.key_buffer.narrow(2, 0, read), self.value_buffer.narrow(2, 0, read)

    def _scatter(self, key_states: Tensor, value_states: Tensor) -> None:
        entries, rows = self.store.indices(key_states.device)
        if len(key_states) == 1:
            self.key_buffer.index_copy_(2, entries[0], key_states.to(self.key_buffer.dtype))
            self.value_buffer.index_copy_(2, entries[0], value_states.to(self.value_buffer.dtype))
        else:
            # Under autocast keys and values may be of two dtypes.
            self.key_buffer[rows, :, entries] = key_states.transpose(1, 2).to(self.key_buffer.dtype)
            self.value_buffer[rows, :, entries] = value_states.transpose(1, 2).to(self.value_buffer.dtype)

    def get_seq_length(self) -> int | Tensor:
        store = self.store
        return store.entries[0, 0] if store.whole and store.entries is not None else self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0


class TreeCache(Cache):
    """A stock cache of `TreeLayer`s of one capacity; `layers` and `whole` are those of `Store`."""

    def __init__(self, capacity: int, layers: int = 0, arena: Arena | None = None, *, whole: bool = False) -> None:
        self.store = Store(arena or Arena(), layers, whole)
        self.capacity = capacity
        super().__init__(layer_class_to_replicate=partial(TreeLayer, capacity=capacity, store=self.store))

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        while len(self.layers) <= layer_idx:
            self.layers.append(TreeLayer(self.capacity, self.store))
        return self.layers[layer_idx].update(key_states, value_states, *args, **kwargs)

    def write_at(self, entries: Tensor | None, width: int) -> None:
        """Make the next forward write at `entries` int64 [B, n], None to append, and read `width` entries or more."""
        store = self.store
        store.entries, store.width = entries, width
        store.moved.clear()
        if entries is not None and (store.rows is None or len(store.rows) != len(entries)):
            store.rows = torch.arange(len(entries), device=entries.device)[:, None]

    def truncate(self, length: int) -> None:
        """Drop all entries from `length` on."""
        for layer in self.layers:
            layer.length = length

    def grow(self, capacity: int, used: int) -> None:
        """Change the capacity, and keep the first `used` entries of each row."""
        store = self.store
        store.blocks = [store.arena.grown(i, block, capacity, used) for i, block in enumerate(store.blocks)]
        self.capacity = capacity
        self._attach()

    def move(self, source: Tensor, start: int | Tensor) -> None:
        """Copy entries in every layer: those at `source` int64 [B, n], ascending, to `start` [B, 1] and the following.

        With one row they are [n] and a number.
        """
        for block in self.store.blocks:
            source = source.to(block.device)  # layers may be on several devices
            if isinstance(start, int):
                block.narrow(3, start, len(source)).copy_(block.index_select(3, source))
            else:
                rows = torch.arange(len(source), device=block.device)[:, None]
                target = start.to(block.device) + torch.arange(source.shape[1], device=block.device)
                block[:, rows, :, target] = block[:, rows, :, source]

    def select(self, rows: Sequence[int], used: int) -> None:
        """Continue with these rows (ascending) only, and their first `used` entries: they move down in place."""
        moves = [(row, source) for row, source in enumerate(rows) if row != source]
        with torch.inference_mode():  # in which the blocks may have been made
            for block in self.store.blocks:
                for row, source in moves:
                    block[:, row, :, :used] = block[:, source, :, :used]
        self.store.blocks = [block[:, : len(rows)] for block in self.store.blocks]
        self._attach()

    def branch(self, rows: Tensor) -> None:
        """Replace the rows by copies of rows int64 [n], with all entries."""
        self.store.blocks = [block.index_select(1, rows.to(block.device)) for block in self.store.blocks]
        self.store.rows = None
        self._attach()

    def _attach(self) -> None:
        for layer in self.layers:
            layer.capacity = self.capacity
            layer.attach()


_CAPTURES = 64  # of one forward: a number of rows and a capacity each; torch's limit of 8 would end in eager mode


def compiled(base: Base, nodes: int) -> Base:
    """The model with a compiled forward, whose inputs must have fixed shapes; on a CPU one for all trees of a size.

    E401 where there is no C++ compiler, which code for a CPU needs; E402 where the model is divided among devices.
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
    """With the strides of a new tensor, on which a capture depends; `contiguous` leaves those of size-1 dimensions."""
    strides = [1]
    for size in values.shape[:0:-1]:
        strides.insert(0, strides[0] * size)
    return values if values.stride() == tuple(strides) else values.clone(memory_format=torch.contiguous_format)


def padded(tree: Buffers, nodes: int) -> Buffers:
    """The tree with more nodes, as far as a forward reads it: they have depth 0 and attend to prefix and themselves."""
    more = nodes - tree.nodes
    mask = F.pad(tree.attention_mask, (0, more, 0, more))
    added = torch.arange(tree.nodes, nodes, device=mask.device)
    mask[..., added, added] = True
    return dataclasses.replace(tree, attention_mask=mask, position_ids=F.pad(tree.position_ids, (0, more)))


class Slots:
    """The B rows of a compiled forward, of which only some are in progress: `live` are their slots, ascending.

    So every step has the same number of rows: an ended one repeats the inputs of the first row in progress.
    """

    def __init__(self, live: Sequence[int], slots: int, device: torch.device) -> None:
        row_of = dict(zip(live, range(len(live)), strict=True))
        self._row = torch.tensor([row_of.get(slot, 0) for slot in range(slots)], device=device)
        self._live = torch.tensor(list(live), device=device)

    def fill(self, values: Tensor) -> Tensor:
        """The values of each slot: [b, ...] -> [B, ...]."""
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
