"""Session: a tree in one forward gives every node the logits of its own path, on stock models."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from helpers import random_tree
from looped import looped
from random_trees import compile_parents
from refusals import refusal_of
from tiny import TREE_FAMILIES, VOCAB, WINDOW, but_slow, random_heads, tiny_base
from torch import Tensor

from treeopt.decode.decoder import TreeDecoder
from treeopt.errors import Code, TreeoptError
from treeopt.models.base import Base
from treeopt.tree import ROOT, Tree
from treeopt.verify.buffers import Buffers, compile_tree
from treeopt.verify.probe import check_trees, route_of
from treeopt.verify.session import Session, TreeForward, check_lengths

PREFIX = 2 * WINDOW + 5  # longer than any sliding window here


def tokens_of(seed: int, count: int) -> Tensor:
    """Random token ids, int64 [count]."""
    return torch.randint(VOCAB, (count,), generator=torch.Generator().manual_seed(seed))


def path_to(tree: Tree, node: int) -> list[int]:
    """Nodes from the root to `node`."""
    path = [node]
    while path[0] != ROOT:
        path.insert(0, tree.parents[path[0]])
    return path


@torch.inference_mode()
def alone(base: Base, prefix: Tensor, tree: Tree, tokens: Tensor) -> Tensor:
    """Logits [N, V] of each node: a stock forward without cache over the prefix and the node's path."""
    rows = [torch.cat([prefix, tokens[path_to(tree, node)]]) for node in range(tree.nodes)]
    return torch.stack([base.model(row[None], use_cache=False).logits[0, -1] for row in rows])


@looped("family", TREE_FAMILIES)
@looped("seed", range(3))
@torch.inference_mode()
def test_verify_equals_paths(family: str, seed: int) -> None:
    """Every node's logits are those of its path run alone, also behind a prefix longer than the window."""
    base = tiny_base(family, seed)
    tree = random_tree(seed, nodes=(1, 9, 40)[seed], depth=5, ranks=6)
    prefix, tokens = tokens_of(seed, PREFIX), tokens_of(seed + 100, tree.nodes)
    forward = TreeForward(base, tree.nodes, tree.depth)
    session, first, _ = forward.begin([prefix], 20)
    logits, _ = session.verify(tokens[None], compile_tree(tree))
    torch.testing.assert_close(first[0], base.model(prefix[None]).logits[0, -1], rtol=0, atol=1e-4)
    torch.testing.assert_close(logits[0], alone(base, prefix, tree, tokens), rtol=0, atol=1e-4)


@looped("family", TREE_FAMILIES)
@torch.inference_mode()
def test_verify_after_keeps(family: str) -> None:
    """After each of several kept paths, scattered over the tree, the next tree is right as well."""
    base, tree = tiny_base(family, 5), random_tree(5, nodes=12, depth=4, ranks=5)
    rng = np.random.default_rng(5)
    prefix = tokens_of(5, WINDOW - 4)  # the window begins to move during the test
    forward = TreeForward(base, tree.nodes, tree.depth)
    session, _, _ = forward.begin([prefix], 60)
    for step in range(6):
        tokens = tokens_of(10 + step, tree.nodes)
        logits, _ = session.verify(tokens[None], compile_tree(tree))
        torch.testing.assert_close(logits[0], alone(base, prefix, tree, tokens), rtol=0, atol=1e-4)
        kept = int(rng.integers(tree.nodes))
        session.keep([tuple(path_to(tree, kept))])
        prefix = torch.cat([prefix, tokens[path_to(tree, kept)]])
        assert session.lengths == session.ends.tolist() == [len(prefix)]


@looped("family", ["mistral", "qwen2-mixed"])
@torch.inference_mode()
def test_verify_window_inside_tree(family: str) -> None:
    """A window shorter than the tree is deep hides a node's own far ancestors, by position and not by index."""
    base, tree = tiny_base(family, sliding_window=3), random_tree(7, nodes=40, depth=8, ranks=3)
    assert tree.depth >= 6
    prefix, tokens = tokens_of(7, 9), tokens_of(8, tree.nodes)
    forward = TreeForward(base, tree.nodes, tree.depth)
    session, _, _ = forward.begin([prefix], 10)
    torch.testing.assert_close(
        session.verify(tokens[None], compile_tree(tree))[0][0], alone(base, prefix, tree, tokens), rtol=0, atol=1e-4
    )


