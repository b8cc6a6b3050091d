"""Per-step trees: whatever tree each row is given at each step, the text is the base model's own."""

from __future__ import annotations

import numpy as np
import pytest
from chances import ALPHA, counted, p_value, small_base, text_probabilities
from decoding import stock
from looped import looped
from random_trees import RandomTrees
from tiny import TREE_FAMILIES, tiny_base

from treeopt.decode.decoder import TreeDecoder
from treeopt.decode.rules import Rule, Sample
from treeopt.drafting.interface import Drafts
from treeopt.models.base import Base

NEW = 16
PROMPTS = [[3, 8, 21], [40], list(range(5, 35)), [9] * 17]  # shorter and longer than the sliding windows


def decoder_of(base: Base, *, nodes: int = 16, depth: int = 4, rule: Rule | None = None, seed: int = 0) -> TreeDecoder:
    """A decoder with random trees."""
    return TreeDecoder(base, None, RandomTrees(base, nodes, depth, seed), acceptance=rule)


@pytest.mark.parametrize("family", TREE_FAMILIES)
@pytest.mark.parametrize(("nodes", "depth"), [(40, 6), pytest.param(2, 1, marks=pytest.mark.slow)])
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


@pytest.mark.parametrize("rule", [Sample(), Sample(temperature=1.3, top_k=4, top_p=0.9)])
@pytest.mark.slow
def test_sample_distribution(rule: Sample) -> None:
    """Texts through random trees are distributed as plain sampling distributes them; many drafts are accepted."""
    base = small_base()
    trees = RandomTrees(base, 12, 3, planted=False)
    decoder = TreeDecoder(base, None, trees, acceptance=rule, probe=False)
    assert p_value(counted(decoder), text_probabilities(base, rule)) > ALPHA
    decoded = decoder.generate([[1, 4, 2]] * 64, 8)
    assert np.mean([len(one.step_lengths) for one in decoded]) < 0.8 * 8


class Asking(RandomTrees):
    """Reads the last `window` tokens, and notes them."""

    def __init__(self, base: Base, window: int) -> None:
        super().__init__(base, 12, 3)
        self.window = window
        self.shown: list[list[list[int]] | None] = []

    def grown(self, roots: list[int], recent: list[list[int]] | None) -> Drafts:
        self.shown.append(recent)
        return super().grown(roots, None)


@looped("window", [0, 1, 2, 5, 40])
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


@looped("seed", range(3))
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
