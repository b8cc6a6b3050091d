"""Per-step trees: whatever tree each row is given at each step, the text is the base model's own."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from chances import ALPHA, counted, p_value, small_base, text_probabilities
from decoding import stock
from random_trees import RandomTrees, compile_parents
from tiny import TREE_FAMILIES, VOCAB, random_heads, tiny_base

from treeopt.decode.decoder import TreeDecoder
from treeopt.decode.rules import Greedy, Rule, Sample, Typical
from treeopt.drafting.heads import HeadsProposer
from treeopt.drafting.interface import Drafts
from treeopt.drafting.plans import StaticTree
from treeopt.errors import Code, TreeoptError
from treeopt.models.base import Base
from treeopt.tree import Tree
from treeopt.verify.buffers import BUFFER_NAMES

NEW = 24
PROMPTS = [[3, 8, 21], [40], list(range(5, 35)), [9] * 17]  # shorter and longer than the sliding windows


def decoder_of(base: Base, *, nodes: int = 16, depth: int = 4, rule: Rule | None = None, seed: int = 0) -> TreeDecoder:
    """A decoder with random trees."""
    return TreeDecoder(base, None, RandomTrees(base, nodes, depth, seed), acceptance=rule)


@pytest.mark.parametrize("family", TREE_FAMILIES)
@pytest.mark.parametrize(("nodes", "depth"), [(40, 6), (2, 1)])
def test_text_is_stocks(family: str, nodes: int, depth: int) -> None:
    """Alone and in a batch of different lengths, each text is that of stock generate, in clearly fewer steps."""
    base = tiny_base(family, nodes)
    decoder = decoder_of(base, nodes=nodes, depth=depth, seed=nodes)
    texts = [stock(base, prompt, NEW) for prompt in PROMPTS]
    batch, alone = decoder.generate(PROMPTS, NEW), decoder.generate(PROMPTS[2], NEW)
    assert [one.tokens for one in batch] == texts
    assert alone.tokens == texts[2]
    for one in (*batch, alone):
        assert sum(one.step_lengths) == NEW
        assert max(one.step_lengths) <= depth + 1
    assert np.mean([length for one in batch for length in one.step_lengths]) > 1.1


def test_one_node_makes_one_token_a_step() -> None:
    """The smallest tree is plain decoding."""
    base = tiny_base("llama", 1)
    decoded = decoder_of(base, nodes=1, depth=0).generate(PROMPTS[0], 9)
    assert (decoded.tokens, decoded.step_lengths) == (stock(base, PROMPTS[0], 9), [1] * 9)


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2"])
def test_rows_end_at_their_own_places(family: str) -> None:
    """Rows that end early leave, and those that go on keep their own trees and texts."""
    base = tiny_base(family, 5)
    texts = [stock(base, prompt, NEW) for prompt in PROMPTS]
    base.model.generation_config.eos_token_id = [texts[0][4], texts[1][11]]
    decoded = decoder_of(base).generate(PROMPTS, NEW)
    assert [one.tokens for one in decoded] == [stock(base, prompt, NEW) for prompt in PROMPTS]
    assert len({len(one.tokens) for one in decoded}) > 1


@pytest.mark.parametrize("prompt", [1, 20, 39])
@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_text_to_the_last_position(family: str, prompt: int) -> None:
    """Trees that reach beyond the last learned position decode up to it, also beside a shorter row."""
    base = tiny_base(family, **{"n_positions" if family == "gpt2" else "max_position_embeddings": 40})
    prompts = [list(range(prompt)), [7]]
    decoded = decoder_of(base, nodes=30, depth=8).generate(prompts, 40 - prompt)
    assert [one.tokens for one in decoded] == [stock(base, one, 40 - prompt) for one in prompts]


@pytest.mark.parametrize("rule", [Sample(0), Typical(0)])
def test_temperature_zero_is_greedy(rule: Rule) -> None:
    """At temperature 0 both other rules give the greedy texts in the same steps."""
    base = tiny_base("llama", 2)
    exact, other = (decoder_of(base, rule=one).generate(PROMPTS, NEW) for one in (Greedy(), rule))
    assert exact == other


def test_typical_runs_lossily() -> None:
    """Above temperature 0 the typical rule accepts drafts too, and fills every budget."""
    decoded = decoder_of(tiny_base("llama", 2), rule=Typical(2.0, epsilon=0.01)).generate(PROMPTS, NEW)
    assert [len(one.tokens) for one in decoded] == [NEW] * len(PROMPTS)
    assert max(length for one in decoded for length in one.step_lengths) > 1


@pytest.mark.parametrize("rule", [Sample(), Sample(temperature=1.3, top_k=4, top_p=0.9)])
def test_sample_distribution(rule: Sample) -> None:
    """Texts through random trees are distributed as plain sampling distributes them; many drafts are accepted."""
    base = small_base()
    trees = RandomTrees(base, 12, 3, planted=False)
    decoder = TreeDecoder(base, None, trees, acceptance=rule, probe=False)
    assert p_value(counted(decoder), text_probabilities(base, rule)) > ALPHA
    decoded = decoder.generate([[1, 4, 2]] * 64, 8)
    assert np.mean([len(one.step_lengths) for one in decoded]) < 0.8 * 8


class Shared(RandomTrees):
    """One random tree a step for all rows, with the first row's tokens below every root."""

    def grown(self, roots: list[int], recent: list[list[int]] | None) -> Drafts:
        drafts = super().grown(roots[:1], None if recent is None else recent[:1])
        tokens = drafts.tokens.repeat(len(roots), 1)
        tokens[:, 0] = torch.tensor(roots)
        first = {name: getattr(drafts.tree, name)[0] for name in BUFFER_NAMES}
        return Drafts(tokens, dataclasses.replace(drafts.tree, **first))