def own_trees(seed: int, rows: int, nodes: int, depth: int) -> tuple[list[Tree], Buffers]:
    """A random tree of this size for every row, and all of them compiled."""
    trees = [random_tree(10 * seed + row, nodes=nodes, depth=depth, ranks=6) for row in range(rows)]
    return trees, compile_parents(torch.tensor([tree.parents for tree in trees]), depth)


@pytest.mark.parametrize("family", but_slow(TREE_FAMILIES, "llama", "gpt2", "qwen2-mixed"))
@looped("lengths", [[WINDOW - 4], [PREFIX], [PREFIX, 3, WINDOW - 2]])
@torch.inference_mode()
def test_verify_own_trees(family: str, lengths: list[int]) -> None:
    """With a new tree for every row at every step, each node has the logits of its path run alone, and kept paths stay.

    Prefixes are shorter and longer than the window, alone and side by side.
    """
    base, rng = tiny_base(family, 4), np.random.default_rng(len(lengths))
    prefixes = [tokens_of(row, length) for row, length in enumerate(lengths)]
    session, _, _ = TreeForward(base, 14, 4).begin(prefixes, 40)
    for step in range(4):
        trees, compiled = own_trees(step, len(lengths), 14, 4)
        tokens = torch.stack([tokens_of(100 * step + row, 14) for row in range(len(lengths))])
        logits, _ = session.verify(tokens, compiled)
        paths = []
        for row, tree in enumerate(trees):
            wanted = alone(base, prefixes[row], tree, tokens[row])
            torch.testing.assert_close(logits[row], wanted, rtol=0, atol=1e-4)
            paths.append(tuple(path_to(tree, int(rng.integers(14)))))
            prefixes[row] = torch.cat([prefixes[row], tokens[row, list(paths[row])]])
        session.keep(paths)
        assert session.lengths == session.ends.tolist() == list(map(len, prefixes))


@looped("family", ["llama", "qwen2-mixed"])
@torch.inference_mode()
def test_verify_one_tree_as_one_for_each_row(family: str) -> None:
    """One compiled tree for all rows gives what the same tree compiled for each row gives, bit for bit."""
    base, tree = tiny_base(family), random_tree(3, nodes=12, depth=4, ranks=4)
    prefixes, tokens = [tokens_of(1, PREFIX), tokens_of(2, 6)], tokens_of(3, 24).view(2, 12)
    shared, _, _ = TreeForward(base, 12, 4).begin(prefixes, 10)
    each, _, _ = TreeForward(base, 12, 4).begin(prefixes, 10)
    rows = compile_parents(torch.tensor([tree.parents] * 2), 4)
    assert torch.equal(each.verify(tokens, rows)[0], shared.verify(tokens, compile_tree(tree))[0])


@torch.inference_mode()
def test_verify_reads_the_compiled_mask() -> None:
    """One flipped bit of the mask changes the logits of its node, and none but its descendants'."""
    base, tree = tiny_base("llama", 2), random_tree(4, nodes=12, depth=4, ranks=4)
    compiled, tokens = compile_tree(tree), tokens_of(4, 12)[None]
    node = next(n for n in range(2, 12) if not compiled.attention_mask[n, n - 1])
    mask = compiled.attention_mask.clone()
    mask[node, node - 1] = True
    flipped = dataclasses.replace(compiled, attention_mask=mask)
    logits = [
        TreeForward(base, 12, 4).begin([tokens_of(1, 9)], 5)[0].verify(tokens, one)[0][0] for one in (compiled, flipped)
    ]
    same = torch.isclose(*logits, rtol=0, atol=1e-6).all(-1)
    assert not same[node]
    unrelated = [n for n in range(12) if not tree.ancestors[n, node]]
    assert same[unrelated].all()


