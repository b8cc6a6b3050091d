"""Paths: trees of models that take no tree mask give the texts of stock generate, and a wrong state is found."""

from __future__ import annotations

import copy
import functools
import importlib
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROOT_FOLDER
from helpers import random_tree
from looped import looped
from random_trees import RandomTrees, compile_parents
from refusals import refusal_of
from tiny import random_heads, tiny_base
from torch import Tensor

from treeopt.decode.decoder import TreeDecoder
from treeopt.errors import Code
from treeopt.evaluate.divergence import Cause
from treeopt.evaluate.validate import validate
from treeopt.models.base import Base
from treeopt.texts.encode import Text
from treeopt.tree import Tree
from treeopt.verify import paths as module
from treeopt.verify.buffers import compile_tree
from treeopt.verify.paths import PathForward, PathSession, Ways, fixed_price, rows_of
from treeopt.verify.probe import check_trees, forward_of, probed, route_of
from treeopt.verify.session import TreeForward
from treeopt.verify.states import joined, size_of, taken

VOCAB = 31
PROMPTS = ([3, 8, 5, 1, 9, 9, 2], [4], [7, 7, 20, 11, 30, 2, 6, 1, 5, 13, 17, 21])
NEW = 16
STATES = "qwen3_5_text"  # the family of most tests here: one recurrent layer and one of attention
LAZY, EAGER = math.inf, 0.0  # prices at which nothing, and everything, is committed


