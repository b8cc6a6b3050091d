"""Cache: a stock cache in stock generate, that can also keep nodes scattered over a tree."""

from __future__ import annotations

import pytest
import torch
from looped import looped
from tiny import TREE_FAMILIES, tiny_base
from torch import Tensor

from treeopt.models.base import CACHE
from treeopt.verify.cache import Arena, TreeCache, TreeLayer, bucket, with_standard_strides


def states(start: int, count: int) -> Tensor:
    """Keys or values [2, 3, count, 4] in which entry i holds start + i everywhere."""
    return (start + torch.arange(count, dtype=torch.float32))[None, None, :, None].expand(2, 3, count, 4)


def filled(count: int, *, capacity: int = 20, layers: int = 0, arena: Arena | None = None) -> TreeCache:
    """A cache of two layers with `count` entries numbered from 0; values are the keys plus 100."""
    cache = TreeCache(capacity, layers, arena)
    for layer in range(2):
        cache.update(states(0, count), states(100, count), layer)
    return cache


def entries(cache: TreeCache) -> list[list[float]]:
    """The numbers of the keys in use, a list a layer; checks that values went with their keys."""
    for layer in cache.layers:
        assert torch.equal(layer.values, layer.keys + 100)
        assert torch.equal(layer.keys, layer.keys[:1, :1, :, :1].expand_as(layer.keys))
    return [layer.keys[0, 0, :, 0].tolist() for layer in cache.layers]


@looped("family", TREE_FAMILIES)
def test_tree_cache_stock_generate(family: str) -> None:
    """Stock generate gives the same text on this cache as on its own."""
    base = tiny_base(family, 3)
    ids = torch.arange(25)[None] * 7 % 61
    own = base.generate(ids, torch.ones_like(ids), 30)
    ours = base.generate(ids, torch.ones_like(ids), 30, **{CACHE: TreeCache(60)})
    assert ours.tolist() == own.tolist()


def test_tree_cache_batched_generate() -> None:
    """Stock generate in a left-padded batch gives the same texts on this cache as on its own."""
    base = tiny_base("llama", 3)
    ids = torch.arange(30).view(2, 15)
    mask = torch.ones_like(ids)
    mask[0, :6] = 0
    ours = base.generate(ids, mask, 12, **{CACHE: TreeCache(40)})
    assert torch.equal(ours, base.generate(ids, mask, 12))


@looped(
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


@looped("layers", [0, 2])
def test_select_rows(layers: int) -> None:
    """Rows that go on keep their entries, in the memory that the batch had."""
    cache = filled(3, layers=layers)
    cache.move(torch.tensor([[2], [1]]), torch.tensor([[0], [0]]))
    address, held = cache.layers[0].key_buffer.data_ptr(), cache.store.arena.bytes
    cache.select([1], 3)
    assert rows_of(cache) == rows_of(cache, 1) == [[1, 1, 2]]
    assert cache.layers[0].values.shape[0] == 1
    assert (cache.layers[0].key_buffer.data_ptr(), cache.store.arena.bytes) == (address, held)


@looped("layers", [0, 2])
def test_grow_keeps_entries(layers: int) -> None:
    """A larger cache holds the same entries, then zeros, and takes more."""
    cache = filled(10, capacity=10, layers=layers)
    cache.grow(24, 7)
    cache.truncate(7)
    assert entries(cache) == [list(range(7))] * 2
    for layer in range(2):
        assert not cache.layers[layer].key_buffer[:, :, 7:].any()
        cache.update(states(50, 15), states(150, 15), layer)
    assert entries(cache) == [[*range(7), *range(50, 65)]] * 2


def test_grow_in_place() -> None:
    """Growing within memory of an earlier text overwrites nothing that is still needed."""
    arena = Arena()
    earlier = filled(40, capacity=40, layers=2, arena=arena)
    address = earlier.layers[0].key_buffer.data_ptr()
    cache = filled(10, capacity=10, layers=2, arena=arena)
    cache.grow(32, 10)
    assert cache.layers[0].key_buffer.data_ptr() == address
    assert entries(cache) == [list(range(10))] * 2


def test_arena_is_zeros_again() -> None:
    """A later cache, smaller or of fewer rows, has the same memory and none of the numbers in it."""
    arena = Arena()
    earlier = filled(40, capacity=40, layers=2, arena=arena)
    for block in earlier.store.blocks:
        block.fill_(torch.nan)
    later = TreeCache(24, 2, arena)
    for layer in range(2):
        later.update(states(1, 3)[:1], states(101, 3)[:1], layer)
        buffer = later.layers[layer].key_buffer
        assert buffer.shape == (1, 3, 24, 4)
        assert torch.equal(buffer[:, :, :3], states(1, 3)[:1])
        assert not buffer[:, :, 3:].any()
    assert later.layers[0].key_buffer.data_ptr() == earlier.layers[0].key_buffer.data_ptr()
    assert arena.bytes == sum(block.nbytes for block in earlier.store.blocks)


def test_update_reads_an_aligned_width() -> None:
    """A forward may read more entries than are in use; the rest of them stay where they were."""
    cache = filled(10)
    cache.truncate(5)
    cache.write_at(None, 12)
    read, _ = cache.update(states(50, 2), states(150, 2), 0)
    assert read[0, 0, :, 0].tolist() == [0, 1, 2, 3, 4, 50, 51, 7, 8, 9, 0, 0]
    assert cache.get_seq_length() == 7


@looped("rows", [1, 2])
def test_update_whole(rows: int) -> None:
    """A compiled forward writes at given indices, reads everything, and changes no number of the layer."""
    cache = TreeCache(16, whole=True)
    cache.update(states(0, 6)[:rows], states(100, 6)[:rows], 0)
    cache.write_at(torch.tensor([[4, 5], [2, 3]])[:rows], 16)
    before = vars(cache.layers[0]).copy()
    read, _ = cache.update(states(50, 2)[:rows], states(150, 2)[:rows], 0)
    wanted = [[0, 1, 2, 3, 50, 51], [0, 1, 50, 51, 4, 5]]
    assert read[:, 0, :, 0].tolist() == [row + [0] * 10 for row in wanted][:rows]
    assert all(before[name] is value for name, value in vars(cache.layers[0]).items())
    assert cache.get_seq_length() == 4


@looped(
    ("entries", "capacity"),
    [(1, 256), (256, 256), (257, 512), (1000, 1024), (1025, 1536), (1537, 2048), (2049, 3072), (70_000, 98_304)],
)
def test_bucket(entries: int, capacity: int) -> None:
    """Capacities are few, multiples of 8, and seldom much larger than needed."""
    assert bucket(entries) == capacity


def test_bucket_wastes_little() -> None:
    """No capacity is below what is asked for, and a third at most is unused beyond the smallest."""
    for asked in range(1, 9000):
        assert asked <= bucket(asked) <= max(asked + 255, asked * 1.5)
        assert bucket(asked) % 8 == 0
        assert bucket(bucket(asked)) == bucket(asked)
    assert len({bucket(asked) for asked in range(1, 32_769)}) == 14


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


def test_strides_are_those_of_a_new_tensor() -> None:
    """A transposed tensor, and one whose size-1 dimension has another stride, are copied; others are kept."""
    values = torch.arange(24).view(2, 3, 4)
    assert with_standard_strides(values) is values
    for odd in (values.transpose(0, 2), values[:1, :, 1], torch.empty_strided((1, 2, 4), (99, 4, 1)).zero_()):
        found = with_standard_strides(odd)
        assert found.stride() == torch.empty(odd.shape).stride()
        assert torch.equal(found, odd)
