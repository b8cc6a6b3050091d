"""Validation of typical acceptance: predicted steps, and the quality of its texts beside greedy and sampled ones."""

from __future__ import annotations

import dataclasses

import pytest
from drafters import planted, prompts_of, quick_drafter
from helpers import random_tree
from tiny import random_heads, tiny_base

from treeopt.decode.rules import Typical
from treeopt.evaluate.baselines import AUTOREGRESSIVE, GENERATE, TREE, Call, with_generate
from treeopt.evaluate.quality import quality
from treeopt.evaluate.validate import validate
from treeopt.evaluate.validate_typical import SAMPLED, TypicalValidation
from treeopt.policy import TreePolicy

RULE = Typical(1.5, 0.02, 0.5)
TREE_OF = random_tree(5, nodes=30, depth=2, ranks=8)


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
    assert set(found.smaller) == {4, 8, 16}
    assert 1 <= found.smaller[4] <= found.smaller[16]


def test_validate_typical_predicts_texts_of_the_tree() -> None:
    """Where the tree's texts end elsewhere than those of stock generate, their own tokens are predicted."""
    base = tiny_base("llama", 1)
    greedy = with_generate(base)([prompts_of(6, 1)[0].prompt], 15, Call(0))[0].tokens
    base.model.generation_config.eos_token_id = greedy[2]
    found = validate(base, random_heads(base, 2, 1), TREE_OF, prompts_of(6, 5), acceptance=RULE, max_new_tokens=15)
    assert found.metrics.tokens != sum(len(text.answer) for text in found.texts)
    assert found.metrics.predicted_tokens_per_step == found.tokens_per_step


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


def test_validate_typical_of_a_policy() -> None:
    """Trees chosen per step are predicted too."""
    base, heads = planted(3)
    drafter = quick_drafter(base, heads)
    policy = TreePolicy(12, drafter.depth, drafter.id)
    rule = Typical(2.0, 0.02, 0.5)
    found = validate(
        base, heads, policy, prompts_of(6, 4), drafter=drafter, acceptance=rule, max_new_tokens=15, batch_size=4
    )
    assert found.prediction_misses == ()
    assert found.predicted.tokens_per_step == found.tokens_per_step > 1.5
    assert found.quality[TREE].agreement < 1
