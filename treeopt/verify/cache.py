"""A preallocated key-value cache for trees, which is written in place and keeps only the accepted nodes.

The growing cache of `transformers` copies all entries at each step, and its sliding layers drop entries that are needed
after a draft is rejected. Here every layer has the full length, and sliding windows are part of the mask.

With one text, entries are written and moved by slices. In a batch each row continues where its text ends: entry i of a
row is the token at position i, and entries after a row's text are hidden by the mask until they are overwritten.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer


@dataclass
class Store:
    """The data that the layers of a cache share.

    Attributes:
        layers: number of layers, all of one shape and on one device; 0 if unknown.
        entries: int64 [B, n], indices of each row's next entries; None appends.
        width: number of entries that the next forward reads, where `entries` is given.
        stack: keys and values of all layers in one tensor [2 * layers, B, heads, capacity, head size], so that
            entries of all of them move at once.
        taken: number of layers in the stack.
        loose: [1, B, heads, capacity, head size], keys and values of layers that are not in the stack.
    """

    layers: int = 0
    entries: Tensor | None = None
    width: int = 0
    stack: Tensor | None = None
    taken: int = 0
    loose: list[Tensor] = field(default_factory=list)


class TreeLayer(DynamicLayer):
    """One layer's keys and values, [B, heads, capacity, head size], of which the first `length` are in use.

    Buffers start as zeros: masked entries are still multiplied by 0, and 0 * NaN from unset memory would be NaN.
    """

    is_sliding = False

    def __init__(self, capacity: int, store: Store | None = None) -> None:
        self.capacity = capacity
        self.length = 0
        self.store = store or Store()
        self.is_initialized = False
        self.stacked = False  # whether it is in the store's stack

    @property
    def keys(self) -> Tensor:
        return self.key_buffer[:, :, : self.length]

    @property
    def values(self) -> Tensor:
        return self.value_buffer[:, :, : self.length]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True
        store, shape = self.store, (*key_states.shape[:2], self.capacity, key_states.shape[3])
        if store.stack is None and store.layers:
            store.stack = key_states.new_zeros(2 * store.layers, *shape)
        stack, at = store.stack, 2 * store.taken
        if (
            stack is not None
            and at < len(stack)
            and stack.shape[1:] == shape
            and value_states.shape == key_states.shape
            and (stack.dtype, stack.device) == (self.dtype, self.device)
        ):
            store.taken += 1
            self.stacked = True
            self.key_buffer, self.value_buffer = stack[at], stack[at + 1]
            return
        self.key_buffer = key_states.new_zeros(shape)
        self.value_buffer = value_states.new_zeros(*shape[:3], value_states.shape[3])
        store.loose += [self.key_buffer[None], self.value_buffer[None]]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        entries, end = self.store.entries, self.length + key_states.shape[2]
        if entries is None:
            assert end <= self.capacity, f"{end} entries for a cache of {self.capacity}"
            self.key_buffer[:, :, self.length : end] = key_states
            self.value_buffer[:, :, self.length : end] = value_states
        else:
            end = self.store.width
            assert end <= self.capacity, f"{end} entries for a cache of {self.capacity}"
            rows = torch.arange(len(entries), device=entries.device)[:, None]
            self.key_buffer[rows, :, entries] = key_states.transpose(1, 2)
            self.value_buffer[rows, :, entries] = value_states.transpose(1, 2)
        self.length = end
        return self.keys, self.values

    def crop(self, tokens_to_remove: int) -> None:
        assert tokens_to_remove <= 0, "transformers removes entries by a negative count"
        self.length += tokens_to_remove

    def reset(self) -> None:
        self.length = 0

    def get_seq_length(self) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_max_length(self) -> int:
        return self.capacity


class TreeCache(Cache):
    """A stock cache made of `TreeLayer`s of one capacity; works in stock `forward` and `generate` too.

    Args:
        capacity: entries of a row.
        layers: number of layers, if all are on one device; their memory is then one block. 0 otherwise.
    """

    def __init__(self, capacity: int, layers: int = 0) -> None:
        self.store = Store(layers)
        self.capacity = capacity
        super().__init__(layer_class_to_replicate=partial(TreeLayer, capacity=capacity, store=self.store))

    def write_at(self, entries: Tensor | None, width: int) -> None:
        """Make the next forward write at `entries` int64 [B, n] and read `width` entries; None appends."""
        self.store.entries, self.store.width = entries, width

    def truncate(self, length: int) -> None:
        """Drop all entries from `length` on."""
        for layer in self.layers:
            layer.length = length

    def move(self, source: Tensor, start: int | Tensor) -> None:
        """Copy entries in every layer: those at `source[b]` of row b to `start[b]` and the following indices.

        Args:
            source: int64 [B, n], absolute indices, ascending; [n] where there is one row.
            start: int64 [B, 1]; a number where there is one row.
        """
        for block in self._blocks():
            source = source.to(block.device)  # layers may be on several devices
            if isinstance(start, int):
                block[:, :, :, start : start + len(source)] = block.index_select(3, source)
            else:
                rows = torch.arange(len(source), device=block.device)[:, None]
                target = start.to(block.device) + torch.arange(source.shape[1], device=block.device)
                block[:, rows, :, target] = block[:, rows, :, source]

    def select(self, rows: Tensor) -> None:
        """Continue with these rows (int64 [n]) of the batch only."""
        store = self.store
        if store.stack is not None:
            store.stack = store.stack[: 2 * store.taken, rows.to(store.stack.device)]
        store.loose = [block[:, rows.to(block.device)] for block in store.loose]
        stacked, loose = iter(store.stack if store.stack is not None else ()), iter(store.loose)
        for layer in self.layers:  # in the order in which they were added
            if layer.stacked:
                layer.key_buffer, layer.value_buffer = next(stacked), next(stacked)
            else:
                layer.key_buffer, layer.value_buffer = next(loose)[0], next(loose)[0]

    def _blocks(self) -> list[Tensor]:
        """All keys and values, each [layers, B, heads, capacity, head size]."""
        stack = self.store.stack
        return self.store.loose if stack is None else [stack[: 2 * self.store.taken], *self.store.loose]
