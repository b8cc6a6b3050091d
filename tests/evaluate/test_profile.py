"""Profile: every size is timed by the decoder's own step, and the cache is left as it was. Nothing about speed."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import TREE_FAMILIES, VOCAB, random_heads, tiny_base

from treeopt.drafter import Drafter, Level
from treeopt.drafting.heads import plain_drafts
from treeopt.drafting.ngram_counts import NgramCounts
from treeopt.errors import Code, TreeoptError
from treeopt.evaluate import profile as profile_module
from treeopt.evaluate.profile import CachedText, TimedStep, generic_growth, largest_context, measure_profile
from treeopt.models.base import Base
from treeopt.models.fingerprint import fingerprint
from treeopt.models.layouts import LoadedHeads
from treeopt.tree import Tree
from treeopt.verify.buffers import compile_tree
from treeopt.verify.cache import TreeCache
from treeopt.verify.session import TreeForward

CONTEXT = 20


def loaded_heads(base: Base, num_heads: int = 3) -> LoadedHeads:
    """Random heads, as if they came from a file."""
    heads = random_heads(base, num_heads)
    return LoadedHeads(heads, "heads", Path("heads"), None, fingerprint(heads), ())


@pytest.fixture
def base() -> Base:
    """A tiny llama with a context of 256 tokens."""
    return tiny_base("llama")


def test_profile_holds_every_size(base: Base) -> None:
    """All pairs of batch and context have all sizes, one node and quartiles included."""
    done: list[tuple[int, int, str]] = []
    profile = measure_profile(
        base,
        loaded_heads(base),
        nodes=(9, 4, 9),
        contexts=(30, 12),
        batches=(2, 1),
        repeats=3,
        progress=lambda *told: done.append(told),
    )
    sizes = itertools.product((1, 2), (12, 30), (1, 4, 9))
    assert [p.key for p in profile.points] == list(sizes)
    assert all(0 < p.low <= p.seconds <= p.high for p in profile.points)
    assert [at for at, _, _ in done] == list(range(1, 17))
    assert {(total, note) for _, total, note in done} == {
        (16, f"batch {b}, context {c}") for b in (1, 2) for c in (12, 30)
    }


def test_profile_says_where_it_was_made(base: Base) -> None:
    """Provenance names model, heads, device, dtype, threads, attention, repeats and versions."""
    source = measure_profile(base, loaded_heads(base), nodes=(2,), contexts=(8,), repeats=1).provenance
    assert (source["model"], source["heads"], source["device"]) == ("tiny-llama", "heads", "cpu")
    assert (source["dtype"], source["threads"], source["repeats"]) == ("float32", 1, 1)
    assert source["attention"] in ("sdpa", "eager")
    assert source["versions"].keys() == {"python", "torch", "transformers"}


def test_rounds_interleave_and_the_first_is_not_counted(base: Base, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes take turns in every round; what counts is the last of each turn's four steps, after the first round."""
    order: list[int] = []

    def planted(step: TimedStep, _text: CachedText) -> float:
        order.append(step.tree.nodes)
        return 100.0 if len(order) <= 8 or len(order) % 4 else len(order) / 4

    monkeypatch.setattr(TimedStep, "seconds", planted)
    profile = measure_profile(base, loaded_heads(base), nodes=(1, 5), contexts=(8,), repeats=5)
    assert order == [1, 1, 1, 1, 5, 5, 5, 5] * 6
    assert [(p.nodes, p.low, p.seconds, p.high) for p in profile.points] == [(1, 5.0, 7.0, 9.0), (5, 6.0, 8.0, 10.0)]


@pytest.mark.parametrize("family", TREE_FAMILIES)
@pytest.mark.parametrize("batch", [1, 3])
def test_step_restores_the_cache(family: str, batch: int) -> None:
    """After a step the cache holds the same `context` entries as before, bit by bit, in every layer."""
    base = tiny_base(family)
    text = CachedText(base, batch, CONTEXT, capacity=CONTEXT + 16, seed=1)
    before = [(layer.keys.clone(), layer.values.clone()) for layer in text.cache.layers]
    step = TimedStep(generic_growth(16, 3, VOCAB).tree(), base, random_heads(base, 3), CONTEXT)
    assert step.seconds(text) > 0
    assert text.cache.get_seq_length() == CONTEXT
    for (keys, values), layer in zip(before, text.cache.layers, strict=True):
        assert keys.shape[0] == batch
        assert torch.equal(layer.keys, keys)
        assert torch.equal(layer.values, values)


@pytest.mark.parametrize("family", TREE_FAMILIES)
@torch.inference_mode()
def test_step_is_the_decoders(family: str) -> None:
    """Each row drafts and verifies what the decoder's own parts draft and verify for that row alone."""
    base = tiny_base(family)
    heads, tree = random_heads(base, 3), generic_growth(12, 3, VOCAB).tree()
    text = CachedText(base, 2, CONTEXT, capacity=CONTEXT + 12, seed=4)
    step = TimedStep(tree, base, heads, CONTEXT)
    tokens = step.draft(text)
    logits = step.verify(tokens, text)
    ids = torch.randint(VOCAB, (2, CONTEXT), generator=torch.Generator().manual_seed(4))
    for row in range(2):
        session, first, hidden = TreeForward(base, tree).begin([ids[row]], 20)
        torch.testing.assert_close(text.hidden[row], hidden[0], rtol=1e-4, atol=1e-4)
        alone = heads(hidden, base.lm_head)
        assert tokens[row].tolist() == plain_drafts(first.argmax(-1), alone, compile_tree(tree))[0].tolist()
        torch.testing.assert_close(logits[row], session.verify(tokens[row][None])[0][0], rtol=1e-4, atol=1e-4)


