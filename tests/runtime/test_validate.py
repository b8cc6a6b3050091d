"""Validate: a right decoder is proved, its figures hang together, and a wrong one is found out."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import cycle_base, cycle_heads, random_heads, tiny_base
from torch import Tensor

from treeopt.build.replay import Replay
from treeopt.build.trees import build_tree
from treeopt.calibrate.measure import run_calibration
from treeopt.calibrate.prompts import PromptSet, load_prompts
from treeopt.calibrate.texts import Text, encode
from treeopt.calibration import Calibration
from treeopt.models.base import Base
from treeopt.models.layouts import LoadedHeads
from treeopt.runtime import accept
from treeopt.runtime.validate import Pace, PromptResult, Validation, validate
from treeopt.tree import Tree

NEW_TOKENS = 48


@pytest.fixture(scope="module")
def stories(shared: Path) -> PromptSet:
    """Six story openings."""
    return load_prompts(str(shared / "data" / "story_openings.json"), limit=6)


@pytest.fixture(scope="module")
def calibration(base: Base, loaded: LoadedHeads, stories: PromptSet) -> Calibration:
    """The heads' traces over those openings, run one by one, as validation runs them."""
    return run_calibration(base, loaded, stories, max_new_tokens=NEW_TOKENS, batch_size=1).calibration


@pytest.fixture(scope="module")
def tree(calibration: Calibration) -> Tree:
    """The best tree of 16 nodes by that calibration."""
    return build_tree(calibration, 16)


@pytest.fixture(scope="module")
def texts(base: Base, stories: PromptSet) -> list[Text]:
    """The openings' token ids."""
    return [Text(p.id, encode(p, base.tokenizer, chat_template=True)[0], []) for p in stories.prompts]


@pytest.fixture(scope="module")
def validation(base: Base, loaded: LoadedHeads, tree: Tree, texts: list[Text]) -> Validation:
    """That tree, proved on its own calibration prompts."""
    return validate(base, loaded.heads, tree, texts, max_new_tokens=NEW_TOKENS)


def test_validate_lossless(validation: Validation) -> None:
    """Every text is that of stock generate."""
    assert validation.lossless
    assert validation.differences == ()


def test_validate_predicted_is_measured(validation: Validation) -> None:
    """Steps were predicted exactly, prompt by prompt, and so was how deep drafts are accepted."""
    assert validation.prediction_misses == ()
    assert [result.steps for result in validation.results] == [result.predicted_steps for result in validation.results]
    assert validation.predicted.tokens_per_step == validation.tokens_per_step
    np.testing.assert_allclose(validation.measured_by_depth, validation.predicted.acceptance_by_depth())
    assert validation.tokens_per_step > 1.5


def test_validate_expected_is_measured(validation: Validation, tree: Tree) -> None:
    """On the calibration's own prompts and budget the tree's expectation, of six digits, is what is measured."""
    assert tree.expected is not None
    assert validation.expected_tokens_per_step == tree.expected.replay
    assert validation.tokens_per_step == pytest.approx(tree.expected.replay, abs=1e-6)


def test_validate_fields_consistent(validation: Validation, texts: list[Text], tree: Tree) -> None:
    """Tokens and steps add up, and ratios are those of the counts and seconds beside them."""
    assert [result.prompt_id for result in validation.results] == [text.prompt_id for text in texts]
    assert validation.tree.tokens == sum(result.tokens for result in validation.results) == 6 * NEW_TOKENS
    assert validation.tree.steps == sum(result.steps for result in validation.results)
    assert validation.tokens_per_step == validation.tree.tokens / validation.tree.steps
    assert validation.one_by_one.tokens == validation.one_by_one.steps == validation.generate.tokens == 6 * NEW_TOKENS
    assert len(validation.measured_by_depth) == tree.depth
    tree_step = validation.tree.seconds / validation.tree.steps
    plain_step = validation.one_by_one.seconds / validation.one_by_one.steps
    assert validation.overhead == pytest.approx(tree_step / plain_step)
    assert validation.speedup == pytest.approx(validation.tokens_per_step / validation.overhead)
    for pace in (validation.tree, validation.one_by_one, validation.generate):
        assert pace.texts == 6
        assert min(pace.seconds, pace.prefill_seconds) > 0
        assert pace.tokens_per_second == pytest.approx((6 * NEW_TOKENS - 6) / pace.seconds)
    assert validation.made_by["dtype"] == "float32"
    assert validation.made_by["threads"] == "1"


def test_validate_tree_without_expectation(base: Base, loaded: LoadedHeads, texts: list[Text]) -> None:
    """A tree that says nothing about itself is proved all the same, with nothing to compare."""
    done: list[tuple[int, int]] = []
    result = validate(
        base,
        loaded.heads,
        Tree.chain(2),
        texts[:2],
        max_new_tokens=12,
        progress=lambda at, total, _note: done.append((at, total)),
    )
    assert (result.lossless, result.prediction_misses, result.expected_tokens_per_step) == (True, (), None)
    assert done == [(1, 2), (2, 2)]


