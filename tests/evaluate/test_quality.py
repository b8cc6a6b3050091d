"""Measures of texts: distinct n-grams and agreement by hand, likelihood against a loop over tokens."""

from __future__ import annotations

import math

import pytest
import torch
from drafters import prompts_of
from tiny import VOCAB, tiny_base

from treeopt.evaluate.quality import Quality, agreement, distinct, log_likelihood, quality
from treeopt.texts.encode import Text


@pytest.mark.parametrize(
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


@pytest.mark.parametrize(
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


def test_log_likelihood_of_a_uniform_model() -> None:
    """A model without preferences gives each token -log V."""
    base = tiny_base("llama")
    with torch.no_grad():
        base.lm_head.weight.zero_()
    assert log_likelihood(base, [Text("a:0", [1, 2], [3, 4, 5])]) == pytest.approx(-math.log(VOCAB))


def test_quality_of_greedy_texts() -> None:
    """All measures in one record; the greedy texts agree with themselves."""
    base = tiny_base("llama")
    texts = [Text("a:0", [1, 2], [3, 4, 3, 4])]
    found = quality(base, texts, texts)
    assert found == Quality(log_likelihood(base, texts), (0.5, 2 / 3, 1.0), 1.0)
