"""A preallocated key-value cache for trees: written in place, and able to keep only the accepted nodes.

`transformers`' own growing cache copies everything at each step, and its sliding layers drop entries that a rejected
draft would need again. Here every layer holds the full length; windows live in the mask.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer


class TreeLayer(DynamicLayer):
    """One layer's keys and values, [B, heads, capacity, head size], of which the first `length` are in use.

    Buffers start as zeros: masked entries are still multiplied by 0, and 0 * NaN from unset memory would be NaN.
    """

    is_sliding = False

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity
        self.length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.key_buffer = key_states.new_zeros(*key_states.shape[:2], self.capacity, key_states.shape[3])
        self.value_buffer = value_states.new_zeros(*value_states.shape[:2], self.capacity, value_states.shape[3])
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, end = self.length, self.length + key_states.shape[2]
        assert end <= self.capacity, f"{end} entries for a cache of {self.capacity}"
        self.key_buffer[:, :, start:end] = key_states
        self.value_buffer[:, :, start:end] = value_states
        self._set_length(end)
        return self.keys, self.values

    def keep(self, start: int, rows: Tensor, length: int) -> None:
        """Of the entries from `start` on keep `rows` (int64 [n], ascending, absolute), moved together, and no more."""
        if self.is_initialized:
            for buffer in (self.key_buffer, self.value_buffer):
                buffer[:, :, start : start + len(rows)] = buffer.index_select(2, rows)
            self._set_length(length)

    def crop(self, tokens_to_remove: int) -> None:
        assert tokens_to_remove <= 0, "transformers removes entries by a negative count"
        self._set_length(self.length + tokens_to_remove)

    def reset(self) -> None:
        self._set_length(0)

    def get_seq_length(self) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_max_length(self) -> int:
        return self.capacity

    def _set_length(self, length: int) -> None:
        self.length = length
        if self.is_initialized:
            self.keys, self.values = self.key_buffer[:, :, :length], self.value_buffer[:, :, :length]


class TreeCache(Cache):
    """A stock cache made of `TreeLayer`s of one capacity; works in stock `forward` and `generate` too."""

    def __init__(self, capacity: int) -> None:
        super().__init__(layer_class_to_replicate=partial(TreeLayer, capacity=capacity))

    def keep(self, start: int, nodes: list[int]) -> None:
        """After a tree forward whose nodes were written from `start` on: keep the accepted `nodes`, root first."""
        length = start + len(nodes)
        if nodes[-1] == len(nodes) - 1:  # already in place: nodes ascend, so they are 0 .. n-1
            for layer in self.layers:
                layer.crop(length - layer.get_seq_length())
            return
        rows: dict[torch.device, Tensor] = {}
        for layer in self.layers:
            if layer.is_initialized:
                if layer.device not in rows:
                    rows[layer.device] = torch.tensor(nodes, device=layer.device) + start
                layer.keep(start, rows[layer.device], length)
