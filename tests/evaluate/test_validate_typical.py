"""Validation of typical acceptance: predicted steps, and the quality of its texts beside greedy and sampled ones."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from drafters import SIZE_COST, planted, prompts_of, quick_drafter
from helpers import random_tree
from looped import looped
from tiny import but_slow, cycle_base, cycle_heads, random_heads, tiny_base

from treeopt.decode.rules import Typical
from treeopt.evaluate.baselines import AUTOREGRESSIVE, GENERATE, TREE, Call, with_generate
from treeopt.evaluate.runs import num_ranks
from treeopt.evaluate.validate import (
    SAMPLED,
    TypicalValidation,
    agreement,
    distinct,
    log_likelihood,
    quality,
    validate,
)
from treeopt.models.base import Base
from treeopt.models.heads import MedusaHeads
from treeopt.policy import Plan, TreePolicy
from treeopt.texts.encode import Text
from treeopt.tree import Tree

RULE = Typical(1.5, 0.02, 0.5)
TREE_OF = random_tree(5, nodes=30, depth=2, ranks=8)
RULES = (Typical(0.7, 0.09, 0.3), Typical(1.5, 0.02, 0.5), Typical(0.5, 0.5, 0.99))
GAPS = Tree.from_paths([(0,), (9,), (0, 1), (0, 40), (9, 0), (9, 60)])  # 6 drafts, ranks up to 60
TREES = (
    Tree.chain(3),
    random_tree(5, nodes=30, depth=3, ranks=8),
    Tree(()),
    Tree(tuple((r,) for r in range(61))),
    GAPS,
)


def found_by(batch_size: int = 1, repeats: int = 1) -> TypicalValidation:
    """A random model with random heads: most accepted drafts are not its likeliest tokens."""
    base = tiny_base("llama", 1)
    options = {"max_new_tokens": 15, "batch_size": batch_size, "repeats": repeats}
    return validate(base, random_heads(base, 2, 1), TREE_OF, prompts_of(6, 5), acceptance=RULE, **options)


@pytest.fixture(scope="module")
def found() -> TypicalValidation:
    """Five prompts."""
    return found_by()


def test_validate_typical_is_predicted(found: TypicalValidation) -> None:
    """Replay of the rule on the tree's own texts gives the steps of the decoder."""
    assert found.prediction_misses == ()
    assert found.predicted.tokens_per_step == found.tokens_per_step > 1.1
    assert found.metrics.predicted_tokens_per_step == found.tokens_per_step
    assert found.measured_by_depth == tuple(found.predicted.acceptance_by_depth())


def test_validate_typical_measures_three_kinds_of_texts(found: TypicalValidation) -> None:
    """Greedy, sampled and typical texts of the same prompts, each with its quality."""
    assert found.metrics.baselines == (GENERATE, SAMPLED, AUTOREGRESSIVE, TREE)
    assert list(found.quality) == [GENERATE, SAMPLED, TREE]
    base = tiny_base("llama", 1)
    for name, one in found.quality.items():
        texts = [
            dataclasses.replace(text, answer=trial.runs[name][0].tokens)
            for text, trial in zip(found.texts, found.metrics.trials, strict=True)
        ]
        assert one == quality(base, texts, found.texts)
    greedy, sampled, typical = found.quality.values()
    assert greedy.agreement == 1 > max(sampled.agreement, typical.agreement)
    assert greedy.log_likelihood > max(sampled.log_likelihood, typical.log_likelihood)
    assert all(trial.runs[AUTOREGRESSIVE][0].tokens == trial.runs[GENERATE][0].tokens for trial in found.metrics.trials)


def test_validate_typical_is_reproducible(found: TypicalValidation) -> None:
    """The sampled texts have a seed, so the quality is the same again; in batches so are the tree's texts."""
    assert found_by().quality == found.quality
    batches = found_by(batch_size=3, repeats=2)
    assert batches.quality[TREE] == pytest.approx(found.quality[TREE])
    assert batches.prediction_misses == ()
    assert batches.metrics.repeats == 2


def predicted_exactly(base: Base, heads: MedusaHeads, tree: Plan, rule: Typical, new: int = 19, **more: Any) -> Any:
    """A validation whose steps are predicted, text by text."""
    options = {"acceptance": rule, "max_new_tokens": new, **more}
    found = validate(base, heads, tree, prompts_of(3, 6), **options)
    assert found.prediction_misses == ()
    assert found.predicted.tokens == found.metrics.tokens
    return found


@pytest.mark.parametrize("tree", but_slow(TREES, GAPS), ids=lambda tree: f"{tree.nodes} nodes")
def test_validate_typical_predicts_every_tree(tree: Tree) -> None:
    """Random heads, so many drafts are off the text; ranks up to the last one, and trees of one node."""
    base = tiny_base("llama", 1)
    for rule in RULES:
        predicted_exactly(base, random_heads(base, 3, 1), tree, rule)