@functools.cache
def family(name: str) -> Base:
    """A tiny random model of a family of bench/tiny_families.py."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT_FOLDER / "bench"))
        made: Any = importlib.import_module("tiny_families")
    return Base(made.tiny_model(name, attention="eager"), None, name)


@pytest.fixture(autouse=True, scope="module")
def _probed_before() -> None:
    """The probe finds planted faults itself; it runs before they are planted."""
    check_trees(family(STATES))


@functools.cache
def stock(name: str, number: int) -> list[int]:
    """The text of stock greedy `generate` after one of `PROMPTS`."""
    ids = torch.tensor([PROMPTS[number]])
    text: list[int] = family(name).generate(ids, torch.ones_like(ids), NEW)[0, len(PROMPTS[number]) :].tolist()
    return text


def decoded(name: str, rows: Sequence[int], nodes: int = 12, depth: int = 4, fixed: float | None = None) -> list[Any]:
    """The texts of some of `PROMPTS` in one batch, with random trees that hold the right path every now and then."""
    base = family(name)
    decoder = TreeDecoder(base, None, RandomTrees(base, nodes, depth, seed=nodes))
    if fixed is not None:
        decoder.forward.fixed = fixed
    return [one.tokens for one in decoder.generate([PROMPTS[row] for row in rows], NEW)]


@looped("name", [STATES, "lfm2", "rwkv", "bart"])
def test_texts_are_those_of_stock_generate(name: str) -> None:
    """Recurrent, croppable, a list as state, and one text at a time: alone and in a batch."""
    assert route_of(family(name)) == "paths"
    for rows in ([0], [2], [0, 1, 2]):
        assert decoded(name, rows) == [stock(name, row) for row in rows], rows


@looped("tree", [Tree(()), Tree.chain(4), random_tree(3, nodes=14, depth=4, ranks=4)])
@looped("name", [STATES, "lfm2"])
def test_one_tree_for_all_rows(name: str, tree: Tree) -> None:
    """With plain decoding, chains and a fixed tree of heads the texts are the same."""
    base = family(name)
    made = TreeDecoder(base, random_heads(base, 4), tree).generate([list(prompt) for prompt in PROMPTS], NEW)
    assert [one.tokens for one in made] == [stock(name, row) for row in range(len(PROMPTS))]


@looped("fixed", [LAZY, EAGER, 30.0])
def test_commits_change_no_text(fixed: float) -> None:
    """Nothing committed, everything at once, or by a price in between: the text is the same."""
    assert decoded(STATES, [0, 1, 2], fixed=fixed) == [stock(STATES, row) for row in range(3)]


def tokens_of(seed: int, *shape: int) -> Tensor:
    """Random token ids."""
    return torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def differences(session: PathSession, texts: list[Tensor], base: Base, seed: int, tree: Tree, kept: list[int]) -> float:
    """One step with random tokens: the largest difference from forwards without a cache; keeps the paths to `kept`."""
    tokens = tokens_of(seed, len(texts), tree.nodes)
    logits, hidden = session.verify(tokens, compile_tree(tree))
    paths, most = compile_tree(tree).paths.tolist(), 0.0
    for row, text in enumerate(texts):
        for node, padded in enumerate(paths):
            path = [each for each in padded if each >= 0]
            ids = torch.cat([text, tokens[row, path]])[None]
            right, states = base.forward(ids, attention_mask=torch.ones_like(ids), use_cache=False)
            most = max(most, float((logits[row, node] - right[0, -1]).abs().max()))
            most = max(most, float((hidden[row, node] - states[0, -1]).abs().max()))
    chosen = [[each for each in paths[node] if each >= 0] for node in kept]
    session.keep(chosen)
    for row, path in enumerate(chosen):
        texts[row] = torch.cat([texts[row], tokens[row, path]])
    assert session.lengths == list(map(len, texts))
    return most


TREE = Tree.from_paths([(0,), (1,), (0, 0), (0, 1), (0, 0, 0)])  # nodes 0 root, 1 (0,), 2 (1,), 3 (0,0), 4 (0,1), 5


def scripted(name: str = STATES, fixed: float = LAZY) -> float:
    """The largest difference in four steps: on states, after replay, after commits or more replay, after selection."""
    base = family(name)
    forward = PathForward(base, TREE.nodes, TREE.depth, Ways(joint=True, crop=False), fixed=fixed)
    texts = [torch.tensor(prompt) for prompt in PROMPTS]
    with torch.inference_mode():
        session, _, _ = forward.begin(texts, NEW)
    most = differences(session, texts, base, 1, TREE, [1, 5, 2])  # a path inside, one to the longest leaf, a short one
    most = max(most, differences(session, texts, base, 2, TREE, [3, 0, 4]))
    most = max(most, differences(session, texts, base, 3, TREE, [0, 1, 5]))
    session.select([0, 2])
    del texts[1]
    most = max(most, differences(session, texts, base, 4, TREE, [5, 0]))
    return max(most, differences(session, texts, base, 5, TREE, [0, 0]))


@looped("fixed", [LAZY, EAGER])
def test_every_node_has_the_logits_of_its_path(fixed: float) -> None:
    """Logits and hidden states of all nodes, in every step."""
    assert scripted(fixed=fixed) < 1e-4


def wrong_replicas(caches: Sequence[Any], counts: Sequence[int]) -> Any:
    """Each row but the first has the state of the row before it, which may be of another text."""
    made = joined(caches, counts)
    for layer in made.layers:
        for states in (getattr(layer, "recurrent_states", {}), getattr(layer, "conv_states", {})):
            states.update({key: value.roll(1, 0) for key, value in states.items()})
    return made


def no_copy(caches: Sequence[Any], counts: Sequence[int]) -> Any:
    """The committed state of a single text is advanced instead of a copy of it."""
    return caches[0] if len(caches) == 1 and list(counts) == [1] else joined(caches, counts)


def next_row(cache: Any, row: int, rows: int, *more: Any) -> Any:
    """The state of another path is selected."""
    return taken(cache, (row + 1) % rows, rows, *more)


def test_a_wrong_replica_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows with the state of another text give other logits, and another text."""
    monkeypatch.setattr(module, "joined", wrong_replicas)
    assert scripted() > 0.1
    assert decoded(STATES, [0, 1, 2]) != [stock(STATES, row) for row in range(3)]


def test_a_state_that_is_not_copied_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain that advances the committed state past its rejected drafts gives another text."""
    monkeypatch.setattr(module, "joined", no_copy)
    base, chain, texts = family(STATES), Tree.chain(3), [torch.tensor(PROMPTS[0])]
    forward = PathForward(base, 4, 3, Ways(joint=True, crop=False), fixed=LAZY)
    with torch.inference_mode():
        session, _, _ = forward.begin(texts, NEW)
    assert differences(session, texts, base, 1, chain, [1]) < 1e-4
    assert differences(session, texts, base, 2, chain, [0]) > 0.1


def test_a_wrong_selection_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The state of another path than the accepted one gives other logits, and another text."""
    monkeypatch.setattr(module, "taken", next_row)
    assert scripted() > 0.1
    assert decoded(STATES, [0, 1, 2]) != [stock(STATES, row) for row in range(3)]