def test_one_tree_for_all_rows() -> None:
    """A step's tree may be shared by the rows."""
    base = tiny_base("qwen2-mixed", 3)
    decoded = TreeDecoder(base, None, Shared(base, 16, 3)).generate(PROMPTS, NEW)
    assert [one.tokens for one in decoded] == [stock(base, prompt, NEW) for prompt in PROMPTS]
    assert any(max(one.step_lengths) > 1 for one in decoded)


class Asking(RandomTrees):
    """Reads the last `window` tokens, and notes them."""

    def __init__(self, base: Base, window: int) -> None:
        super().__init__(base, 12, 3)
        self.window = window
        self.shown: list[list[list[int]] | None] = []

    def grown(self, roots: list[int], recent: list[list[int]] | None) -> Drafts:
        self.shown.append(recent)
        return super().grown(roots, None)


@pytest.mark.parametrize("window", [0, 1, 2, 5, 40])
def test_recent_tokens(window: int) -> None:
    """A drafter knows the end of each row's prompt and text, root included, also when rows have left."""
    base = tiny_base("llama", 2)
    trees = Asking(base, window)
    decoder = TreeDecoder(base, None, trees)
    rows, texts = decoder.prefill(PROMPTS, 60), [list(prompt) for prompt in PROMPTS]
    for left in ([0, 1, 2, 3], [0, 1, 2, 3], [1, 3], [1], [1]):
        rows.keep([row for row, index in enumerate(rows.indices) if index in left])
        whole = [[*texts[index], root] for index, root in zip(rows.indices, rows.roots, strict=True)]
        for index, step in zip(rows.indices, decoder.step(rows), strict=True):
            texts[index] += step
        assert trees.shown[-1] == ([text[-window:] for text in whole] if window else None)
    assert texts[1][1:] == stock(base, PROMPTS[1], len(texts[1]) - 1)


def test_static_tree_of_the_heads_is_the_tree() -> None:
    """A decoder given heads and a tree is one given their source of trees."""
    base, tree = tiny_base("llama", 2), Tree.from_paths([(rank,) for rank in range(VOCAB)])
    heads = random_heads(base, 2)
    trees = StaticTree(HeadsProposer(base, heads), tree, base.device)
    given, made = TreeDecoder(base, None, trees), TreeDecoder(base, heads, tree)
    assert given.tree == made.tree == tree
    assert given.generate(PROMPTS, NEW) == made.generate(PROMPTS, NEW)


@pytest.mark.parametrize("seed", range(3))
def test_rewound_rows_continue_from_the_mark(seed: int) -> None:
    """Rows that are rewound to a mark continue as if the steps since then had not been."""
    base = tiny_base("mistral", seed)
    decoder = TreeDecoder(base, None, RandomTrees(base, 16, 4, seed))
    rows, texts = decoder.prefill(PROMPTS, 60), [list(prompt) for prompt in PROMPTS]
    for index, step in enumerate(decoder.step(rows)):
        texts[index] += step
    mark, lengths = rows.mark(), rows.session.lengths
    assert any(len(step) > 1 for _ in range(3) for step in decoder.step(rows))
    rows.rewind(mark)
    assert rows.session.lengths == lengths == [len(text) for text in texts]
    for _ in range(3):
        for index, step in enumerate(decoder.step(rows)):
            texts[index] += step
    for prompt, text in zip(PROMPTS, texts, strict=True):
        assert text[len(prompt) :] == stock(base, prompt, len(text) - len(prompt))


def test_errors_are_the_decoders() -> None:
    """No room, and a base that cannot verify trees, are the errors of any decoder."""
    base = tiny_base("llama", max_position_embeddings=40)
    with pytest.raises(TreeoptError) as caught:
        decoder_of(base).generate([PROMPTS[2]], 11)
    assert caught.value.code is Code.CONTEXT_FULL
    with pytest.raises(TreeoptError) as caught:
        decoder_of(tiny_base("mpt"))
    assert caught.value.code is Code.NO_TREES


def test_compiled_forward_gives_the_same_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced whole by torch.compile's tracer, trees that change leave the forward's shapes alone."""
    base = tiny_base("llama", 6)
    monkeypatch.setattr(torch, "compile", lambda model, **_: torch._dynamo.optimize("eager")(model))
    plain, compiled = (TreeDecoder(base, None, RandomTrees(base, 12, 3, 6), compile=asked) for asked in (False, True))
    for prompts in (PROMPTS[0], PROMPTS[1:3]):
        assert compiled.generate(prompts, 12) == plain.generate(prompts, 12)


def test_senseless_trees_cost_steps_only() -> None:
    """Another row's tree under a row's tokens loses most right drafts, and changes no text."""
    base = tiny_base("llama", 2)

    class Off(RandomTrees):
        def grown(self, roots: list[int], recent: list[list[int]] | None) -> Drafts:
            drafts = super().grown(roots, recent)
            return Drafts(drafts.tokens, compile_parents(drafts.tree.parents.roll(1, 0), self.depth))

    right, off = (TreeDecoder(base, None, kind(base, 30, 3)).generate(PROMPTS, NEW) for kind in (RandomTrees, Off))
    assert [one.tokens for one in off] == [one.tokens for one in right]
    assert sum(len(one.step_lengths) for one in off) > sum(len(one.step_lengths) for one in right)
