"""What tests of `tree_generate` share: a tiny model of transformers, and heads for it."""

from __future__ import annotations

import pytest
from tiny import random_heads, tiny_base
from transformers import PreTrainedModel

from treeopt.models.base import Base
from treeopt.models.heads import MedusaHeads


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    """A model whose texts vary."""
    base = tiny_base("llama", 2)
    base.model.generation_config.pad_token_id = 0
    return base.model


@pytest.fixture(scope="module")
def heads(model: PreTrainedModel) -> MedusaHeads:
    """Random heads for it."""
    return random_heads(Base(model, None, "tiny"), 2, 4)