def test_step_keeps_a_deep_path(base: Base, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step pays for moving rows: it keeps the path to the tree's last node, the one-node step the root alone."""
    kept: list[tuple[int, list[int]]] = []
    monkeypatch.setattr(TreeCache, "move", lambda _cache, source, start: kept.append((start, source.tolist())))
    text = CachedText(base, 1, CONTEXT, capacity=CONTEXT + 8, seed=0)
    for tree in (Tree(()), Tree(((0,), (1,), (0, 0), (1, 0), (1, 0, 0)))):
        TimedStep(tree, base, random_heads(base, 3), CONTEXT).seconds(text)
    assert kept == [(CONTEXT, [CONTEXT]), (CONTEXT, [CONTEXT + node for node in (0, 2, 4, 5)])]


def test_one_node_runs_no_heads(base: Base, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step that overheads refer to leaves the heads alone; every other runs the heads its tree needs."""
    heads, depths = random_heads(base, 3), []
    forward = heads.forward
    monkeypatch.setattr(heads, "forward", lambda *given: (depths.append(given[2]), forward(*given))[1])
    text = CachedText(base, 1, CONTEXT, capacity=CONTEXT + 8, seed=0)
    for tree in (Tree(()), Tree.chain(2)):
        TimedStep(tree, base, heads, CONTEXT).seconds(text)
    assert depths == [2]


def test_generic_trees_grow_out_of_each_other() -> None:
    """Every size has its exact number of nodes and contains the smaller ones; depth and width grow with it."""
    growth = generic_growth(256, 5, 32_000)
    trees = [growth.tree(nodes) for nodes in (1, 2, 4, 16, 64, 256)]
    assert [tree.nodes for tree in trees] == [1, 2, 4, 16, 64, 256]
    assert all(set(a.paths) < set(b.paths) for a, b in itertools.pairwise(trees))
    assert trees[-1].depth == 5
    assert trees[4].max_rank >= 3


def test_generic_accuracies_are_probabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accuracies fall by depth and by rank, and no head is right more often than always."""
    tables = []
    monkeypatch.setattr(profile_module, "grow", lambda values, _nodes: tables.append(values.accuracy))
    generic_growth(10_000, 6, 50_000)
    (table,) = tables
    assert table.shape == (6, 10_000)
    assert np.all(np.diff(table, axis=0) < 0)
    assert np.all(np.diff(table, axis=1) < 0)
    assert np.all(table.sum(axis=1) <= 1)


def test_context_must_leave_room_for_the_tree(base: Base) -> None:
    """The largest context that fits is timed, one token more is E503 that names it."""
    loaded = loaded_heads(base)
    room = largest_context(base, loaded.heads, (8,))
    assert room == 256 - generic_growth(8, 3, VOCAB).tree().depth - 1
    assert measure_profile(base, loaded, nodes=(8,), contexts=(room,), repeats=1).contexts == (room,)
    for context in (room + 1, 0):
        with pytest.raises(TreeoptError) as caught:
            measure_profile(base, loaded, nodes=(8,), contexts=(8, context), repeats=1)
        assert caught.value.code is Code.CONTEXT_FULL
        assert f"1 to {room}" in caught.value.fix


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_context_leaves_room_for_the_drafters_levels(family: str) -> None:
    """A drafter's trees go deeper than there are heads; learned positions end where the context does."""
    base = tiny_base(family)
    loaded = loaded_heads(base, 1)
    count = NgramCounts(VOCAB)
    count.add([1, 2, 3, 1, 2], [2, 3, 1, 2, 3])
    drafter = Drafter((Level(),) * 6, 1, 4, 32, count.table())
    room = largest_context(base, loaded.heads, (8,), drafter)
    assert room == base.context - 6 - 1
    found = measure_profile(base, loaded, nodes=(8,), contexts=(room,), repeats=1, drafter=drafter)
    assert found.contexts == (room,)
    with pytest.raises(TreeoptError) as caught:
        measure_profile(base, loaded, nodes=(8,), contexts=(room + 1,), repeats=1, drafter=drafter)
    assert caught.value.code is Code.CONTEXT_FULL
    assert largest_context(base, loaded.heads, (1,), drafter) == base.context - 1


def test_size_without_a_tree_is_refused() -> None:
    """One head of eight tokens makes nine nodes: ten are E230."""
    base = tiny_base("llama", vocab_size=8)
    loaded = loaded_heads(base, 1)
    assert measure_profile(base, loaded, nodes=(9,), contexts=(8,), repeats=1).curve()[0].tolist() == [1, 9]
    with pytest.raises(TreeoptError, match="no tree of 10 nodes: 1 heads of 8 tokens make 9") as caught:
        measure_profile(base, loaded, nodes=(10,), contexts=(8,), repeats=1)
    assert caught.value.code is Code.PROFILE_INVALID


def test_models_and_heads_that_cannot_draft_are_refused(base: Base) -> None:
    """Heads of another size are E212, a recurrent model is E502."""
    with pytest.raises(TreeoptError) as caught:
        measure_profile(tiny_base("llama", hidden_size=48), loaded_heads(base), nodes=(2,), contexts=(8,), repeats=1)
    assert caught.value.code is Code.HEADS_MISMATCH
    recurrent = tiny_base("mamba")
    with pytest.raises(TreeoptError) as caught:
        measure_profile(recurrent, loaded_heads(recurrent), nodes=(2,), contexts=(8,), repeats=1)
    assert caught.value.code is Code.NO_TREES