def capped(base: Base, logits: Tensor) -> Tensor:
    """What the model makes of its LM head's output: Gemma 2 bends large logits."""
    cap = getattr(base.model.config, "final_logit_softcapping", None)
    return logits if cap is None else torch.tanh(logits / cap) * cap


@looped("family", TREE_FAMILIES)
@torch.inference_mode()
def test_verify_hidden_states(family: str) -> None:
    """The hidden states returned are what the LM head reads: it gives the logits back; those of all the prompt."""
    base, tree = tiny_base(family, 1), random_tree(1, nodes=10, depth=3, ranks=4)
    forward = TreeForward(base, tree.nodes, tree.depth)
    session, first, [states] = forward.begin([tokens_of(1, 7)], 9)
    assert len(states) == 7
    logits, hidden = session.verify(tokens_of(2, tree.nodes)[None], compile_tree(tree))
    torch.testing.assert_close(capped(base, base.lm_head(states[-1:])), first)
    torch.testing.assert_close(capped(base, base.lm_head(hidden)), logits)


@looped("attention", ["eager", "sdpa"])
@looped("family", ["llama", "mistral", "qwen2-mixed"])
@torch.inference_mode()
def test_verify_both_attentions(family: str, attention: str) -> None:
    """Eager and sdpa attention read the mask alike."""
    base, tree = tiny_base(family, attn_implementation=attention), random_tree(2, nodes=15, depth=4, ranks=4)
    assert base.model.config._attn_implementation == attention
    prefix, tokens = tokens_of(3, PREFIX), tokens_of(4, tree.nodes)
    forward = TreeForward(base, tree.nodes, tree.depth)
    session, _, _ = forward.begin([prefix], 10)
    torch.testing.assert_close(
        session.verify(tokens[None], compile_tree(tree))[0][0], alone(base, prefix, tree, tokens), rtol=0, atol=1e-4
    )


@looped("compile", [False, True])
@looped("rows", [1, 3])
@torch.inference_mode()
def test_begin_after_numbers_that_are_not_finite(monkeypatch: pytest.MonkeyPatch, rows: int, compile: bool) -> None:
    """Whatever an earlier text left in the cache, the next one in the same memory has the same logits."""
    monkeypatch.setattr(torch, "compile", lambda model, **_: model)
    base, tree = tiny_base("llama"), random_tree(3, nodes=10, depth=3, ranks=4)
    forward, fresh = (TreeForward(base, 10, 3, compile=compile) for _ in range(2))
    session, _, _ = forward.begin([tokens_of(1, 50)] * 4, 10)
    address = session.cache.layers[0].key_buffer.data_ptr()
    for block in session.cache.store.blocks:
        block.fill_(torch.nan)
    del session
    prompts, tokens = [tokens_of(row, 5 + 6 * row) for row in range(rows)], tokens_of(9, 10).expand(rows, -1)
    (session, first, _), (other, expected, _) = (one.begin(prompts, 10) for one in (forward, fresh))
    assert session.cache.layers[0].key_buffer.data_ptr() == address
    assert torch.equal(first, expected)
    compiled = compile_tree(tree)
    assert torch.equal(session.verify(tokens, compiled)[0], other.verify(tokens, compiled)[0])


def test_sessions_at_once_have_their_own_memory() -> None:
    """A session in progress keeps its cache; the memory of one that has ended is used again."""
    forward = TreeForward(tiny_base("llama"), 1, 0)

    def begin(length: int) -> tuple[Session, int]:
        session = forward.begin([tokens_of(1, length)], 5)[0]
        return session, session.cache.layers[0].key_buffer.data_ptr()

    first, address = begin(9)
    held = first.cache.layers[0].keys.clone()
    second, other = begin(7)
    assert other != address
    assert torch.equal(first.cache.layers[0].keys, held)
    del second
    assert begin(5)[1] == other