def ended(base: Base) -> Base:
    """The model, which ends a text by a token that it often writes."""
    text = with_generate(base)([prompts_of(3, 6)[0].prompt], 9, Call(0))[0].tokens
    base.model.generation_config.eos_token_id = text[-1]
    return base


@pytest.mark.parametrize("end", [False, True])
def test_validate_typical_where_texts_are_cut(end: bool) -> None:
    """Texts that end by budget or by an end token within an accepted path, with heads that are often right."""
    base = cycle_base(disturbed=0.06)
    base = ended(base) if end else base
    tree = Tree.from_paths([(0,), (1,), (0, 0), (1, 0), (0, 0, 0)])
    for new in (1, 2, 7, 19):
        found = predicted_exactly(base, cycle_heads(base, 3), tree, RULES[0], new)
        assert new < 7 or found.tokens_per_step > 1
        assert not end or new < 19 or any(trial.tokens < new for trial in found.metrics.trials)


@pytest.mark.parametrize("cost", but_slow([(), SIZE_COST], SIZE_COST))
def test_validate_typical_of_policies(cost: tuple[tuple[int, float], ...]) -> None:
    """Trees chosen per step are predicted too, of one size and of several, alone and in batches."""
    base, heads = planted(3)
    base = ended(base)
    drafter = quick_drafter(base, heads)
    policy = TreePolicy(16, drafter.depth, drafter.id, cost)
    for size in (1, 4):
        found = predicted_exactly(base, heads, policy, Typical(2.0, 0.02, 0.5), drafter=drafter, batch_size=size)
        assert found.predicted.tokens_per_step == found.tokens_per_step > 1.5
        assert found.quality[TREE].agreement < 1  # the rule accepts what greedy decoding does not


@looped(
    ("answers", "n", "expected"),
    [
        ([[1, 2, 1, 2]], 1, 2 / 4),
        ([[1, 2, 1, 2]], 2, 2 / 3),  # 12, 21, 12
        ([[1, 2, 1, 2]], 3, 2 / 2),  # 121, 212
        ([[1, 2], [1, 2]], 2, 1 / 2),  # the same one twice; 21 would cross the texts
        ([[1, 2], [2, 1]], 2, 2 / 2),
        ([[5], [6]], 2, 0.0),
        ([[5, 5, 5, 5], [5, 5]], 1, 1 / 6),
    ],
)
def test_distinct_by_hand(answers: list[list[int]], n: int, expected: float) -> None:
    """Different n-grams of all texts over n-grams of all texts."""
    assert distinct(answers, n) == pytest.approx(expected)


@looped(
    ("answer", "greedy", "expected"),
    [
        ([1, 2, 3, 4], [1, 2, 9, 4], 2 / 4),  # a token that agrees after the first difference does not count
        ([1, 2], [1, 2, 3, 4], 2 / 4),  # one text had ended
        ([1, 2, 3, 4], [1, 2], 2 / 4),
        ([9], [1], 0.0),
        ([1, 2], [1, 2], 1.0),
    ],
)
def test_agreement_by_hand(answer: list[int], greedy: list[int], expected: float) -> None:
    """Tokens before the first difference, over those of the longer text."""
    assert agreement([answer], [greedy]) == expected


def test_agreement_sums_over_texts() -> None:
    """A long text counts more than a short one: it is a ratio of sums."""
    assert agreement([[1, 2, 3, 4, 5, 6], [7, 8]], [[1, 2, 3, 4, 5, 6], [8, 7]]) == 6 / 8


def test_log_likelihood_is_that_of_single_steps() -> None:
    """The mean over all tokens, prompts not counted, of the log-probability after a forward for each token."""
    base = tiny_base("llama", 2)
    answers = [[3, 4, 5], [7], [9, 9, 2, 60, 11]]
    texts = [Text(text.prompt_id, text.prompt, answer) for text, answer in zip(prompts_of(4, 3), answers, strict=True)]
    logs = []
    for text in texts:
        for i, token in enumerate(text.answer):
            logits = base.model(torch.tensor([[*text.prompt, *text.answer[:i]]])).logits[0, -1].tolist()
            logs.append(logits[token] - math.log(sum(math.exp(one) for one in logits)))
    assert len(logs) == 9
    assert log_likelihood(base, texts) == pytest.approx(sum(logs) / 9, abs=1e-5)


@pytest.mark.parametrize(("plan", "count"), [(GAPS, 61), (Tree(()), 1), (TreePolicy(12, 2, "d"), 11)])
def test_traced_candidates_reach_the_last_rank(plan: Plan, count: int) -> None:
    """A static tree has ranks up to its last one, whatever its nodes; a policy one child fewer than nodes."""
    assert num_ranks(plan) == count
