"""A preallocated key-value cache for trees: written in place, and able to keep only the accepted nodes.

`transformers`' own growing cache copies everything at each step, and its sliding layers drop entries that a rejected
draft would need again. Here every layer holds the full length; windows live in the mask.

One text is written and moved by slices. In a batch each row goes on where its own text ends: entry i of a row is the
token at position i, and what lies behind a row's text is hidden by the mask until it is overwritten.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer


@dataclass
class Slots:
    """Where the next forward writes: `entries` int64 [B, n] of each row, read up to `width`; None writes at the end."""

    entries: Tensor | None = None
    width: int = 0


class TreeLayer(DynamicLayer):
    """One layer's keys and values, [B, heads, capacity, head size], of which the first `length` are in use.

    Buffers start as zeros: masked entries are still multiplied by 0, and 0 * NaN from unset memory would be NaN.
    """

    is_sliding = False

    def __init__(self, capacity: int, slots: Slots | None = None) -> None:
        self.capacity = capacity
        self.length = 0
        self.slots = slots or Slots()
        self.is_initialized = False

    @property
    def keys(self) -> Tensor:
        return self.key_buffer[:, :, : self.length]

    @property
    def values(self) -> Tensor:
        return self.value_buffer[:, :, : self.length]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.key_buffer = key_states.new_zeros(*key_states.shape[:2], self.capacity, key_states.shape[3])
        self.value_buffer = value_states.new_zeros(*value_states.shape[:2], self.capacity, value_states.shape[3])
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        entries, end = self.slots.entries, self.length + key_states.shape[2]
        if entries is None:
            assert end <= self.capacity, f"{end} entries for a cache of {self.capacity}"
            self.key_buffer[:, :, self.length : end] = key_states
            self.value_buffer[:, :, self.length : end] = value_states
        else:
            end = self.slots.width
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
    """A stock cache made of `TreeLayer`s of one capacity; works in stock `forward` and `generate` too."""

    def __init__(self, capacity: int) -> None:
        self.slots = Slots()
        super().__init__(layer_class_to_replicate=partial(TreeLayer, capacity=capacity, slots=self.slots))

    def write_at(self, entries: Tensor | None, width: int) -> None:
        """Let the next forward of a batch write at `entries` int64 [B, n] and read up to `width`; None: at the end."""
        self.slots.entries, self.slots.width = entries, width

    def truncate(self, length: int) -> None:
        """Forget all entries from `length` on."""
        for layer in self.layers:
            layer.length = length

    def move(self, source: Tensor, start: int | Tensor) -> None:
        """Copy entries together, in every layer: row b's `source[b]` to `start[b]` and the places behind it.

        Args:
            source: int64 [B, n], absolute and ascending; [n] where there is one row.
            start: int64 [B, 1]; a number where there is one row.
        """
        for layer in self.layers:
            source = source.to(layer.device)  # layers may lie on several devices
            for buffer in (layer.key_buffer, layer.value_buffer):
                if isinstance(start, int):
                    buffer[:, :, start : start + len(source)] = buffer.index_select(2, source)
                else:
                    rows = torch.arange(len(source), device=layer.device)[:, None]
                    target = start.to(layer.device) + torch.arange(source.shape[1], device=layer.device)
                    buffer[rows, :, target] = buffer[rows, :, source]

    def select(self, rows: Tensor) -> None:
        """Go on with these rows (int64 [n]) of the batch only."""
        for layer in self.layers:
            layer.key_buffer = layer.key_buffer[rows.to(layer.device)]
            layer.value_buffer = layer.value_buffer[rows.to(layer.device)]