@looped("compile", [False, True])
@looped("rows", [1, 2])
@torch.inference_mode()
def test_verify_in_a_larger_cache(monkeypatch: pytest.MonkeyPatch, rows: int, compile: bool) -> None:
    """Where a text passes the capacity, its entries go on in a cache of the next one; no more is reserved before."""
    monkeypatch.setattr(torch, "compile", lambda model, **_: model)
    base, tree = tiny_base("llama", 3, max_position_embeddings=600), random_tree(3, nodes=12, depth=3, ranks=4)
    forward = TreeForward(base, tree.nodes, tree.depth, compile=compile)
    prefixes = [tokens_of(row, 230 - 40 * row) for row in range(rows)]
    session, _, _ = forward.begin(prefixes, 300)
    capacities = []
    for step in range(20):
        tokens = torch.stack([tokens_of(100 * step + row, 12) for row in range(rows)])
        logits, _ = session.verify(tokens, compile_tree(tree))
        path = path_to(tree, 11)
        for row, prefix in enumerate(prefixes):
            if step in (0, 8, 19):
                torch.testing.assert_close(logits[row], alone(base, prefix, tree, tokens[row]), rtol=0, atol=1e-4)
            prefixes[row] = torch.cat([prefix, tokens[row, path]])
        session.keep([path] * rows)
        capacities.append(session.cache.capacity)
    assert sorted(set(capacities)) == [256, 512]
    assert capacities[0] == 256


@looped("lengths", [[40], [40, 40], [40, 21]])
@looped("family", TREE_FAMILIES)
@torch.inference_mode()
def test_autoregressive_steps_equal_stock(family: str, lengths: list[int]) -> None:
    """A tree of one node, with and without a mask, gives the logits of a stock forward over the text."""
    base, tree = tiny_base(family, 2), compile_tree(Tree(()))
    prefixes = [tokens_of(row, length) for row, length in enumerate(lengths)]
    session, _, _ = TreeForward(base, 1, 0).begin(prefixes, 30)
    for step in range(3):
        tokens = tokens_of(50 + step, len(lengths))[:, None]
        logits, _ = session.verify(tokens, tree)
        prefixes = [torch.cat([prefix, token]) for prefix, token in zip(prefixes, tokens, strict=True)]
        for row, prefix in enumerate(prefixes):
            stock = base.model(prefix[None], use_cache=False).logits[0, -1]
            torch.testing.assert_close(logits[row, 0], stock, rtol=0, atol=1e-4)
        session.keep([[0]] * len(lengths))


@looped("family", TREE_FAMILIES)
def test_check_trees_accepted(family: str) -> None:
    """The probe lets every family pass whose trees are right."""
    check_trees(tiny_base(family))


def test_check_trees_refused() -> None:
    """A state that is ignored in chunks of several tokens is refused on both routes, and the model is named."""
    error = refusal_of(check_trees, tiny_base("mamba"))
    assert error.code is Code.NO_TREES
    assert "mamba" in error.what


@looped("family", ["mpt", "gpt_neo"])
def test_other_positions_and_windows_take_the_other_route(family: str) -> None:
    """Positions by cache index and windows by cache index are wrong with a tree mask, and right as paths."""
    assert route_of(tiny_base(family)) == "paths"


@looped("attention", ["flex_attention", "flash_attention_2", "other"])
def test_tree_forward_other_attention(monkeypatch: pytest.MonkeyPatch, attention: str) -> None:
    """Attention that does not read a mask of floats is refused before anything runs, with a way out."""
    base = tiny_base("llama")
    monkeypatch.setattr(base.model.config, "_attn_implementation_internal", attention)
    error = refusal_of(TreeForward, base, 1, 0)
    assert error.code is Code.NO_TREES
    assert attention in error.what
    assert "sdpa" in error.fix


@looped(("prompt", "new"), [(40, 1), (1, 40), (30, 11), (41, 0)])
def test_begin_context_full(prompt: int, new: int) -> None:
    """One token more than the context holds is refused, with both numbers and the limit."""
    forward = TreeForward(tiny_base("llama", max_position_embeddings=40), 1, 0)
    error = refusal_of(forward.begin, [tokens_of(0, prompt)], new)
    assert error.code is Code.CONTEXT_FULL
    assert "holds 40" in error.what
    assert f"{prompt} prompt tokens" in error.what


