"""Batches: every row is decoded as if it were alone, in one forward a step, and by callers with loops of their own."""

from __future__ import annotations

import pytest
from decoding import HEADS, TREES, prompt_of, stock
from helpers import random_tree
from tiny import TREE_FAMILIES, but_slow, cycle_base, cycle_heads, random_heads, tiny_base

from treeopt.decode.decoder import TreeDecoder
from treeopt.errors import TreeoptError
from treeopt.models.base import Base
from treeopt.tree import Tree


def stock_rows(base: Base, prompts: list[list[int]], max_new_tokens: int) -> list[list[int]]:
    """Each prompt's own greedy continuation, one stock call a prompt."""
    return [stock(base, prompt, max_new_tokens) for prompt in prompts]


@pytest.mark.parametrize("family", TREE_FAMILIES)
@pytest.mark.parametrize("name", but_slow(["one node", "wide", "64 nodes"], "64 nodes"))
def test_batch_lossless(family: str, name: str) -> None:
    """Prompts of different lengths in one batch give, row by row, the text that each gives alone."""
    seed = list(TREES).index(name)
    base = tiny_base(family, seed)
    prompts = [prompt_of(10 * seed + number) for number in range(4)]
    decoded = TreeDecoder(base, random_heads(base, HEADS, seed), TREES[name]).generate(prompts, 20)
    assert [one.tokens for one in decoded] == stock_rows(base, prompts, 20)
    assert all(sum(one.step_lengths) == 20 for one in decoded)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "gpt2"])
def test_batch_steps_are_those_alone(family: str) -> None:
    """A row takes the steps that it takes alone, whatever the rows beside it do."""
    base = tiny_base(family, 2)
    decoder = TreeDecoder(base, random_heads(base, HEADS, 2), TREES["256 nodes"])
    prompts = [prompt_of(seed) for seed in range(3)]
    assert decoder.generate(prompts, 20) == [decoder.generate(prompt, 20) for prompt in prompts]


@pytest.mark.parametrize("disturbed", [0.0, 0.02])
def test_batch_rows_apart(disturbed: float) -> None:
    """Rows that accept different runs drift apart, end at different places, and stay right."""
    base, tree = cycle_base(2, disturbed=disturbed), random_tree(2, nodes=40, depth=4, ranks=5)
    prompts = [prompt_of(seed, longest=9) for seed in range(6)]
    base.model.generation_config.eos_token_id = [stock(base, prompts[0], 40)[5], stock(base, prompts[1], 40)[17]]
    decoded = TreeDecoder(base, cycle_heads(base, 4, 2), tree).generate(prompts, 40)
    assert [one.tokens for one in decoded] == stock_rows(base, prompts, 40)
    assert len({len(one.tokens) for one in decoded}) > 1
    assert len({tuple(one.step_lengths) for one in decoded}) > 2


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_batch_one_forward_a_step(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many rows, a step is one forward; the batch takes as many as its slowest row, and one for the prompts."""
    base = cycle_base(2, disturbed=0.02)
    decoder = TreeDecoder(base, cycle_heads(base, 4, 2), random_tree(2, nodes=40, depth=4, ranks=5))
    prompts = [prompt_of(seed, longest=9) for seed in range(rows)]
    seen: list[int] = []
    forward = base.model.forward
    monkeypatch.setattr(base.model, "forward", lambda *given, **more: (seen.append(1), forward(*given, **more))[1])
    decoded = decoder.generate(prompts, 40)
    verified = [len(one.step_lengths) - (one.step_lengths[-1] == 1) for one in decoded]
    assert max(verified) <= len(seen) - 1 <= max(len(one.step_lengths) for one in decoded)


def test_batch_context_end() -> None:
    """The longest row may reach the last position of learned positions while shorter ones are far from it."""
    base = tiny_base("gpt2", n_positions=40)
    prompts = [list(range(3, 25)), [7, 8], list(range(10))]
    decoder = TreeDecoder(base, random_heads(base, 8), random_tree(1, nodes=40, depth=8, ranks=5))
    assert [one.tokens for one in decoder.generate(prompts, 18)] == stock_rows(base, prompts, 18)
    with pytest.raises(TreeoptError, match="22 prompt tokens and 19 new ones") as caught:
        decoder.generate(prompts[::-1], 19)
    assert caught.value.at == "prompt 2"


def test_embedded_steps() -> None:
    """Whoever keeps the loop gets each row's tokens, its next token before they are emitted, and may drop rows."""
    base = cycle_base(1)
    decoder = TreeDecoder(base, cycle_heads(base, 4, 1), Tree.chain(2))
    prompts = [[3, 8], [5], [7, 9, 11]]
    texts = stock_rows(base, prompts, 12)
    rows = decoder.prefill(prompts, 12)
    assert rows.roots == [text[0] for text in texts]
    assert decoder.step(rows) == [text[:3] for text in texts]
    assert rows.roots == [text[3] for text in texts]
    rows.keep([0, 2])
    assert rows.indices == [0, 2]
    assert decoder.step(rows) == [texts[0][3:6], texts[2][3:6]]
    rows.keep([1])
    assert decoder.step(rows) == [texts[2][6:9]]
    assert rows.indices == [2]
