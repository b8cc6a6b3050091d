"""Masks: what each node attends to, and where the mask lies in memory."""

from __future__ import annotations

import itertools

import pytest
import torch
from helpers import random_tree
from looped import looped
from random_trees import compile_parents
from tiny import WINDOW, tiny_base
from torch import Tensor

from treeopt.decode.decoder import TreeDecoder
from treeopt.tree import Tree
from treeopt.verify.buffers import Buffers, compile_tree
from treeopt.verify.masks import Mask, TreeMasks
from treeopt.verify.session import TreeForward

NODES, DEPTH = 13, 5
WINDOWS = [{"full_attention": None}, {"sliding_attention": 3}, {"full_attention": None, "sliding_attention": 9}]


def tree_of(seed: int, nodes: int = NODES) -> Tree:
    return random_tree(seed, nodes=nodes, depth=DEPTH, ranks=4)


def masks_of(windows: dict[str, int | None], capacity: int = 64, *, whole: bool = False) -> TreeMasks:
    made = TreeMasks(tiny_base("llama"), NODES, DEPTH, windows, whole=whole)
    made.reserve(capacity)
    return made


def by_kind(mask: Mask, windows: dict[str, int | None]) -> dict[str, Tensor]:
    """The masks by kind of layer; checks that a model of one kind gets the tensor itself."""
    assert isinstance(mask, Tensor) is (len(windows) == 1)
    return {next(iter(windows)): mask} if isinstance(mask, Tensor) else dict(mask)  # type: ignore[arg-type]


def visible(tree: Tree, length: int, width: int, window: int | None) -> Tensor:
    """bool [N, width], by the definition: node by node, entry by entry."""
    depths = [0, *map(len, tree.paths)]
    seen = torch.zeros(tree.nodes, width, dtype=torch.bool)
    for node, entry in itertools.product(range(tree.nodes), range(length + tree.nodes)):
        inside = entry >= length
        position = length + depths[entry - length] if inside else entry
        near = window is None or position > length + depths[node] - window
        seen[node, entry] = near and (not inside or bool(tree.ancestors[node, entry - length]))
    return seen


def check(mask: Tensor, wanted: list[Tensor]) -> None:
    """The mask [B, 1, N, width] is additive, shows what is wanted, and is aligned."""
    assert torch.equal(mask == 0, torch.stack(wanted)[:, None])
    assert ((mask == 0) | (mask == torch.finfo(mask.dtype).min)).all()
    assert mask.stride(-1) == 1
    assert mask.stride(-2) % 8 == 0
    assert mask.storage_offset() % 8 == 0
    assert mask.data_ptr() % 16 == 0


