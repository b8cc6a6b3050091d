"""Random cases: model, attention, tree, prompts, batch, end of text and context; always the text of stock generate.

TREEOPT_CASES=2200 python -m pytest tests/runtime/test_cases.py runs more of them.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from helpers import random_tree
from tiny import TREE_FAMILIES, VOCAB, random_heads, tiny_base

from treeopt.models.base import Base
from treeopt.runtime.decode import TreeDecoder

CASES = int(os.environ.get("TREEOPT_CASES", "330"))
CONTEXT = {"gpt2": "n_positions"}  # where the setting has another name than in the others


def stock(base: Base, prompt: list[int], max_new_tokens: int) -> list[int]:
    """The base model's own greedy continuation."""
    ids = torch.tensor([prompt])
    return base.generate(ids, torch.ones_like(ids), max_new_tokens)[0, len(prompt) :].tolist()


@pytest.mark.parametrize("family", TREE_FAMILIES)
def test_random_cases(family: str) -> None:
    """Every row of every case equals its own plain greedy text; drafts are accepted."""
    tokens = steps = 0
    for case in range(CASES // len(TREE_FAMILIES)):
        rng = np.random.default_rng([TREE_FAMILIES.index(family), case])
        new, rows = int(rng.integers(1, 20)), int(rng.integers(1, 5))
        lengths = rng.integers(1, 40, rows)
        config = {CONTEXT.get(family, "max_position_embeddings"): int(lengths.max()) + new + int(rng.integers(3))}
        if family != "gemma2":
            config["attn_implementation"] = ("eager", "sdpa")[case % 2]
        base = tiny_base(family, int(rng.integers(1000)), **config)
        depth = int(rng.integers(1, 6))
        ranks = int(rng.integers(8, 40))
        nodes = int(rng.integers(1, 70 if depth > 1 else ranks))  # so many there are at any depth
        tree = random_tree(case, nodes=nodes, depth=depth, ranks=ranks)
        heads = random_heads(base, depth, case, blocks=int(rng.integers(2)), shared=bool(rng.integers(2)))
        prompts = [rng.integers(VOCAB, size=length).tolist() for length in lengths]
        if rng.integers(2):
            base.model.generation_config.eos_token_id = rng.integers(VOCAB, size=3).tolist()
        found = TreeDecoder(base, heads, tree, probe=case < 2).generate(prompts, new)
        assert [one.tokens for one in found] == [stock(base, prompt, new) for prompt in prompts], f"case {case}"
        tokens += sum(len(one.tokens) for one in found)
        steps += sum(len(one.step_lengths) for one in found)
    assert tokens > 1.05 * steps