def test_a_wrong_replay_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pending tokens in the wrong order give other logits, and another text."""
    keep = PathSession.keep

    def reversed_pending(session: PathSession, paths: Any, on_device: Tensor | None = None) -> None:
        keep(session, paths, on_device)
        for text in session._texts:
            text.pending = text.pending.flip(0)

    monkeypatch.setattr(PathSession, "keep", reversed_pending)
    assert scripted() > 0.1
    assert decoded(STATES, [0, 1, 2], fixed=LAZY) != [stock(STATES, row) for row in range(3)]


def test_a_wrong_commit_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit that loses its last token gives other logits, and another text."""
    extend = PathForward.extend

    def without_the_last(forward: PathForward, text: Any, tokens: Tensor) -> Any:
        committed = text.length
        made = extend(forward, text, tokens[:-1] if committed and len(tokens) > 1 else tokens)
        text.length = committed + len(tokens)
        return made

    monkeypatch.setattr(PathForward, "extend", without_the_last)
    assert scripted() < 1e-4
    assert scripted(fixed=EAGER) > 0.1
    assert decoded(STATES, [0, 1, 2], fixed=EAGER) != [stock(STATES, row) for row in range(3)]


def test_select_of_other_texts_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch that goes on with the wrong texts gives other logits."""
    monkeypatch.setattr(
        PathSession, "select", lambda self, rows: setattr(self, "_texts", [self._texts[-1 - row] for row in rows])
    )
    with pytest.raises(AssertionError):
        assert scripted() < 0.1


def test_commit_is_made_where_replay_costs_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a price of 12 tokens a forward, 3 rows replay 1 and 2 tokens; then a commit is cheaper than another replay.

    The commit of 3 tokens costs 15, the next replay would be of 9: more than the average of (3 + 6 + 15) / 3 = 8. With
    2 tokens pending the next replay, 6, was less than the average of (3 + 14) / 2 = 8.5.
    """
    committed = []
    extend = PathForward.extend

    def noted(forward: PathForward, text: Any, tokens: Tensor) -> Any:
        committed.append(len(tokens))
        return extend(forward, text, tokens)

    monkeypatch.setattr(PathForward, "extend", noted)
    base, texts = family(STATES), [torch.tensor(PROMPTS[0])]
    forward = PathForward(base, TREE.nodes, TREE.depth, Ways(joint=True, crop=False), fixed=12.0)
    with torch.inference_mode():
        session, _, _ = forward.begin(texts, NEW)
    for step in range(4):
        assert differences(session, texts, base, step, TREE, [0]) < 1e-4
    assert committed == [len(PROMPTS[0]), 3]


def test_a_whole_row_is_committed_without_a_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all of the longest row was accepted, its state is the text's: no token is replayed, none is run again."""
    base, texts = family(STATES), [torch.tensor(PROMPTS[0])]
    forward = PathForward(base, TREE.nodes, TREE.depth, Ways(joint=True, crop=False), fixed=LAZY)
    with torch.inference_mode():
        session, _, _ = forward.begin(texts, NEW)
    monkeypatch.setattr(PathForward, "extend", None)
    differences(session, texts, base, 1, TREE, [5])
    assert [len(text.pending) for text in session._texts] == [0]
    assert differences(session, texts, base, 2, TREE, [1]) < 1e-4
    assert [len(text.pending) for text in session._texts] == [2]


@looped("name", [STATES, "lfm2", "rwkv"])
@torch.inference_mode()
def test_rewind_returns_to_the_mark(name: str) -> None:
    """After steps of every kind the same step gives the same logits again, also a second time."""
    base = family(name)
    forward = forward_of(base, TREE.nodes, TREE.depth)
    session, _, _ = forward.begin([torch.tensor(PROMPTS[0])], NEW)
    tree, one = compile_tree(TREE), compile_tree(Tree(()))
    session.verify(tokens_of(0, 1, 6), tree)
    session.keep([[0, 2]])
    mark, lengths = session.mark(), session.lengths
    found = []
    for _ in range(3):
        found.append(session.verify(tokens_of(1, 1, 6), tree)[0])
        session.keep([[0, 1, 3, 5]])
        session.verify(tokens_of(2, 1, 1), one)
        session.keep([[0]])
        session.rewind(mark)
        assert session.lengths == lengths
    for other in found[1:]:
        torch.testing.assert_close(found[0], other, rtol=0, atol=1e-5)