@looped("windows", WINDOWS)
def test_one_row(windows: dict[str, int | None]) -> None:
    """After prefixes of every length: static trees, per-step trees and smaller trees in turn."""
    masks = masks_of(windows)
    static = [(tree, compile_tree(tree)) for tree in (tree_of(1), tree_of(2, 6), Tree(()))]
    for length in range(1, 49):
        per_step = tree_of(length, 4 + length % 10)
        one = (per_step, compile_parents(torch.tensor([per_step.parents]), DEPTH))
        for tree, compiled in (*static, one):
            width = -(-(length + tree.nodes) // 8) * 8
            found = by_kind(masks.one_row(compiled, length, width), windows)
            for kind, window in windows.items():
                check(found[kind], [visible(tree, length, width, window)])


@looped("windows", WINDOWS)
@looped("own", [False, True])
def test_rows(windows: dict[str, int | None], own: bool) -> None:
    """Rows with prefixes of different lengths, one tree for all of them or one for each."""
    masks = masks_of(windows)
    for length in range(1, 30, 3):
        lengths = [length, 1 + length // 2, 17]
        trees = [tree_of(10 * length + row) for row in range(3)] if own else [tree_of(1)] * 3
        compiled = compile_parents(torch.tensor([tree.parents for tree in trees]), DEPTH)
        compiled = compiled if own else compile_tree(trees[0])
        width = -(-(max(lengths) + NODES) // 8) * 8
        found = by_kind(masks.rows(compiled, torch.tensor(lengths), width), windows)
        for kind, window in windows.items():
            wanted = [visible(tree, row, width, window) for tree, row in zip(trees, lengths, strict=True)]
            check(found[kind], wanted)


@looped("windows", WINDOWS)
def test_whole(windows: dict[str, int | None]) -> None:
    """Masks for the whole capacity have the same strides after a larger cache as before it."""
    masks, tree = masks_of(windows, 32, whole=True), tree_of(1)
    compiled, strides = compile_tree(tree), set()
    for capacity in (32, 64, 32):
        masks.reserve(capacity)
        for length in (1, 6, 32 - NODES):
            found = by_kind(masks.one_row(compiled, length, capacity), windows)
            for kind, window in windows.items():
                check(found[kind], [visible(tree, length, capacity, window)])
            strides |= {(capacity, mask.stride()[-2:]) for mask in found.values()}
    assert strides == {(32, (32, 1)), (64, (64, 1))}


def test_static_tree_is_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of a static tree makes no mask: it is a view, of at most eight buffers."""
    masks, compiled = masks_of({"full_attention": None}), compile_tree(tree_of(1))
    views = [masks.one_row(compiled, length, length + NODES) for length in range(1, 40)]
    assert len({view.untyped_storage().data_ptr() for view in views if isinstance(view, Tensor)}) == 8
    monkeypatch.setattr(torch, "where", None)
    assert isinstance(masks.one_row(compiled, 21, 40), Tensor)


@looped("mode", [True, False])
def test_outside_inference_mode(mode: bool) -> None:
    """Masks made in inference mode are not written outside of it, nor the other way round."""
    masks, trees = masks_of({"sliding_attention": 4}), [compile_tree(tree_of(seed)) for seed in (1, 2)]
    for tree, inference in zip(trees, (mode, not mode), strict=True):
        with torch.inference_mode(inference):
            masks.reserve(64)
            masks.one_row(tree, 9, 24)


def test_autoregressive() -> None:
    """A single token needs no mask where it attends to everything before it."""
    full, sliding, both = (masks_of(windows) for windows in WINDOWS)
    assert full.autoregressive(100, 1) == full.autoregressive(100, 3) == {"full_attention": None}
    assert sliding.autoregressive(2, 1) == {"sliding_attention": None}
    assert sliding.autoregressive(3, 1) == {}
    assert both.autoregressive(8, 2) == dict.fromkeys(WINDOWS[2])
    assert both.autoregressive(9, 1) == {"full_attention": None}
    assert both.autoregressive(9, 2) == {}


def tensors(mask: Mask) -> list[Tensor]:
    """The tensors of a mask."""
    values = [mask] if mask is None or isinstance(mask, Tensor) else list(mask.values())
    return [value for value in values if value is not None]


@looped("compile", [False, True])
@looped("rows", [1, 3])
@looped("family", ["llama", "mistral", "qwen2-mixed", "gemma2"])
@torch.inference_mode()
def test_model_gets_aligned_masks(monkeypatch: pytest.MonkeyPatch, family: str, rows: int, compile: bool) -> None:
    """What a stock model gets is aligned at every step, with as many columns as its layers read entries."""
    monkeypatch.setattr(torch, "compile", lambda model, **_: model)
    forward = TreeForward(tiny_base(family), NODES, DEPTH, compile=compile)
    tree: Buffers = compile_tree(tree_of(3))
    session, _, _ = forward.begin([torch.arange(5 + row) for row in range(rows)], 60)
    for step in range(40):
        if step % 2:
            tree = compile_parents(torch.tensor([tree_of(step + row).parents for row in range(rows)]), DEPTH)
        tokens = torch.full((rows, NODES), step)
        given = session.inputs(tokens, tree)
        for mask in tensors(given["attention_mask"]):
            assert mask.shape == (rows, 1, NODES, session.cache.store.width)
            assert [stride % 8 for stride in mask.stride()[:-1]] == [0, 0, 0]
            assert mask.storage_offset() % 8 == 0
        forward.verifier.forward(**given)
        session.keep([[0]] * rows)
    assert session.lengths[0] == 45 > WINDOW


@looped(("family", "given"), [("llama", 20), ("mistral", WINDOW - 5), ("qwen2-mixed", WINDOW - 5)])
@looped("rows", [1, 2])
@torch.inference_mode()
def test_autoregressive_steps_without_mask(family: str, given: int, rows: int) -> None:
    """A step of one node passes no mask, until a window moves or rows have different lengths."""
    forward, tree = TreeForward(tiny_base(family), 1, 0), compile_tree(Tree(()))
    session, _, _ = forward.begin([torch.arange(5)] * rows, 30)
    masked = []
    for step in range(20):
        inputs = session.inputs(torch.full((rows, 1), step), tree)
        masked.append(len(tensors(inputs["attention_mask"])))
        forward.verifier.forward(**inputs)
        session.keep([[0]] * rows)
    both = 2 if family == "qwen2-mixed" and rows == 2 else 1
    assert masked == [0] * given + [both] * (20 - given)
    if rows == 2:
        session.rewind([9, 8])
        assert tensors(session.inputs(torch.zeros(2, 1, dtype=torch.long), tree)["attention_mask"])


@looped("family", ["llama", "qwen3-mixed", "gemma3"])
def test_eager_attention_makes_the_mask_of_one_node(family: str) -> None:
    """Plain decoding is that of stock `generate`, beyond the windows too: the model gets no mask, and makes its own."""
    base = tiny_base(family, attn_implementation="eager")
    session, _, _ = TreeForward(base, 1, 0).begin([torch.tensor([1, 2, 3])], 4)
    assert session.inputs(torch.tensor([[4]]), compile_tree(Tree(()), base.device))["attention_mask"] is None
    ids = torch.tensor([[1, 2, 3]])
    stock = base.model.generate(ids, max_new_tokens=40, do_sample=False, pad_token_id=0)
    assert TreeDecoder(base, None, Tree(())).generate(ids, 40).tokens == stock[0, 3:].tolist()