def test_tree_beyond_the_context_has_a_remedy() -> None:
    """A tree that takes the whole window leaves no negative context, and a shorter prompt is not all that helps."""
    error = refusal_of(check_lengths, [3], 2, tiny_base("llama"), -39)
    assert "the model with this tree holds 0" in error.what
    assert "a smaller tree" in error.fix


def test_forward_is_compiled_only_on_request() -> None:
    """By default the model runs as it is, with shapes of any size."""
    base = tiny_base("llama")
    forward = TreeForward(base, 1, 0)
    assert forward.verifier is base
    assert not forward.fixed


def test_begin_empty_prompt() -> None:
    """An empty prompt has no state to draft from and is refused."""
    forward = TreeForward(tiny_base("llama"), 1, 0)
    assert refusal_of(forward.begin, [tokens_of(0, 0)], 5).code is Code.CONTEXT_FULL


@looped("prompt", [20, 39])
@looped("family", ["gpt2", "opt", "llama"])
def test_generate_to_context_end(family: str, prompt: int) -> None:
    """A tree that reaches beyond the last position decodes up to the very end, as stock generate does."""
    limit = {"n_positions" if family == "gpt2" else "max_position_embeddings": 40}
    base, tree = tiny_base(family, **limit), random_tree(1, nodes=40, depth=8, ranks=5)
    assert tree.depth == 8
    ids = tokens_of(2, prompt)[None]
    stock = base.generate(ids, torch.ones_like(ids), 40 - prompt)
    decoded = TreeDecoder(base, random_heads(base, 8), tree).generate(ids, 40 - prompt)
    assert decoded.tokens == stock[0, prompt:].tolist()
    assert len(decoded.tokens) == 40 - prompt


@looped("lengths", [[30], [30, 21, 9]])
@torch.inference_mode()
def test_fixed_shapes_give_the_logits_of_any(monkeypatch: pytest.MonkeyPatch, lengths: list[int]) -> None:
    """Trees padded to the maximum, over the whole capacity and with ended rows, give the logits of the exact shapes."""
    monkeypatch.setattr("treeopt.verify.session.compiled", lambda base, _nodes: base)
    base, prompts = tiny_base("qwen2-mixed", 3), [tokens_of(row, length) for row, length in enumerate(lengths)]
    (fixed, one, _), (exact, other, _) = (
        TreeForward(base, 12, 4, compile=compile).begin(prompts, 40) for compile in (True, False)
    )
    torch.testing.assert_close(one, other, rtol=0, atol=1e-4)
    for step, nodes in enumerate((5, 12, 1, 9)):
        tree = random_tree(step, nodes=nodes, depth=4, ranks=4)
        tokens = torch.stack([tokens_of(10 * step + row, nodes) for row in range(len(fixed.lengths))])
        found, hidden = fixed.verify(tokens, compile_tree(tree))
        expected, states = exact.verify(tokens, compile_tree(tree))
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
        torch.testing.assert_close(hidden, states, rtol=0, atol=1e-4)
        for session in (fixed, exact):
            session.keep([tuple(path_to(tree, nodes - 1))] * len(tokens))
            if step == 1 and len(lengths) > 1:
                session.select([0, 2])
        assert fixed.lengths == exact.lengths


def test_model_whose_context_just_holds_the_probe_is_accepted() -> None:
    """The probe's tree of nine nodes and one token of a prefix fill a context of ten; one of nine is too short."""
    check_trees(tiny_base("llama", max_position_embeddings=10))
    with pytest.raises(TreeoptError, match="too short") as caught:
        check_trees(tiny_base("llama", max_position_embeddings=9))
    assert caught.value.code is Code.NO_TREES


@looped(("lengths", "place"), [([41], ""), ([3, 41], "prompt 1")])
def test_prompt_is_named_where_there_are_several(lengths: list[int], place: str) -> None:
    """The error of one prompt names no number."""
    forward = TreeForward(tiny_base("llama", max_position_embeddings=40), 1, 0)
    assert refusal_of(forward.begin, [tokens_of(0, length) for length in lengths], 5).at == place