def test_rows_of_a_tree() -> None:
    """Of nodes 0, 1 (0,), 2 (1,), 3 (0,0), 4 (0,1), 5 (0,0,0), whose leaves are 2, 4, 5."""
    made = rows_of(compile_tree(TREE).paths.numpy())
    assert made.nodes.tolist() == [[0, 2, -1, -1], [0, 1, 4, -1], [0, 1, 3, 5]]
    assert made.depth.tolist() == [0, 1, 1, 2, 2, 3]
    for node, (row, depth) in enumerate(zip(made.row, made.depth, strict=True)):
        assert made.nodes[row, depth] == node
    assert max(np.bincount(made.row)) == 2  # of 6 nodes in 3 rows
    assert len(set(zip(made.row.tolist(), made.slot.tolist(), strict=True))) == 6


def test_equal_nodes_are_one_row() -> None:
    """Padding of per-step trees repeats a draft: nodes of equal tokens below one parent are read from one row."""
    paths = compile_parents(torch.tensor([[0, 0, 0, 1]]), 2).paths[0].numpy()
    made = rows_of(paths, np.array([9, 4, 4, 7]))
    assert made.nodes.tolist() == [[0, 1, 3]]
    assert (made.row.tolist(), made.depth.tolist()) == ([0, 0, 0, 0], [0, 1, 1, 2])
    assert made.slot[1] == made.slot[2]


def cache_of(length: int, window: int = 6) -> Any:
    """A made-up cache: entries that grow, entries within a window, a state, numbers, and one tensor under two names."""
    entries = torch.arange(1.0, length + 1).reshape(1, 1, length, 1)
    made = SimpleNamespace(keys=entries, near=entries[:, :, -window:], state=torch.full((1, 2), float(length)))
    made.same, made.seen, made.known, made.sizes = made.keys, length, True, [{"a": torch.tensor(3)}, None, "x"]
    return made


def test_caches_are_joined_and_taken_apart() -> None:
    """Shorter entries are padded on the left; a text's own come back with the tokens of a forward, and no others."""
    caches = [cache_of(3), cache_of(8)]
    made = joined(caches, [2, 1])
    assert made.keys[:, 0, :, 0].tolist() == [[0.0] * 5 + [1, 2, 3]] * 2 + [[1, 2, 3, 4, 5, 6, 7, 8]]
    assert made.near[:, 0, :, 0].tolist() == [[0.0] * 3 + [1, 2, 3]] * 2 + [[3, 4, 5, 6, 7, 8]]
    assert made.state.tolist() == [[3, 3], [3, 3], [8, 8]]
    assert (made.seen, made.known, made.sizes[0]["a"], made.sizes[1:]) == (8, True, 3, [None, "x"])
    assert made.same is made.keys
    made.state += 100  # in place, as forwards do
    made.keys = torch.cat([made.keys, torch.full((3, 1, 2, 1), 9.0)], 2)
    made.near = torch.cat([made.near, torch.full((3, 1, 2, 1), 9.0)], 2)[:, :, -6:]
    made.seen += 2
    first, last = taken(made, 1, 3, caches, 0, 2), taken(made, 2, 3, caches, 1, 2)
    assert first.keys.flatten().tolist() == [1, 2, 3, 9, 9]
    assert first.near.flatten().tolist() == [1, 2, 3, 9, 9]
    assert (first.state.tolist(), first.seen, last.seen) == ([[103, 103]], 5, 10)
    assert last.near.flatten().tolist() == [5, 6, 7, 8, 9, 9]
    assert [cache.state[0, 0].item() for cache in caches] == [3, 8]
    assert size_of(cache_of(3)) == 4 * (3 + 3 + 2) + 8


@looped(("name", "ways"), [(STATES, (True, False)), ("lfm2", (True, True)), ("bart", (False, True))])
def test_the_probe_chooses_by_exactness(name: str, ways: tuple[bool, bool]) -> None:
    """Of the ways that are exact, several texts in one forward first, then cropped states."""
    route = probed(family(name))
    assert route.ways is not None
    assert (route.kind, route.ways.joint, route.ways.crop) == ("paths", *ways)
    assert route.rounding < 1e-5
    assert isinstance(forward_of(family(name), 4, 2), PathForward)


def test_attention_keeps_its_route() -> None:
    """A model whose tree masks are exact is verified by them."""
    base = tiny_base("llama")
    assert (route_of(base), type(forward_of(base, 4, 2))) == ("tree", TreeForward)


def test_single_tokens_that_round_otherwise_are_reported() -> None:
    """Nemotron-H limits time steps in chunks alone: it passes, and the route has the size of the difference."""
    assert 1e-4 < probed(family("nemotron_h")).rounding < 1e-2


