"""Cache: a stock cache in stock generate, that can also keep nodes scattered over a tree."""

from __future__ import annotations

import pytest
import torch
from tiny import TREE_FAMILIES, tiny_base
from torch import Tensor

from treeopt.verify.cache import TreeCache, TreeLayer


def states(start: int, count: int) -> Tensor:
    """Keys or values [2, 3, count, 4] in which entry i holds start + i everywhere."""
    return (start + torch.arange(count, dtype=torch.float32))[None, None, :, None].expand(2, 3, count, 4)


def filled(count: int, *, capacity: int = 20) -> TreeCache:
    """A cache of two layers with `count` entries numbered from 0; values are the keys plus 100."""
    cache = TreeCache(capacity)
    for layer in range(2):
        cache.update(states(0, count), states(100, count), layer)
    return cache


def entries(cache: TreeCache) -> list[list[float]]:
    """The numbers of the keys in use, a list a layer; checks that values went with their keys."""
    for layer in cache.layers:
        assert torch.equal(layer.values, layer.keys + 100)
        assert torch.equal(layer.keys, layer.keys[:1, :1, :, :1].expand_as(layer.keys))
    return [layer.keys[0, 0, :, 0].tolist() for layer in cache.layers]


@pytest.mark.parametrize("family", TREE_FAMILIES)
def test_tree_cache_stock_generate(family: str) -> None:
    """Stock generate gives the same text on this cache as on its own."""
    base = tiny_base(family, 3)
    ids = torch.arange(25)[None] * 7 % 61
    own = base.generate(ids, torch.ones_like(ids), 30)
    ours = base.generate(ids, torch.ones_like(ids), 30, past_key_values=TreeCache(60))
    assert ours.tolist() == own.tolist()


def test_tree_cache_batched_generate() -> None:
    """Stock generate in a left-padded batch gives the same texts on this cache as on its own."""
    base = tiny_base("llama", 3)
    ids = torch.arange(30).view(2, 15)
    mask = torch.ones_like(ids)
    mask[0, :6] = 0
    ours = base.generate(ids, mask, 12, past_key_values=TreeCache(40))
    assert torch.equal(ours, base.generate(ids, mask, 12))


@pytest.mark.parametrize(
    ("nodes", "left"),
    [
        ([0], [0, 1, 2, 3]),
        ([0, 1, 2], [0, 1, 2, 3, 4, 5]),
        ([0, 2], [0, 1, 2, 3, 5]),
        ([0, 4], [0, 1, 2, 3, 7]),
        ([0, 2, 5, 6], [0, 1, 2, 3, 5, 8, 9]),
        ([0, 1, 2, 6], [0, 1, 2, 3, 4, 5, 9]),
        ([0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]),
    ],
)
def test_move_scattered_nodes(nodes: list[int], left: list[int]) -> None:
    """Of a tree written behind three entries, the accepted nodes come together, in order, in every layer."""
    cache = filled(10)
    cache.move(torch.tensor(nodes) + 3, 3)
    cache.truncate(3 + len(nodes))
    assert entries(cache) == [left, left]
    assert cache.get_seq_length() == len(left)


def test_move_then_update() -> None:
    """What comes after a moved path is written right behind it."""
    cache = filled(10)
    cache.move(torch.tensor([3, 6, 9]), 3)
    cache.truncate(6)
    for layer in range(2):
        cache.update(states(50, 2), states(150, 2), layer)
    assert entries(cache) == [[0, 1, 2, 3, 6, 9, 50, 51]] * 2


def rows_of(cache: TreeCache, layer: int = 0) -> list[list[float]]:
    """The numbers of a layer's keys, a list a row of the batch; checks that values went with their keys."""
    keys, values = cache.layers[layer].keys, cache.layers[layer].values
    assert torch.equal(values, keys + 100)
    return keys[:, 0, :, 0].tolist()


def test_move_rows_apart() -> None:
    """Each row of a batch moves its own entries to its own place."""
    cache = filled(8)
    cache.move(torch.tensor([[2, 5], [4, 7]]), torch.tensor([[2], [3]]))
    for layer in range(2):
        assert rows_of(cache, layer) == [[0, 1, 2, 5, 4, 5, 6, 7], [0, 1, 2, 4, 7, 5, 6, 7]]


def test_update_rows_apart() -> None:
    """A batch writes each row's entries where that row goes on, and reads as wide as the longest needs."""
    cache = filled(4)
    cache.write_at(torch.tensor([[2, 3], [4, 5]]), 6)
    for layer in range(2):
        read, _ = cache.update(states(50, 2), states(150, 2), layer)
        assert read.shape[2] == 6
        assert read[:, 0, :, 0].tolist() == [[0, 1, 50, 51, 0, 0], [0, 1, 2, 3, 50, 51]]


def test_select_rows() -> None:
    """Rows that go on keep their entries, in the order given."""
    cache = filled(3)
    cache.move(torch.tensor([[2], [1]]), torch.tensor([[0], [0]]))
    cache.select(torch.tensor([1]))
    assert rows_of(cache) == [[1, 1, 2]]
    assert cache.layers[0].values.shape[0] == 1


def test_crop_and_reset() -> None:
    """A negative count removes entries from the end, as in transformers; reset removes all."""
    cache = filled(6)
    cache.crop(-2)
    assert entries(cache) == [[0, 1, 2, 3]] * 2
    cache.reset()
    assert cache.get_seq_length() == 0


def test_layer_full() -> None:
    """More entries than the capacity are our own mistake and stop at once."""
    layer = TreeLayer(5)
    layer.update(states(0, 5), states(100, 5))
    with pytest.raises(AssertionError, match="6 entries for a cache of 5"):
        layer.update(states(5, 1), states(105, 1))


def test_layer_unused_entries_zero() -> None:
    """Entries that were never written are zeros: a hidden NaN would still spoil the sum."""
    layer = TreeLayer(8)
    layer.update(states(1, 3), states(101, 3))
    assert not layer.key_buffer[:, :, 3:].any()
    assert not layer.value_buffer[:, :, 3:].any()
