"""Random cases: model, attention, tree, prompts, batch, end of text and context; always the text of stock generate.

TREEOPT_CASES=2200 python -m pytest tests/decode/test_cases.py runs more of them.
"""

from __future__ import annotations

import dataclasses
import os

import numpy as np
import pytest
from decoding import stock
from drafters import SIZE_COST, answered, learned
from helpers import random_tree
from tiny import TREE_FAMILIES, VOCAB, random_heads, tiny_base

from treeopt.decode.decoder import TreeDecoder
from treeopt.drafting.plans import num_candidates
from treeopt.evaluate.runs import predict
from treeopt.policy import TreePolicy
from treeopt.texts.encode import Text

CASES = int(os.environ.get("TREEOPT_CASES", "66"))
DRAFTER_CASES = CASES // 6
CONTEXT = {"gpt2": "n_positions"}  # where the setting has another name than in the others


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


@pytest.mark.parametrize("family", TREE_FAMILIES)
def test_random_cases_of_drafters(family: str) -> None:
    """The same with learned drafters, heads and heads+ngram: static trees, per-step trees, and those with size_cost."""
    for case in range(DRAFTER_CASES // len(TREE_FAMILIES)):
        rng = np.random.default_rng([1, TREE_FAMILIES.index(family), case])
        new, rows, num_heads = int(rng.integers(1, 20)), int(rng.integers(1, 4)), int(rng.integers(1, 4))
        lengths = rng.integers(1, 40, rows)
        config = {CONTEXT.get(family, "max_position_embeddings"): int(lengths.max()) + new + int(rng.integers(3))}
        base = tiny_base(family, int(rng.integers(1000)), **config)
        if rng.integers(2):
            base.model.generation_config.eos_token_id = rng.integers(VOCAB, size=3).tolist()
        heads = random_heads(base, num_heads, case)
        prompts = [rng.integers(VOCAB, size=length).tolist() for length in lengths]
        texts = answered(base, [Text(f"set:{i}", prompt, []) for i, prompt in enumerate(prompts)], new)
        drafter = learned(base, heads, texts, ngram=case % 3 > 0, tokens=0, new=new).drafter
        tree = random_tree(
            case, nodes=int(rng.integers(2, 9)), depth=drafter.depth, ranks=min(8, num_candidates(drafter))
        )
        for plan in (
            dataclasses.replace(tree, drafter=drafter.id),
            TreePolicy(int(rng.integers(2, 60)), int(rng.integers(1, 6)), drafter.id),
            TreePolicy(16, drafter.depth, drafter.id, SIZE_COST),
        ):
            found = TreeDecoder(base, heads, plan, drafter=drafter, probe=False).generate(prompts, new)
            assert [one.tokens for one in found] == [text.answer for text in texts], f"case {case}"
            alone = TreeDecoder(base, heads, plan, drafter=drafter, probe=False).generate(prompts[0], new)
            steps = predict(base, heads, plan, texts[:1], drafter).steps
            assert (alone.tokens, len(alone.step_lengths)) == (texts[0].answer, steps), f"case {case}"