@looped(
    ("name", "pattern"), [("mamba", "without by 1."), ("recurrent_gemma", "single tokens"), ("openai-gpt", "paths: ")]
)
def test_models_that_lose_their_state_are_refused(name: str, pattern: str) -> None:
    """A state that is ignored in chunks, one kept elsewhere, and no cache at all, with what was found."""
    error = refusal_of(check_trees, family(name))
    assert error.code is Code.NO_TREES
    assert pattern in error.why


def test_crop_that_leaves_a_state_advanced_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recurrent layers that say they can be cropped are not: the probe replays."""
    base = Base(family(STATES).model, None, STATES)
    monkeypatch.setattr("transformers.cache_utils.LinearAttentionLayer.is_croppable", True)
    monkeypatch.setattr("treeopt.verify.probe._routes", {})
    route = probed(base)
    assert route.ways is not None
    assert not route.ways.crop


def test_a_forward_without_mask_and_positions_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bamba reads its place from neither cache nor state: without them its paths are refused."""
    base = family("bamba")
    check_trees(base)
    monkeypatch.setattr("treeopt.verify.probe._routes", {})
    monkeypatch.setattr(
        PathForward,
        "run",
        lambda self, ids, cache, _mask, _positions, kept: self.base.continued(ids, cache, logits_to_keep=kept),
    )
    assert "of their spread" in refusal_of(check_trees, base).why


@pytest.mark.parametrize("name", [STATES, "bart"])
@torch.inference_mode()
def test_too_much_memory_is_one_error_before_it_is_allocated(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the model, the rows of all texts, also where one runs at a time, and their bytes."""
    base, tree = family(name), compile_tree(TREE)
    session, _, _ = forward_of(base, TREE.nodes, TREE.depth).begin([torch.tensor(prompt) for prompt in PROMPTS], NEW)
    assert isinstance(session, PathSession)
    each = max(size_of(text.cache) for text in session._texts)
    monkeypatch.setattr(module, "joined", None)
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=9 * each))
    error = refusal_of(session.verify, tokens_of(0, len(PROMPTS), TREE.nodes), tree)
    assert error.code is Code.OUT_OF_MEMORY
    assert error.what.startswith(f"{name}: 9 paths of {each:,} bytes")


@torch.inference_mode()
def test_bytes_are_logged_before_they_are_allocated(caplog: pytest.LogCaptureFixture) -> None:
    """Model, rows and bytes once, and again where they are twice as many."""
    base = Base(copy.deepcopy(family(STATES).model), None, STATES)
    caplog.set_level("INFO", logger="treeopt")
    said = []
    for length in (8, 10, 110):
        session, _, _ = PathForward(base, TREE.nodes, TREE.depth, Ways(True, False)).begin([tokens_of(0, length)], 8)
        assert isinstance(session, PathSession)
        each = max(size_of(text.cache) for text in session._texts)
        session.verify(tokens_of(0, 1, 6), compile_tree(TREE))
        said.append(f"{STATES}: 3 paths of {each:,} bytes of state, {3 * each:,} in all")
    assert [record.message for record in caplog.records] == [said[0], said[2]]


def test_rounding_in_bfloat16_is_reported() -> None:
    """Decoding runs; each text that is not that of stock generate differs by a tie or rounding, which is no failure."""
    base = Base(copy.deepcopy(family(STATES).model).to(torch.bfloat16), None, STATES)
    route = probed(base)
    assert route.kind == "paths"
    assert route.rounding <= 0.1
    texts = [Text(f"a:{row}", prompt, []) for row, prompt in enumerate(PROMPTS)]
    tree = random_tree(3, nodes=8, depth=3, ranks=4)
    found = validate(base, random_heads(base, 3).to(torch.bfloat16), tree, texts, max_new_tokens=NEW).judged(base)
    assert {one.cause for one in found.our_differences} <= {Cause.TIE, Cause.ROUNDING}
    assert not found.failures


def test_a_compiled_forward_is_refused() -> None:
    """Batches of paths differ in shape from step to step."""
    error = refusal_of(TreeDecoder, family(STATES), None, RandomTrees(family(STATES), 4, 2), compile=True)
    assert error.code is Code.NO_TREES
    assert "--compile" in error.fix


def test_the_price_of_a_forward_is_a_power_of_two() -> None:
    """At least one token, whatever the clock says."""
    price = fixed_price(family(STATES))
    assert price >= 1
    assert math.log2(price).is_integer()