@pytest.mark.parametrize("budget", [1, 2])
def test_validate_small_budget(budget: int) -> None:
    """One or two tokens a text can be proved as well; a pace of no decoded token is none."""
    base = tiny_base("llama")
    result = validate(base, random_heads(base, 2), Tree.chain(2), [Text("a:0", [3, 5], [])], max_new_tokens=budget)
    assert result.lossless
    assert result.results[0].tokens == budget
    assert (result.tree.tokens_per_second is None) == (budget == 1)


def test_validate_end_of_text() -> None:
    """Texts that end early, within a step, are proved and predicted."""
    base = cycle_base(1)
    heads = cycle_heads(base, 4, 1)
    free = validate(base, heads, Tree.chain(4), [Text("a:0", [3, 8], [])], max_new_tokens=20)
    assert [(r.tokens, r.steps) for r in free.results] == [(20, 4)]
    text = base.generate(torch.tensor([[3, 8]]), torch.ones(1, 2).long(), 20)[0, 2:].tolist()
    base.model.generation_config.eos_token_id = text[12]
    ended = validate(base, heads, Tree.chain(4), [Text("a:0", [3, 8], [])], max_new_tokens=20)
    assert ended.results == (PromptResult("a:0", 13, 3, 3),)
    assert ended.lossless
    assert ended.measured_by_depth == (1.0, 1.0, 2 / 3, 2 / 3)


def test_validate_planted_acceptance(
    base: Base, loaded: LoadedHeads, tree: Tree, texts: list[Text], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decoder that always accepts the last node is reported, with the first wrong position and the logits' gap."""

    def last_node(tokens: Tensor, _choice: Tensor, _parents: Tensor, _ancestors: Tensor) -> Tensor:
        return torch.tensor([tokens.shape[1] - 1])

    monkeypatch.setattr(accept, "greedy", last_node)
    result = validate(base, loaded.heads, tree, texts[:3], max_new_tokens=NEW_TOKENS)
    assert not result.lossless
    assert [difference.prompt_id for difference in result.differences] == [text.prompt_id for text in texts[:3]]
    assert result.prediction_misses
    for text, difference in zip(texts, result.differences, strict=False):
        ids = torch.tensor([text.prompt])
        out = base.generate(ids, torch.ones_like(ids), NEW_TOKENS)[0, len(text.prompt) :].tolist()
        assert difference.greedy_token == out[difference.position]
        assert difference.found_token != difference.greedy_token
        prefix = torch.tensor([[*text.prompt, *out[: difference.position]]])
        with torch.inference_mode():
            logits = base.model(prefix).logits[0, -1]
        gap = float(logits[difference.greedy_token] - logits[difference.found_token])
        assert gap > 0
        assert difference.gap == pytest.approx(gap, abs=1e-4)


def test_validate_planted_single_steps(base: Base, loaded: LoadedHeads, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decoder that accepts nothing is lossless, but its steps are not the predicted ones."""
    monkeypatch.setattr(accept, "greedy", lambda *_inputs: torch.tensor([0]))
    result = validate(base, loaded.heads, Tree.chain(3), [Text("a:0", [1, 403, 407], [])], max_new_tokens=40)
    assert result.lossless
    assert result.prediction_misses == result.results
    assert result.results[0].steps == 40 > result.results[0].predicted_steps


def test_validate_planted_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text that goes on where stock generate had ended differs there, with no token on the one side."""
    base = cycle_base(1)
    out = base.generate(torch.tensor([[3, 8]]), torch.ones(1, 2).long(), 20)[0, 2:].tolist()
    base.model.generation_config.eos_token_id = out[7]
    monkeypatch.setattr("treeopt.runtime.decode._cut", lambda tokens, left, _ends: tokens[:left])
    result = validate(base, cycle_heads(base, 4, 1), Tree.chain(4), [Text("a:0", [3, 8], [])], max_new_tokens=20)
    (difference,) = result.differences
    assert (difference.position, difference.greedy_token, difference.found_token) == (8, -1, out[8])
    assert math.isnan(difference.gap)


def test_speedup_hand_written() -> None:
    """120 tokens in 40 steps of 30 ms against steps of 10 ms: tau 3, overhead 3, speed-up 1."""
    nothing = Replay(np.zeros(0, np.int8), np.zeros(0, np.bool_), np.zeros(1, np.int64), 1)
    tree, plain = Pace(120, 40, 1.2, 0.5, 1), Pace(120, 120, 1.2, 0.5, 1)
    result = Validation((), (), nothing, (), None, tree, plain, plain, {})
    assert result.tokens_per_step == pytest.approx(3.0)
    assert result.overhead == pytest.approx(3.0)
    assert result.speedup == pytest.approx(1.0)
