"""The compiled forward: one capture for each number of rows and capacity of the cache, and the text of the eager one.

The captures are counted by a backend that runs them without generating code.
"""

from __future__ import annotations

from typing import Any

import pytest
from decoding import HEADS, TREES, stock
from random_trees import RandomTrees
from tiny import TREE_FAMILIES, but_slow, random_heads, tiny_base
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from treeopt.decode.decoder import TreeDecoder
from treeopt.drafting.interface import Drafts, ProposerSession
from treeopt.models.base import Base
from treeopt.tree import Tree
from treeopt.verify.cache import bucket

NEW = 24
SHORT = [[3, 8, 21], [40], list(range(5, 35))]  # these end in the first bucket


def crossing(nodes: int) -> list[list[int]]:
    """Prompts of which the first crosses into the second bucket."""
    return [[5 + i % 50 for i in range(bucket(1) - nodes - NEW // 2)], [7, 9], list(range(30))]


def long_base(family: str, seed: int = 1) -> Base:
    """A tiny model whose context holds more than one bucket."""
    return tiny_base(family, seed, **{"n_positions" if family == "gpt2" else "max_position_embeddings": 600})


class VaryingTrees(RandomTrees):
    """Random trees of another number of nodes at each step, but the same for all rows."""

    def draft(self, session: ProposerSession, roots: Tensor, states: Tensor, context: int) -> Drafts:
        most, self.nodes = self.nodes, 2 + int(self._rng.integers(self.nodes - 1))
        try:
            return super().draft(session, roots, states, context)
        finally:
            self.nodes = most


def decoders(base: Base, trees: str) -> list[TreeDecoder]:
    """An eager decoder and a compiled one; they draft the same random trees as long as their calls are the same."""
    made = []
    for compile in (False, True):
        if trees == "static":
            made.append(TreeDecoder(base, random_heads(base, HEADS), TREES["64 nodes"], compile=compile))
        else:
            source = {"per step": RandomTrees, "varying": VaryingTrees}[trees](base, 20, 4, 3)
            made.append(TreeDecoder(base, None, source, compile=compile))
    return made


@pytest.mark.parametrize("trees", ["static", "varying"])
@pytest.mark.slow
def test_one_capture_for_each_batch_and_capacity(captures: CompileCounter, trees: str) -> None:
    """Alone and in batches, with texts that cross a bucket and rows that end: no shape is captured twice."""
    eager, compiled = decoders(long_base("llama"), trees)
    long = crossing(compiled.trees.nodes)

    def run(prompts: Any, new: int) -> int:
        assert compiled.generate(prompts, new) == eager.generate(prompts, new)
        return captures.frame_count

    assert run(SHORT[0], NEW) == 1  # one row in the first bucket
    assert run(SHORT[2], NEW) == 1
    assert run(SHORT[1], 7) == 1
    assert run(long[0], NEW) == 2  # one row in the second bucket
    assert run(long[0], NEW) == 2
    assert run(SHORT[0], NEW) == 2  # and back in the first
    assert run(SHORT, NEW) == 3  # three rows
    assert run(SHORT[::-1], NEW) == 3
    assert run(long, NEW) == 4
    assert run([*long[1:], SHORT[0]], NEW) == 4


@pytest.mark.parametrize("family", but_slow(TREE_FAMILIES, "gpt2", "qwen2-mixed"))
def test_text_is_stocks(captures: CompileCounter, family: str) -> None:
    """Every family gives the text of stock generate, beyond its sliding window, in one capture."""
    base = long_base(family)
    _, compiled = decoders(base, "static")
    assert [one.tokens for one in compiled.generate(SHORT[1:], NEW)] == [stock(base, one, NEW) for one in SHORT[1:]]
    assert captures.frame_count == 1


@pytest.mark.parametrize(
    ("family", "trees"),
    [
        ("gpt2", "static"),
        pytest.param("mistral", "per step", marks=pytest.mark.slow),
        pytest.param("qwen2-mixed", "varying", marks=pytest.mark.slow),
    ],
)
def test_rows_that_end(captures: CompileCounter, family: str, trees: str) -> None:
    """Rows that have ended stay as padding, and change nothing for the others."""
    base = long_base(family, 5)
    eager, compiled = decoders(base, trees)
    texts = [stock(base, prompt, NEW) for prompt in SHORT]
    ends = {texts[0][4], texts[1][11]}
    base.model.generation_config.eos_token_id = sorted(ends)
    texts = [stock(base, prompt, NEW) for prompt in SHORT]
    assert len({len(text) for text in texts}) > 1
    assert [one.tokens for one in eager.generate(SHORT, NEW)] == texts
    assert [one.tokens for one in compiled.generate(SHORT, NEW)] == texts
    assert captures.frame_count == 1


@pytest.mark.slow
def test_autoregressive_loop(captures: CompileCounter) -> None:
    """The tree of one node is captured like any other."""
    base = long_base("mistral")
    decoder = TreeDecoder(base, None, Tree(()), compile=True)
    for prompt in crossing(1):
        assert decoder.generate(prompt, NEW).tokens == stock(base, prompt, NEW)
    assert captures.frame_count == 2
