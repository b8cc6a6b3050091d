"""Sampling on the route of paths: long texts of a recurrent model have its distribution, and a wrong rule has not."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from chances import ALPHA
from conftest import ROOT_FOLDER
from torch import Tensor

from treeopt.decode.rules import Sample
from treeopt.drafting.interface import Drafts
from treeopt.models.base import Base
from treeopt.verify.probe import route_of

FAMILY = "qwen3_5_text"  # one recurrent layer and one of attention; accepted tokens are replayed
TEXTS, NEW = 8, 60


class DrawnPerChild(Sample):
    """Wrong: as the rule of this name in chances.py, for trees that differ by row."""

    def accept(self, drafts: Drafts, logits: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        choice = self.choose(logits, drafts, generator)
        at_parents = logits[torch.arange(len(logits))[:, None], drafts.tree.parents]
        own = self.choose(at_parents, drafts, generator)  # a draw at the parent, for each node
        right = (own == drafts.tokens)[:, None, :] | ~drafts.tree.attention_mask
        right[:, :, 0] = True
        node = right.all(-1).mul(torch.arange(drafts.tokens.shape[1])).amax(-1)
        return node, choice.gather(1, node[:, None])[:, 0]


@pytest.fixture(scope="module")
def bench() -> Any:
    """The part of bench/sampling.py that makes the texts and tests them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT_FOLDER / "bench"))
        yield importlib.import_module("sampled_paths")


@pytest.fixture(scope="module")
def base(bench: Any) -> Base:
    """A recurrent model with five tokens."""
    made: Base = bench.small_family(FAMILY, NEW + 16)
    assert route_of(made) == "paths"
    return made


def test_texts_have_the_distribution_of_the_model(bench: Any, base: Base) -> None:
    """The tokens of a batch of texts, of which many are accepted drafts."""
    p, tokens_per_step = bench.p_of_texts(base, Sample(seed=3), TEXTS, NEW)
    assert p > ALPHA
    assert tokens_per_step > 1.2


def test_a_wrong_rule_is_caught(bench: Any, base: Base) -> None:
    """A draw for every child, where one for every node is right: drafts are accepted too often."""
    assert bench.p_of_texts(base, DrawnPerChild(seed=3), TEXTS, NEW)[0] < ALPHA
