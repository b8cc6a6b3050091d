"""DSpark's confidence head in the score: the numbers that are fitted, what they do, and the file that has them."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import numpy as np
import pytest
import torch

import treeopt
from treeopt.drafter import Drafter
from treeopt.drafting.fit import _logistic_loss, _minimum
from treeopt.errors import Code, TreeoptError
from treeopt.files.drafters import load_drafter, save_drafter
from treeopt.models.block_heads import log_odds, with_confidence

DSPARK = str(Path(__file__).resolve().parent.parent / "data" / "pocket-dspark")


def test_likeliest_token_gets_the_log_odds() -> None:
    """a + b own + c head, and the other tokens share the rest as before."""
    logits = torch.randn(5, 3, 11, generator=torch.Generator().manual_seed(0))
    sure = torch.randn(5, 3, generator=torch.Generator().manual_seed(1))
    own, index = log_odds(logits)
    chance = logits.softmax(-1).amax(-1).double()
    torch.testing.assert_close(own[..., 0], (chance / (1 - chance)).log(), rtol=1e-4, atol=1e-4)
    changed = with_confidence(logits, sure, (0.2, 0.7, 0.5))
    wanted = (0.2 + 0.7 * own[..., 0] + 0.5 * sure).sigmoid()
    torch.testing.assert_close(changed.softmax(-1).gather(-1, index)[..., 0].double(), wanted, rtol=1e-4, atol=1e-5)
    apart = (changed - logits).scatter(-1, index, 0.0)
    assert torch.equal(apart, torch.zeros_like(apart))


def test_fit_finds_the_numbers() -> None:
    """Of drawn outcomes with known log-odds."""
    rng = np.random.default_rng(0)
    features = np.stack([np.ones(40_000), rng.normal(size=40_000), rng.normal(size=40_000)], axis=1)
    right = rng.random(40_000) < 1 / (1 + np.exp(-features @ [0.3, 0.8, 0.4]))
    loss = functools.partial(_logistic_loss, torch.from_numpy(features), torch.from_numpy(right).double())
    found = _minimum(torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64), loss)
    np.testing.assert_allclose(found.numpy(), [0.3, 0.8, 0.4], atol=0.05)


def test_learned_record(tmp_path: Path) -> None:
    """Every level has its numbers, which make the drafter another one; a file keeps them."""
    prompts = ["import os", "def main():", "class A:", "for i in range(3):"]
    learning = treeopt.Learning(0, ngram=False)
    found = treeopt.learn_drafter("pocket", prompts, draft=DSPARK, learning=learning, max_new_tokens=24, sizes=(4,))
    drafter = found.drafter
    assert [len(level.confidence) for level in drafter.levels] == [3] * drafter.depth
    save_drafter(drafter, tmp_path / "block.safetensors")
    assert load_drafter(tmp_path / "block.safetensors").id == drafter.id
    plain = [dataclasses.replace(level, confidence=()) for level in drafter.levels]
    assert dataclasses.replace(drafter, levels=tuple(plain), plan=None).id != drafter.id


def test_numbers_are_three() -> None:
    level = dataclasses.replace(Drafter.model_only(1, 4, "0").levels[0], confidence=(1.0,))
    with pytest.raises(TreeoptError, match="three numbers of confidence") as caught:
        dataclasses.replace(Drafter.model_only(1, 4, "0"), levels=(level,))
    assert caught.value.code is Code.DRAFTER_INVALID
